"""A closed loop inside the engine's process: a new request is submitted as soon as one ends, until none is left.

Every engine step is logged: its seconds, how many requests ran in it, what came out. What the loop itself costs between
the engine's calls is the *harness overhead*, logged too, because it would count against the faster arm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from eyas.eval.plan import CellPlan
from eyas.eval.records import StepRecord


@dataclass(frozen=True)
class LoopRecord:
    """What a loop saw: a record per request in prompt order, the steps, and seconds inside the engine's calls.

    `held_back` counts the steps in which a submitted request waited for its turn: the engine then ran a smaller batch than
    was asked for.
    """

    requests: list[dict[str, Any]]
    steps: list[StepRecord]
    engine_seconds: float
    held_back: int

    @property
    def mean_running(self) -> float:
        """Time average of the batch that ran, over the seconds of the steps."""
        return sum(step.seconds * step.running for step in self.steps) / sum(step.seconds for step in self.steps)


def sampling_parameters(cell: CellPlan, *, index: int, stop_token_ids: list[int]) -> Any:
    """Sampling of the cell's `index`-th request: everything explicit.

    Whatever the target's generation_config recommends (vLLM's servers apply it silently) has no effect here.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=cell.temperature,
        top_p=cell.top_p,
        top_k=cell.top_k,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=cell.max_tokens,
        seed=None if cell.temperature == 0 else cell.seed + index,
        stop_token_ids=[] if cell.ignore_eos else stop_token_ids,
        ignore_eos=cell.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def run_closed_loop(llm: Any, cell: CellPlan, *, stop_token_ids: list[int], slowed_by: float = 0.0) -> LoopRecord:
    """Serve the cell's requests, `batch_size` at a time. With `slowed_by` each step takes that share longer."""
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    waiting = list(enumerate(cell.requests))[::-1]
    records: dict[str, dict[str, Any]] = {}
    steps: list[StepRecord] = []
    inside = held_back = 0
    submitting = 0.0
    began = time.perf_counter()
    while waiting or inside:
        while waiting and inside < cell.batch_size:
            index, request = waiting.pop()
            parameters = sampling_parameters(cell, index=index, stop_token_ids=stop_token_ids)
            now = time.perf_counter()
            records[str(index)] = _new_record(request, t_submit=now - began)
            engine.add_request(str(index), {"prompt_token_ids": request.token_ids}, parameters)
            submitting += time.perf_counter() - now
            inside += 1
        before = time.perf_counter()
        outputs = engine.step()
        if slowed_by:
            _wait(slowed_by * (time.perf_counter() - before))
        after = time.perf_counter()
        held = len(scheduler.waiting)  # submitted, but not in the batch of this step
        steps.append(_note_outputs(records, outputs, seconds=after - before, running=inside - held, now=after - began))
        inside -= sum(output.finished for output in outputs)
        held_back += bool(held)
    ordered = [records[str(index)] for index in range(len(cell.requests))]
    return LoopRecord(ordered, steps, submitting + sum(step.seconds for step in steps), held_back)


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine that runs inside this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), as all ours do."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def _wait(seconds: float) -> None:
    """Keep the core busy, as a slower engine would, and to the microsecond, as sleeping would not."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _note_outputs(
    records: dict[str, dict[str, Any]], outputs: list[Any], *, seconds: float, running: int, now: float
) -> StepRecord:
    """Add a step's outputs to the records of their requests; returns the record of the step."""
    tokens = prefills = 0
    for output in outputs:
        record = records[output.request_id]
        fresh = not record["token_ids"]
        tokens += _add_chunk(record, output, now)
        prefills += fresh and bool(record["token_ids"])
    return StepRecord(seconds, running, tokens, prefills)


def _new_record(request: Any, *, t_submit: float) -> dict[str, Any]:
    return {
        "prompt_id": request.prompt_id,
        "conversation": request.conversation,
        "n_in": len(request.token_ids),
        "t_submit": t_submit,
        "chunk_times": [],
        "chunk_sizes": [],
        "token_ids": [],
        "per_step_accepted": None,
        "per_step_drafted": None,
    }


def _add_chunk(record: dict[str, Any], output: Any, now: float) -> int:
    """Add one output to its request's record; returns the number of its tokens."""
    completion = output.outputs[0]
    if completion.token_ids:
        record["chunk_times"].append(now)
        record["chunk_sizes"].append(len(completion.token_ids))
        record["token_ids"].extend(completion.token_ids)
    if output.finished:
        record["t_first"] = record["chunk_times"][0] if record["chunk_times"] else now
        record["t_finish"] = now
        record["n_out"] = len(record["token_ids"])
        record["finish_reason"] = completion.finish_reason
        if completion.spec_decode_metrics is not None:
            record["per_step_accepted"] = list(completion.spec_decode_metrics.per_step_accepted)
            record["per_step_drafted"] = list(completion.spec_decode_metrics.per_step_drafted)
    return len(completion.token_ids)
