"""Fabricated cells whose step times follow a known law, for the tests of the cost model, the schedule and the ceiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eyas.eval.records import AR, ArmFacts, CellKey, CellRecord, Cells, RequestRecord, StepRecord
from tests.eval_records import cell

Law = Callable[[str, int], float]
"""(arm, requests that decode) -> seconds of the step."""

PREFILL = 0.004
ANSWER = 41
NOISE = (0.99, 1.0, 1.01)
"""Three starts that scatter little."""


def facts(lengths: Mapping[str, int], *, synthetic: bool = False) -> dict[str, ArmFacts]:
    """AR and head arms of these draft lengths."""
    arms = {AR: ArmFacts("ar", 0, None, False)}
    for arm, length in lengths.items():
        config = {"method": "eagle3", "model": "head", "num_speculative_tokens": length}
        arms[arm] = ArmFacts("head", length, config, synthetic)
    return arms


@dataclass
class Served:
    """A request on its way through the loop."""

    number: int
    submit: float
    chunks: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def step(self, accepts: Sequence[int], *, now: float, answer: int) -> int:
        """Take one step's tokens and return how many: one for the prompt, then the accepted drafts and one more."""
        size = 1
        if self.chunks:
            self.accepted.append(accepts[(len(self.accepted) + self.number) % len(accepts)])
            size = min(self.accepted[-1] + 1, answer - sum(self.chunks))
        self.chunks.append(size)
        self.times.append(now)
        return size

    def record(self, *, draft_length: int) -> RequestRecord:
        return RequestRecord(
            prompt_id=f"p{self.number}",
            n_in=10,
            n_out=sum(self.chunks),
            t_submit=self.submit,
            t_first=self.times[0],
            t_finish=self.times[-1],
            chunk_times=self.times,
            chunk_sizes=self.chunks,
            token_ids=list(range(sum(self.chunks))),
            finish_reason="length",
            per_step_accepted=self.accepted if draft_length else None,
            per_step_drafted=[draft_length] * len(self.accepted) if draft_length else None,
        )


def serve(
    arm: str,
    *,
    batch_size: int,
    law: Law,
    draft_length: int = 0,
    accepts: Sequence[int] = (0,),
    scale: float = 1.0,
    dataset: str = "heldout",
    temperature: float = 0.0,
    requests: int | None = None,
    answer: int = ANSWER,
) -> CellRecord:
    """A closed loop of requests of `answer` tokens; a request's successive steps accept `accepts` in turn.

    `scale` multiplies every step time: a start that happens to be slow.
    """
    count = requests or max(6, 2 * batch_size)
    waiting = [Served(number, 0.0) for number in range(count)][::-1]
    done: list[Served] = []
    live: list[Served] = []
    steps: list[StepRecord] = []
    now = 0.0
    while waiting or live:
        new = [waiting.pop() for _ in range(min(batch_size - len(live), len(waiting)))]
        for each in new:
            each.submit = now
        seconds = scale * ((law(arm, len(live)) if live else 0.0) + PREFILL * len(new))
        now += seconds
        live += new
        brought = sum(each.step(accepts, now=now, answer=answer) for each in live)
        steps.append(StepRecord(seconds, len(live), brought, len(new)))
        done += [each for each in live if sum(each.chunks) >= answer]
        live = [each for each in live if sum(each.chunks) < answer]
    records = [each.record(draft_length=draft_length) for each in sorted(done, key=lambda each: each.number)]
    return CellRecord(
        dataset=dataset,
        batch_size=batch_size,
        temperature=temperature,
        max_tokens=answer,
        block=0,
        makespan=now,
        mean_running=sum(each.t_finish - each.t_submit for each in records) / now,
        counters={},
        requests=records,
        steps=steps,
        harness_seconds=0.0,
    )


def session(
    law: Law,
    *,
    lengths: Mapping[str, int],
    accepts: Mapping[str, Sequence[int]],
    batch_sizes: Sequence[int],
    scales: Mapping[str, Sequence[float]] | None = None,
    dataset: str = "heldout",
    temperature: float = 0.0,
) -> Cells:
    """AR and the arms of `lengths` at every batch size, one start per scale (default: two equal starts)."""
    cells: Cells = {}
    for size in batch_sizes:
        by_arm = {}
        for arm in (AR, *lengths):
            by_arm[arm] = [
                [
                    serve(
                        arm,
                        batch_size=size,
                        law=law,
                        draft_length=lengths.get(arm, 0),
                        accepts=accepts.get(arm, (0,)),
                        scale=scale,
                        dataset=dataset,
                        temperature=temperature,
                    )
                ]
                for scale in (scales or {}).get(arm, (1.0, 1.0))
            ]
        cells[CellKey(dataset, temperature, size)] = by_arm
    return cells


def measured(
    rates: Mapping[int, Mapping[str, float]],
    *,
    noise: Sequence[float] = NOISE,
    dataset: str = "heldout",
    temperature: float = 0.0,
) -> Cells:
    """Cells at these tokens per second, one start per factor of `noise`."""
    return {
        CellKey(dataset, temperature, size): {
            arm: [
                [
                    cell(
                        rate * factor,
                        batch_size=size,
                        requests=max(4, size),
                        dataset=dataset,
                        temperature=temperature,
                    )
                ]
                for factor in noise
            ]
            for arm, rate in by_arm.items()
        }
        for size, by_arm in rates.items()
    }
