"""Request records as the engine writes them, made from the steps that a request went through."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.eval.records import CellRecord, RequestRecord

Step = tuple[int, int] | None
"""(drafted, accepted) of a decode step, or None for one without a draft."""


def served(
    steps: Sequence[Step],
    *,
    prompt_id: str = "p0",
    max_tokens: int = 10_000,
    token_ids: Sequence[int] | None = None,
    conversation: str | None = None,
) -> RequestRecord:
    """The record of a request whose prefill was followed by `steps`, cut at `max_tokens`; later steps never run."""
    sizes, accepted, drafted = [1], [], []
    for step in steps:
        left = max_tokens - sum(sizes)
        if left <= 0:
            break
        if step is not None:
            drafted.append(step[0])
            accepted.append(step[1])
        sizes.append(min(left, 1 + (0 if step is None else step[1])))
    tokens = list(range(sum(sizes))) if token_ids is None else list(token_ids)
    assert len(tokens) == sum(sizes)
    return RequestRecord(
        prompt_id=prompt_id,
        n_in=10,
        n_out=len(tokens),
        t_submit=0.0,
        t_first=0.1,
        t_finish=float(len(sizes)),
        chunk_times=[float(index) for index in range(len(sizes))],
        chunk_sizes=sizes,
        token_ids=tokens,
        finish_reason="length",
        per_step_accepted=accepted,
        per_step_drafted=drafted,
        conversation=conversation,
    )


def served_cell(
    requests: list[RequestRecord],
    *,
    dataset: str = "heldout",
    temperature: float = 0.0,
    batch_size: int = 1,
    counters: dict[str, int] | None = None,
) -> CellRecord:
    """A block of `requests` with the counters that the engine would have."""
    accepted = [count for request in requests for count in request.per_step_accepted or []]
    drafted = [count for request in requests for count in request.per_step_drafted or []]
    counted = {
        "preemptions": 0,
        "num_drafts": len(accepted),
        "num_draft_tokens": sum(drafted),
        "num_accepted_tokens": sum(accepted),
    }
    return CellRecord(
        dataset=dataset,
        batch_size=batch_size,
        temperature=temperature,
        max_tokens=64,
        block=0,
        makespan=1.0,
        mean_running=1.0,
        counters=counted if counters is None else counters,
        requests=requests,
        steps=[],
        harness_seconds=0.0,
    )
