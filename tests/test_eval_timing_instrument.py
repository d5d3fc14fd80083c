"""Wrapping a stand-in engine with vLLM's attribute paths: what is seen, what is put back, and what is refused."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.eval.timing import instrument
from eyas.eval.timing.instrument import NotMeasured, facts_of, instrumented, require_all_seen
from eyas.eval.timing.split import timed_block

PIECE = 0.0005
"""Seconds that each piece of the stand-in's work takes at least."""


def work(pieces: int = 1) -> None:
    until = time.perf_counter() + pieces * PIECE
    while time.perf_counter() < until:
        pass


class Model:
    def compute_logits(self) -> None:
        work(2)


class Runner:
    def __init__(self) -> None:
        self.device = SimpleNamespace(type="cpu")
        self.model = Model()

    def _model_forward(self) -> None:
        work(8)

    def _sample(self) -> None:
        work(1)

    def propose_draft_token_ids(self) -> None:
        work(4)
        self.model.compute_logits()

    def execute_model(self, scheduler_output: Any, _intermediate: Any = None) -> None:
        if scheduler_output.num_scheduled_tokens:
            work(1)
            self._model_forward()
            self.model.compute_logits()

    def sample_tokens(self) -> None:
        self._sample()
        self.propose_draft_token_ids()


class Scheduler:
    def schedule(self) -> Any:
        work(1)
        return SimpleNamespace(
            num_scheduled_tokens={"a": 4, "b": 4},
            scheduled_spec_decode_tokens={"a": [1, 2, 3], "b": [1, 2, 3]},
            scheduled_new_reqs=[],
            total_num_scheduled_tokens=8,
        )

    def update_from_output(self) -> None:
        work(1)


class Engine:
    """`llm.llm_engine` of vLLM 0.32 with the engine core in the process, as far as eyas reaches into it."""

    def __init__(self, *, drafts: bool = True) -> None:
        worker = SimpleNamespace(use_v2_model_runner=False, model_runner=Runner())
        core = SimpleNamespace(
            scheduler=Scheduler(), model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        )
        self.engine_core = SimpleNamespace(engine_core=core)
        self.vllm_config = SimpleNamespace(speculative_config=object() if drafts else None)

    @property
    def runner(self) -> Any:
        return self.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def step(self) -> None:
        scheduler = self.engine_core.engine_core.scheduler
        self.runner.execute_model(scheduler.schedule())
        self.runner.sample_tokens()
        scheduler.update_from_output()


def stand_in(*, drafts: bool = True) -> Any:
    return SimpleNamespace(llm_engine=Engine(drafts=drafts))


def two_steps(llm: Any) -> None:
    """A plain one and a timed one."""
    llm.llm_engine.step()
    llm.llm_engine.step()


def test_every_part_is_seen_and_named() -> None:
    llm = stand_in()
    with instrumented(llm) as clock:
        for _ in range(6):
            llm.llm_engine.step()
    report = clock.report()
    # The drafter's use of the target's lm_head is drafting, not verification.
    assert report["calls"] == {"schedule": 6, "runner": 6, "verify": 6, "sample": 3, "draft": 3}
    assert report["clock"] == "perf_counter"
    for row in report["steps"]:
        parts = row["parts"]
        least = {"schedule": 2, "runner": 1, "verify": 10, "sample": 1, "draft": 6}
        assert {name: parts[name] >= pieces * PIECE for name, pieces in least.items()} == dict.fromkeys(least, True)
        assert sum(parts.values()) + row["rest"] == pytest.approx(row["seconds"], abs=1e-7)
        assert row["seconds"] >= 20 * PIECE
        assert (row["running"], row["scheduled"], row["drafted"], row["decode"]) == (2, 8, 6, True)


def test_the_engine_is_as_before_afterwards() -> None:
    llm = stand_in()
    runner = llm.llm_engine.runner
    before = {id(each): dict(vars(each)) for each in (llm.llm_engine, runner, runner.model)}
    with pytest.raises(RuntimeError, match="boom"), instrumented(llm):
        assert "step" in vars(llm.llm_engine)
        raise RuntimeError("boom")
    assert {id(each): vars(each) for each in (llm.llm_engine, runner, runner.model)} == before


def test_instruments_may_be_put_on_twice_in_turn() -> None:
    llm = stand_in()
    for _ in range(2):
        with instrumented(llm) as clock:
            two_steps(llm)
        assert clock.report()["calls"]["verify"] == 2


def lacking(path: str) -> Any:
    """An engine of another version: the attribute at `path` below `llm_engine` is gone."""
    llm = stand_in()
    owner: Any = llm.llm_engine
    *way, name = path.split(".")
    for part in way:
        owner = vars(owner)[part]
    if name in vars(owner):
        delattr(owner, name)
    else:
        owner.__class__ = type(
            type(owner).__name__, (), {key: value for key, value in vars(type(owner)).items() if key != name}
        )
    return llm


RUNNER = "engine_core.engine_core.model_executor.driver_worker.worker.model_runner"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{RUNNER}._model_forward", r"llm\.llm_engine\..*\.model_runner \(Runner\) has no attribute '_model_forward'"),
        (f"{RUNNER}._sample", "has no attribute '_sample'"),
        (f"{RUNNER}.propose_draft_token_ids", "has no attribute 'propose_draft_token_ids'"),
        (f"{RUNNER}.model.compute_logits", r"model_runner\.model \(Model\) has no attribute 'compute_logits'"),
        ("engine_core.engine_core.scheduler.update_from_output", "has no attribute 'update_from_output'"),
        ("engine_core.engine_core.model_executor.driver_worker", "processes of its own"),
        ("engine_core.engine_core", "VLLM_ENABLE_V1_MULTIPROCESSING=0"),
        (f"{RUNNER.removesuffix('.model_runner')}.use_v2_model_runner", "has no attribute 'use_v2_model_runner'"),
    ],
)
def test_another_version_is_refused_by_name_before_anything_is_wrapped(path: str, words: str) -> None:
    llm = lacking(path)
    with pytest.raises(NotMeasured, match=words), instrumented(llm):
        pass
    assert "step" not in vars(llm.llm_engine)
    with timed_block(llm) as timing:
        served = True
    assert served, "the block is served all the same"
    assert set(timing) == {"version", "not_measured"}
    assert "vllm" in timing["not_measured"].lower()


def test_an_arm_that_does_not_draft_needs_no_drafter() -> None:
    llm = stand_in(drafts=False)
    Runner.propose_draft_token_ids, kept = lambda _self: None, Runner.propose_draft_token_ids
    try:
        with instrumented(llm) as clock:
            two_steps(llm)
    finally:
        Runner.propose_draft_token_ids = kept
    assert set(clock.report()["calls"]) == {"schedule", "runner", "verify", "sample"}


def test_methods_that_exist_but_are_no_longer_called_are_noticed() -> None:
    llm = stand_in()
    runner = llm.llm_engine.runner
    runner.sample_tokens = runner.propose_draft_token_ids
    with instrumented(llm) as clock:
        two_steps(llm)
    with pytest.raises(NotMeasured, match=r"1 of 1 steps ran without a timed call of sample"):
        require_all_seen(clock.report(), drafts=True)
    with instrumented(llm) as clock:
        pass
    with pytest.raises(NotMeasured, match="0 of 0 steps"):
        require_all_seen(clock.report(), drafts=True)


def test_a_drafter_that_is_never_called_is_noticed() -> None:
    report = {"calls": {"verify": 1, "sample": 1}, "steps": [{"parts": {"verify": 1.0, "sample": 1.0}}]}
    require_all_seen(report, drafts=False)
    with pytest.raises(NotMeasured, match="drafting is on"):
        require_all_seen(report, drafts=True)


def test_a_device_without_a_clock_is_refused() -> None:
    llm = stand_in()
    llm.llm_engine.runner.device.type = "xpu"
    with pytest.raises(NotMeasured, match="'xpu'"), instrumented(llm):
        pass


class DeviceStamps:
    """Stands for events of a device; here it is the host's time all the same."""

    name = "events"

    def now(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class TargetModule(torch.nn.Module):
    def forward(self) -> None:
        work(8)

    def compute_logits(self) -> None:
        work(2)


class RunnerOfVersion2:
    """vLLM's second model runner, as far as eyas reaches into it."""

    def __init__(self) -> None:
        self.device = SimpleNamespace(type="cuda")
        self.model = TargetModule()
        self.cudagraph_manager = None
        self.speculator = SimpleNamespace(propose=lambda: work(4))

    def sample(self) -> None:
        self.model.compute_logits()
        work(1)

    def execute_model(self, _scheduler_output: Any, _intermediate: Any = None) -> None:
        self.model()

    def sample_tokens(self) -> None:
        self.sample()
        self.speculator.propose()


def test_the_second_runner_is_timed_by_the_device_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "stamps_of", lambda _llm: DeviceStamps())
    llm = stand_in()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker.use_v2_model_runner, worker.model_runner = True, RunnerOfVersion2()
    runner, propose = worker.model_runner, worker.model_runner.speculator.propose
    before = {id(each): dict(vars(each)) for each in (llm.llm_engine, runner)}
    with instrumented(llm) as clock:
        two_steps(llm)
    report = clock.report()
    assert report["calls"] == {"verify": 2, "sample": 1, "draft": 1}, "the host's work is not told apart on a device"
    (row,) = report["steps"]
    assert row["parts"]["verify"] >= 10 * PIECE
    assert PIECE <= row["parts"]["sample"] < row["parts"]["verify"]
    assert row["rest"] >= 2 * PIECE, "the scheduler"
    assert {id(each): vars(each) for each in (llm.llm_engine, runner)} == before
    assert runner.speculator.propose is propose
    assert not runner.model._forward_hooks
    assert not runner.model._forward_pre_hooks
    assert "compute_logits" not in vars(runner.model)


def test_whole_cuda_graphs_are_verification_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "stamps_of", lambda _llm: DeviceStamps())
    llm = stand_in()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker.use_v2_model_runner, worker.model_runner = True, RunnerOfVersion2()
    runner = worker.model_runner
    runner.cudagraph_manager = SimpleNamespace(run_fullgraph=lambda: work(8))
    monkeypatch.setattr(RunnerOfVersion2, "execute_model", lambda self, *_: self.cudagraph_manager.run_fullgraph())
    with instrumented(llm) as clock:
        two_steps(llm)
    assert clock.report()["calls"] == {"verify": 2, "sample": 1, "draft": 1}


def scheduled(tokens: dict[str, int], *, drafted: dict[str, list[int]] | None = None, new: int = 0) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafted or {},
        scheduled_new_reqs=[None] * new,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def test_what_counts_as_a_decode_step() -> None:
    assert facts_of(scheduled({})) is None
    plain = facts_of(scheduled({"a": 1, "b": 1}))
    assert plain == (2, 2, 0, True)
    mixed_lengths = facts_of(scheduled({"a": 4, "b": 1}, drafted={"a": [1, 2, 3]}))
    assert mixed_lengths == (2, 5, 3, True)
    one_token_prompt = facts_of(scheduled({"a": 1, "b": 1}, new=1))
    assert one_token_prompt is not None
    assert not one_token_prompt.decode
    later_chunk_of_a_prompt = facts_of(scheduled({"a": 64, "b": 1}))
    assert later_chunk_of_a_prompt is not None
    assert not later_chunk_of_a_prompt.decode


def test_a_block_keeps_what_its_clock_saw() -> None:
    llm = stand_in()
    with timed_block(llm) as timing:
        assert set(timing) == {"version"}
        for _ in range(8):
            llm.llm_engine.step()
    assert [row["index"] for row in timing["report"]["steps"]] == [1, 2, 5, 6]
    assert "not_measured" not in timing
    assert 0 < timing["report"]["call_cost"] < PIECE


def test_a_block_in_which_a_part_was_not_seen_gives_no_split() -> None:
    llm = stand_in()
    with timed_block(llm) as timing:
        pass
    assert "0 of 0 steps" in timing["not_measured"]
    assert "report" not in timing


def test_an_error_while_serving_passes_and_takes_the_instruments_off() -> None:
    llm = stand_in()
    with pytest.raises(RuntimeError, match="out of memory"), timed_block(llm):
        raise RuntimeError("out of memory")
    assert "step" not in vars(llm.llm_engine)
