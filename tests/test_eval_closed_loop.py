"""The closed loop on a made-up engine and a made-up clock: what it submits when, and what it writes down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eyas.eval import closed_loop
from eyas.eval.closed_loop import LoopRecord, run_closed_loop
from eyas.eval.plan import CellPlan
from eyas.eval.records import StepRecord
from eyas.eval.workload import Request

STEP_SECONDS, ADD_SECONDS, TICK = 1.0, 0.25, 1e-4


class Clock:
    """Time passes only when the engine works, and a tick at every look."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        self.now += TICK
        return self.now


class Engine:
    """Gives every running request one token a step, `chunk` of them after the first; `limit` requests run at once."""

    def __init__(self, clock: Clock, *, length: int, chunk: int = 1, limit: int = 99) -> None:
        self.clock, self.length, self.chunk, self.limit = clock, length, chunk, limit
        self.given: dict[str, int] = {}
        self.taken_up: set[str] = set()
        self.most_at_once = 0

    def add_request(self, name: str, prompt: dict[str, Any], parameters: Any) -> None:
        assert prompt["prompt_token_ids"]
        assert parameters is not None
        self.clock.now += ADD_SECONDS
        self.given[name] = 0
        self.most_at_once = max(self.most_at_once, len(self.given))

    def step(self) -> list[Any]:
        self.clock.now += STEP_SECONDS
        outputs = []
        batch = list(self.given)[: self.limit]
        self.taken_up.update(batch)
        for name in batch:
            before = self.given[name]
            after = min(self.length, before + (self.chunk if before else 1))
            self.given[name] = after
            finished = after == self.length
            completion = SimpleNamespace(
                token_ids=list(range(before, after)),
                finish_reason="length" if finished else None,
                spec_decode_metrics=None
                if self.chunk == 1
                else SimpleNamespace(per_step_accepted=[1], per_step_drafted=[2]),
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion], finished=finished))
            if finished:
                del self.given[name]
        return outputs


def serve(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, *, requests: int, batch_size: int, slowed_by: float = 0.0
) -> LoopRecord:
    monkeypatch.setattr(closed_loop.time, "perf_counter", engine.clock.perf_counter)
    monkeypatch.setattr(closed_loop, "sampling_parameters", lambda *_, **__: "parameters")
    monkeypatch.setattr(closed_loop, "scheduler_of", lambda llm: Scheduler(llm.llm_engine))
    prompts = [Request("heldout", f"p{index}", [1, 2], "c" if index else None) for index in range(requests)]
    cell = CellPlan("heldout", batch_size, 0.0, 8, 0, prompts)
    return run_closed_loop(SimpleNamespace(llm_engine=engine), cell, stop_token_ids=[2], slowed_by=slowed_by)


class Scheduler:
    """Like vLLM's: a request waits until a step has taken it up, whatever ended in that step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def waiting(self) -> list[str]:
        return [name for name in self.engine.given if name not in self.engine.taken_up]


def test_a_new_request_is_submitted_as_soon_as_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Clock(), length=3)
    loop = serve(monkeypatch, engine, requests=5, batch_size=2)
    assert engine.most_at_once == 2
    assert [step.running for step in loop.steps] == [2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert [step.prefills for step in loop.steps] == [2, 0, 0, 2, 0, 0, 1, 0, 0]
    assert [step.tokens for step in loop.steps] == [2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert [record["prompt_id"] for record in loop.requests] == [f"p{index}" for index in range(5)]
    assert [record["conversation"] for record in loop.requests] == [None, "c", "c", "c", "c"]
    assert loop.held_back == 0


def test_times_are_since_the_block_began(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serve(monkeypatch, Engine(Clock(), length=3), requests=1, batch_size=1)
    (record,) = loop.requests
    assert record["t_submit"] == pytest.approx(0.0, abs=0.01)
    assert record["chunk_times"] == pytest.approx([1.25, 2.25, 3.25], abs=0.01)
    assert (record["t_first"], record["t_finish"]) == (record["chunk_times"][0], record["chunk_times"][-1])
    assert (record["n_in"], record["n_out"], record["finish_reason"]) == (2, 3, "length")


def test_seconds_inside_the_engine_are_steps_and_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serve(monkeypatch, Engine(Clock(), length=3), requests=4, batch_size=2)
    assert all(step.seconds == pytest.approx(STEP_SECONDS, abs=0.01) for step in loop.steps)
    assert loop.engine_seconds == pytest.approx(6 * STEP_SECONDS + 4 * ADD_SECONDS, abs=0.01)
    overhead = max(record["t_finish"] for record in loop.requests) - loop.engine_seconds
    assert 0 < overhead < 40 * TICK


def test_chunks_keep_their_sizes_and_acceptance_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serve(monkeypatch, Engine(Clock(), length=6, chunk=2), requests=1, batch_size=1)
    (record,) = loop.requests
    assert record["chunk_sizes"] == [1, 2, 2, 1]
    assert record["token_ids"] == [0, 1, 2, 3, 4, 5]
    assert (record["per_step_accepted"], record["per_step_drafted"]) == ([1], [2])
    assert [step.tokens for step in loop.steps] == [1, 2, 2, 1]


def test_steps_with_a_smaller_batch_than_asked_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serve(monkeypatch, Engine(Clock(), length=2, limit=2), requests=3, batch_size=3)
    assert loop.held_back == 2, "two run and one waits until they end; then it runs alone"
    assert [step.running for step in loop.steps] == [2, 2, 1, 1]
    assert loop.mean_running == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("slowed_by", [0.1, 1.0])
def test_an_arm_is_slowed_by_the_share_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, slowed_by: float) -> None:
    loop = serve(monkeypatch, Engine(Clock(), length=3), requests=2, batch_size=1, slowed_by=slowed_by)
    assert [step.seconds for step in loop.steps] == pytest.approx([STEP_SECONDS * (1 + slowed_by)] * 6, abs=0.01)


def test_a_step_without_output_is_a_step_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Clock(), length=1)
    first: list[int] = []
    step = engine.step

    def empty_first() -> list[Any]:
        if not first:
            first.append(1)
            engine.clock.now += STEP_SECONDS
            engine.taken_up.update(engine.given)
            return []
        return step()

    engine.step = empty_first  # type: ignore[method-assign]
    loop = serve(monkeypatch, engine, requests=1, batch_size=1)
    assert [record[1:] for record in loop.steps] == [(1, 0, 0), (1, 1, 1)]
    assert isinstance(loop.steps[0], StepRecord)
