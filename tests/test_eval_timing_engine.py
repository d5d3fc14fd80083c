"""Instrumented starts of real vLLM on the tiny target: nothing is missed, parts add up, and counts explain the tokens."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from eyas.eval.acceptance import acceptance_results
from eyas.eval.launch import Launcher
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import Kind, StartRecord, arms_of, cells_by_arm, read_starts
from eyas.eval.timing.clock import ORDER
from eyas.eval.timing.rows import timing_results
from eyas.eval.workload import Request
from eyas.heads.formats.write import write_head
from eyas.heads.serving import engine_environment, speculative_config
from tests import tiny

pytestmark = pytest.mark.engine

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """Four instrumented starts: plain, a head, n-gram lookup (steps without drafts), and a schedule (k = 2, then 0)."""
    folder = tmp_path_factory.mktemp("instrument")
    plan = make_plan(tiny_target)
    head = speculative_config(write_random_head(folder / "head"), method="eagle3", num_speculative_tokens=2)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    schedule = head | {"num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 64, 0]]}
    arms: list[tuple[str, Kind, dict[str, Any] | None]] = [
        ("ar", "ar", None),
        ("k2", "head", head),
        ("ngram", "other", ngram),
        ("schedule", "schedule", schedule),
    ]
    launcher = Launcher(engine_environment(threads=1, kv_cache_gib=1), 300, lambda _line: None)
    for number, (arm, kind, config) in enumerate(arms):
        start = replace(plan, arm=arm, kind=kind, start=number, speculative_config=config)
        run(launcher, start, folder / f"{number:03d}-{arm}")
    return folder


def write_random_head(directory: Path) -> Path:
    """A head that fits the tiny target and drafts at random."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = tiny.head_config(**sizes, vocab_size=tiny.VOCAB_SIZE, draft_vocab_size=128, capture_layers=(2, 3, 4))
    write_head(directory, tiny.random_head(config), dtype=torch.float32)
    return directory


def make_plan(target_dir: Path) -> StartPlan:
    generator = random.Random(0)
    prompts = [[generator.randrange(3, tiny.VOCAB_SIZE) for _ in range(6 + index)] for index in range(6)]
    requests = [Request("heldout", f"p{index}", prompt) for index, prompt in enumerate(prompts)]
    return StartPlan(
        target_dir=str(target_dir),
        trust_remote_code=False,
        dtype="float32",
        max_model_len=128,
        seed=0,
        enforce_eager=True,
        stop_token_ids=[2],
        warmup=[5, 6, 7],
        cells=[CellPlan("heldout", size, 0.0, MAX_TOKENS, 0, requests) for size in (1, 4)],
        session="s",
        instrument=True,
    )


def run(launcher: Launcher, plan: StartPlan, stem: Path) -> None:
    assert launcher.run(plan, stem), stem.with_suffix(".log").read_text()[-3000:]


@pytest.fixture(scope="module")
def starts(directory: Path) -> list[StartRecord]:
    return read_starts(directory)


def blocks_of(directory: Path, arm: str) -> list[dict[str, Any]]:
    lines = next(directory.glob(f"*-{arm}.jsonl")).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "cell"]


@pytest.mark.parametrize("arm", ["ar", "k2", "ngram", "schedule"])
def test_every_step_and_call_was_seen_and_the_parts_add_up(directory: Path, arm: str) -> None:
    for block in blocks_of(directory, arm):
        timing = block["timing"]
        assert "not_measured" not in timing, timing
        rows, calls = timing["report"]["steps"], timing["report"]["calls"]
        assert timing["report"]["step_calls"] == len(block["steps"]), "the worker and the clock saw the same steps"
        assert [row["index"] for row in rows] == timed_indices(block)
        assert calls["sample"] == len(rows)
        assert calls["verify"] == 2 * len(rows), "forward and lm_head"
        assert calls["runner"] == calls["schedule"] == 2 * len(rows)
        assert calls.get("draft", 0) == (0 if arm == "ar" else len(rows))
        for row in rows:
            seconds, running, _, prefills = block["steps"][row["index"]]
            assert sum(row["parts"].values()) + row["rest"] == pytest.approx(row["seconds"], abs=1e-6)
            assert min(row["parts"].values()) > 0
            assert row["rest"] > 0
            assert row["seconds"] <= seconds + 1e-7, "the worker's own clock encloses ours"
            assert (row["running"], row["decode"]) == (running, prefills == 0)
        # A single step may be interrupted between the two clocks; the median is not.
        unseen = [block["steps"][row["index"]][0] - row["seconds"] for row in rows]
        assert median(unseen) < 0.02 * median(row["seconds"] for row in rows)


def timed_indices(block: dict[str, Any]) -> list[int]:
    return [index for index in range(len(block["steps"])) if ORDER[index % len(ORDER)]]


def drafted_by_step(directory: Path, arm: str, *, batch_size: int) -> list[int]:
    """Drafted tokens of the timed decode steps of the full batch."""
    (block,) = [block for block in blocks_of(directory, arm) if block["batch_size"] == batch_size]
    rows = block["timing"]["report"]["steps"]
    return [row["drafted"] for row in rows if row["decode"] and row["running"] == batch_size]


def test_the_facts_of_steps_are_the_engines(directory: Path) -> None:
    assert {2} <= set(drafted_by_step(directory, "k2", batch_size=1)) <= {1, 2}, "fewer at the length limit only"
    assert 2 in drafted_by_step(directory, "schedule", batch_size=1)
    assert drafted_by_step(directory, "schedule", batch_size=4).count(0) > 5, "k = 0 at batch size 4"
    assert len(set(drafted_by_step(directory, "ngram", batch_size=1))) > 1, "what is found differs from step to step"


def test_a_time_split_comes_out(directory: Path, starts: list[StartRecord]) -> None:
    results = timing_results(directory, cells_by_arm(starts), arms_of(starts), session=starts[0].description["session"])
    assert results["time_not_measured"] == []
    by_place = {(row["arm"], row["batch_size"]): row for row in results["time_split"]}
    assert set(by_place) == {(arm, size) for arm in ("ar", "k2", "ngram", "schedule") for size in (1, 4)}
    for (arm, _), row in by_place.items():
        assert row["clock"] == "perf_counter"
        assert sum(row["share"].values()) == pytest.approx(1, abs=1e-3)
        assert (row["mean"]["draft"] > 0) == (arm != "ar")
        assert row["verify_over_ar_forward"] > 0
        assert 0 < row["clock_share"] < 0.05
    assert by_place["k2", 1]["drafted_per_request"] > 1.5
    checked = {(arm, size) for arm in ("k2", "ngram") for size in (1, 4)}
    assert {(row["arm"], row["batch_size"]) for row in results["time_check"]} == checked
    assert all(row["p50"] > 0 for row in results["step_times"])


def test_counts_explain_every_token(starts: list[StartRecord]) -> None:
    results = acceptance_results(cells_by_arm(starts), arms_of(starts), offline=None)
    assert len(results["reconciliation"]) == 6
    for row in results["reconciliation"]:
        assert row["passed"], row
        assert row["unexplained_requests"] == 0, row
        assert [each["difference"] for each in row["counters"]] == [0, 0, 0], row
    undrafted = {(row["arm"], row["batch_size"]): row["undrafted_steps"] for row in results["reconciliation"]}
    assert undrafted["ngram", 1] > 0
    assert undrafted["schedule", 4] > 0
    ngram = next(row for row in results["acceptance"] if row["arm"] == "ngram")
    assert ngram["tau"] > 1
    assert 1 < ngram["tau_all_steps"] < ngram["tau"]
