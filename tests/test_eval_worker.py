"""What the worker decides without an engine: its share of a GPU, and when a block may begin."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.eval import engine
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.workload import Request

PLAN = StartPlan(
    target_dir="target",
    trust_remote_code=False,
    dtype="float32",
    max_model_len=64,
    seed=0,
    enforce_eager=True,
    stop_token_ids=[2],
    warmup=[3],
    cells=[CellPlan("heldout", 1, 0.0, 8, 0, [Request("heldout", "p0", [1, 2])])],
)


@pytest.mark.parametrize(
    ("asked", "beside", "share"),
    [(None, None, 0.92), (None, "k3", 0.46), (0.8, None, 0.8), (0.8, "ar", 0.4)],
)
def test_two_engines_share_the_memory_that_one_would_take(
    monkeypatch: pytest.MonkeyPatch, asked: float | None, beside: str | None, share: float
) -> None:
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    plan = replace(PLAN, gpu_memory_utilization=asked, beside=beside)
    assert engine.memory_share(plan, default=0.92) == pytest.approx(share)


def test_a_cpu_has_no_such_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "on_cpu", lambda: True)
    assert engine.memory_share(replace(PLAN, gpu_memory_utilization=0.5, beside="k3"), default=0.92) == 0.92


def test_every_arm_gets_the_engine_settings_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    config = SimpleNamespace(CacheConfig=lambda: SimpleNamespace(gpu_memory_utilization=0.92))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda _, **options: made.append(options)))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    plan = replace(PLAN, tensor_parallel_size=2, gpu_memory_utilization=0.7)
    drafting = {"method": "ngram", "num_speculative_tokens": 3}
    for each in (plan, replace(plan, arm="ngram", speculative_config=drafting)):
        engine.start_engine(each)
    plain, drafted = made
    assert (plain["tensor_parallel_size"], plain["gpu_memory_utilization"]) == (2, 0.7)
    assert {name for name in plain if plain[name] != drafted[name]} == {
        "speculative_config",
        "per_request_spec_decode_metrics",
    }


def test_a_prefix_cache_that_is_not_emptied_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[str] = []
    monkeypatch.setattr(engine, "warm_up", lambda *_: warmed.append("warm"))
    llm = SimpleNamespace(reset_prefix_cache=lambda: False)
    with pytest.raises(ValueError, match="did not empty its prefix cache"):
        engine.measure_block(llm, replace(PLAN, prefix_caching=True), cell=PLAN.cells[0], block=0, number=0)
    assert warmed == ["warm"]
