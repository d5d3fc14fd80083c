"""The ladder's plan, its files and its outcomes, with engines that follow a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.lossless import run as run_module
from eyas.eval.lossless.drafted import NOTHING_DRAFTED
from eyas.eval.lossless.ladder import (
    SampledAs,
    arms_to_check,
    drafting_batch_size,
    lossless_outcome,
    plan_lossless,
    sampled_as,
)
from eyas.eval.lossless.results import LEVELS, lossless_results
from eyas.eval.lossless.stored import LADDER, LOGITS, OFFLINE, SAMPLER, STARTS
from eyas.eval.plan import CellPlan, StartPlan
from eyas.heads.files import read_json, write_json
from tests.eval_ladder import (
    ARMS,
    SETTINGS,
    FakeLauncher,
    base_plan,
    fake_counts,
    prompts,
    right_rule,
    row,
    run_fake,
    scheduled,
    target_that_says,
)

# Plan


def test_the_longest_chain_stands_for_the_shorter_ones() -> None:
    made_up = Arm("fake", "other", {"method": "ngram", "rejection_sample_method": "synthetic"})
    control = Arm("again", "other", None)
    assert arms_to_check([*ARMS, scheduled((1, 4, 3)), made_up, control]) == {
        "k3": ["k3", "k1"],
        "ngram": ["ngram"],
        "schedule": ["schedule"],
    }


def test_starts_differ_in_arm_seeds_and_the_nulls_batch_only() -> None:
    plain, null, k3, ngram = plan_lossless(base_plan(), arms=ARMS, prompts=prompts(), **SETTINGS)
    assert [start.arm for start in (plain, null, k3, ngram)] == ["ar", "ar", "k3", "ngram"]
    assert [start.start for start in (plain, null, k3, ngram)] == [0, 1, 2, 3]
    assert {start.dtype for start in (plain, null, k3, ngram)} == {"float32"}
    assert [(cell.dataset, cell.batch_size, cell.temperature, cell.max_tokens) for cell in plain.cells] == [
        ("L1", 4, 0.0, 8),
        ("L2", 1, 0.0, 8),
        ("L3", 4, 1.0, 6),  # ngram drafts 4: one token from the prompt, four drafted, one bonus
        ("L4", 4, 1.0, 8),
    ]
    assert [(cell.dataset, cell.batch_size) for cell in null.cells] == [("L1", 2), ("L3", 4), ("L4", 4)]
    assert [cell.requests for cell in k3.cells] == [cell.requests for cell in plain.cells]
    seeds: set[int] = set()
    for start in (plain, null, k3, ngram):
        for cell in start.cells[-2:]:
            used = {cell.seed + index for index in range(len(cell.requests))}
            assert not used & seeds
            seeds |= used
    sampled = plain.cells[2].requests
    assert len(sampled) == 40
    assert {r.prompt_id.partition("#")[0] for r in sampled} == {"p2", "p3"}, "the two shortest of the first four"
    assert len({r.prompt_id for r in sampled}) == 40


@pytest.mark.parametrize(
    ("ranges", "batch_size"),
    [
        ([(1, 2, 3), (3, 32, 0)], 2),
        ([(1, 2, 3), (3, 32, 1)], 4),
        ([(1, 1, 0), (2, 3, 2), (4, 32, 0)], 3),
        ([(1, 2, 3), (4, 32, 0)], 3),  # vLLM carries on a range's k through a gap
        ([(1, 32, 0)], 4),
        ([(1, 8, 0), (9, 32, 2)], 4),
    ],
)
def test_a_schedule_is_served_where_it_drafts(ranges: list[tuple[int, int, int]], batch_size: int) -> None:
    arm = scheduled(*ranges)
    assert drafting_batch_size(arm, at_most=4) == batch_size
    plain, _, served = plan_lossless(base_plan(), arms=[PLAIN, arm], prompts=prompts(), **SETTINGS)
    sizes = {cell.dataset: cell.batch_size for cell in served.cells}
    assert sizes == {"L1": batch_size, "L2": 1, "L3": batch_size, "L4": batch_size}
    assert {cell.batch_size for cell in plain.cells if cell.dataset != "L2"} == {4}


def test_sampled_levels_sample_as_the_session_does() -> None:
    cells = [CellPlan("heldout", 8, temperature, 64, 0, [], 0.9, 40) for temperature in (0.0, 0.6, 0.8)]
    start = plan_lossless(replace(base_plan(), cells=cells), arms=ARMS, prompts=prompts(), **SETTINGS)[2]
    how = {(cell.dataset, cell.temperature, cell.top_p, cell.top_k) for cell in start.cells}
    assert how == {("L1", 0.0, 1.0, 0), ("L2", 0.0, 1.0, 0), ("L3", 0.8, 0.9, 40), ("L4", 0.8, 0.9, 40)}
    greedy_only = replace(base_plan(), cells=cells[:1])
    assert sampled_as(greedy_only) == sampled_as(base_plan()) == SampledAs(1.0, 1.0, 0)


# The whole ladder


@pytest.fixture(autouse=True)
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process for L0 and no target."""

    def run_sampler(directory: Path, **settings: Any) -> None:
        write_json(directory / SAMPLER, fake_counts(rounds=settings["rounds"]))

    monkeypatch.setattr(run_module, "run_sampler", run_sampler)
    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: target_that_says({}))


def test_a_lossless_head_passes_every_level(tmp_path: Path) -> None:
    launcher = FakeLauncher(right_rule)
    results = run_fake(tmp_path, launcher)
    lossless = results["lossless"]
    assert launcher.ran == ["000-ar", "001-ar", "002-k3", "003-ngram"]
    assert (lossless["status"], lossless["passed"]) == ("done", True)
    assert [lossless[level]["passed"] for level in LEVELS] == [True] * 5
    assert [arm["arm"] for arm in lossless["L1"]["arms"]] == ["k3", "ngram"]
    assert lossless["L1"]["null"]["identical"] == 4
    assert lossless["L2"]["null"] is None
    assert all(arm["exact"] for arm in lossless["L2"]["arms"])
    assert lossless["mends"] == ["a mend"]
    assert results["parity"]["passed"]
    assert results["parity"]["arm"] == "k3"
    for name in ("k3", "k1", "ngram"):
        assert lossless_outcome(lossless, arm=name, temperature=0.0) is True
        assert lossless_outcome(lossless, arm=name, temperature=1.0) is True
    assert lossless_outcome(lossless, arm="schedule", temperature=1.0) is None
    assert read_json(tmp_path / LOGITS)["L1"] == {"null": [], "k3": [], "ngram": []}
    write_json(tmp_path / "results.json", results)  # holds neither NaN nor infinity


def test_a_wrong_arm_costs_its_own_cells_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(plan: StartPlan, cell: CellPlan, index: int) -> list[int]:
        tokens = right_rule(plan, cell, index)
        wrong = plan.arm == "ngram" and cell.dataset == "L1" and index == 1
        return [*tokens[:5], 60, *tokens[6:]] if wrong else tokens

    def logits(token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.float32]:
        return np.stack([row({4: 20.0}) for _ in token_ids[num_prompt_tokens:]])

    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: logits)
    lossless = run_fake(tmp_path, FakeLauncher(rule))["lossless"]
    assert lossless["passed"] is False
    (finding,) = lossless["L1"]["arms"][1]["differences"]
    assert (finding["prompt_id"], finding["index"], finding["outcome"]) == ("p1", 5, "violation")
    assert lossless_outcome(lossless, arm="k1", temperature=0.0) is True
    assert lossless_outcome(lossless, arm="ngram", temperature=0.0) is False
    assert lossless_outcome(lossless, arm="ngram", temperature=1.0) is False


def tied_at(level: str, *, arm: str = "k3") -> Callable[[StartPlan, CellPlan, int], list[int]]:
    """The arm's second answer of a level takes the other of two equally good tokens at its sixth place."""

    def rule(plan: StartPlan, cell: CellPlan, index: int) -> list[int]:
        tokens = right_rule(plan, cell, index)
        return [*tokens[:5], 60, *tokens[6:]] if (plan.arm, cell.dataset, index) == (arm, level, 1) else tokens

    return rule


def equally_good(token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.float32]:
    return np.stack([row({token: 20.0, 4: 20.0, 60: 20.0}) for token in token_ids[num_prompt_tokens:]])


@pytest.mark.parametrize(("level", "dtype", "passed"), [("L1", "float32", True), ("L2", "float32", False)])
def test_a_tie_passes_in_a_batch_and_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, dtype: str, passed: bool
) -> None:
    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: equally_good)
    lossless = run_fake(tmp_path, FakeLauncher(tied_at(level)), dtype=dtype)["lossless"]
    k3 = lossless[level]["arms"][0]
    assert (k3["ties"], k3["violations"], k3["exact"]) == (1, 0, False)
    assert k3["passed"] is passed
    assert lossless_outcome(lossless, arm="k1", temperature=0.0) is passed
    assert lossless_outcome(lossless, arm="ngram", temperature=0.0) is True


def test_in_a_shorter_dtype_a_tie_alone_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: equally_good)
    lossless = run_fake(tmp_path, FakeLauncher(tied_at("L2")), dtype="bfloat16")["lossless"]
    k3 = lossless["L2"]["arms"][0]
    assert (k3["passed"], k3["outcome"]) == (None, "undecided")
    assert "score.lossless.dtype=float32" in k3["why"]
    assert lossless_outcome(lossless, arm="k3", temperature=0.0) is None


def test_a_quantised_target_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("no forward of it is the engine's")

    monkeypatch.setattr(run_module, "answer_logits", asked)
    lossless = run_fake(tmp_path / "a", FakeLauncher(right_rule, quantization="awq"))["lossless"]
    assert lossless["quantised"] is True
    assert lossless["passed"] is True, "identical answers need no judge"
    different = run_fake(tmp_path / "b", FakeLauncher(tied_at("L1"), quantization="awq"))["lossless"]
    assert different["L1"]["arms"][0]["untold"] == 1
    assert lossless_outcome(different, arm="k3", temperature=0.0) is None


@pytest.mark.parametrize("arm", ["ngram", "schedule"])
def test_an_arm_that_drafted_nothing_is_undecided(tmp_path: Path, arm: str) -> None:
    """Plain decoding under another name: its answers are right, and say nothing."""
    arms = [*ARMS, scheduled((1, 32, 0))]
    lossless = run_fake(tmp_path, FakeLauncher(right_rule, idle=(arm,)), arms=arms)["lossless"]
    for level in LEVELS[1:]:
        rows = {row["arm"]: row for row in lossless[level]["arms"]}
        assert rows[arm]["passed"] is None
        assert rows[arm]["outcome"] == "undecided"
        assert rows[arm]["why"] == NOTHING_DRAFTED
        assert rows[arm]["drafted_tokens"] == rows[arm]["answers_drafted"] == 0
        assert rows["k3"]["passed"] is True
        assert rows["k3"]["drafted_tokens"] == 9 * rows["k3"]["answers"], "three steps of three in every answer"
        assert lossless[level]["passed"] is None
    for temperature in (0.0, 1.0):
        assert lossless_outcome(lossless, arm=arm, temperature=temperature) is None
        assert lossless_outcome(lossless, arm="k1", temperature=temperature) is True


def test_a_difference_counts_whatever_was_drafted(tmp_path: Path) -> None:
    lossless = run_fake(tmp_path, FakeLauncher(tied_at("L2", arm="ngram"), idle=("ngram",)))["lossless"]
    assert lossless_outcome(lossless, arm="ngram", temperature=0.0) is False


@pytest.mark.parametrize("name", [LADDER, SAMPLER, LOGITS, OFFLINE, f"{STARTS}/002-k3.json"])
@pytest.mark.parametrize("other", ["another", None])
def test_every_file_says_its_session(tmp_path: Path, name: str, other: str | None) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))
    found = {key: value for key, value in read_json(tmp_path / name).items() if key != "session"}
    write_json(tmp_path / name, found if other is None else found | {"session": other})
    with pytest.raises(ValueError, match=name.rpartition("/")[2].removesuffix(".json")):
        lossless_results(tmp_path, session="s")


def test_a_whole_ladder_of_another_session_is_refused(tmp_path: Path) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))
    with pytest.raises(ValueError, match=r"ladder\.json is of session s, the score of t; .* move the file away"):
        lossless_results(tmp_path, session="t")
    (tmp_path / LADDER).write_text((tmp_path / LADDER).read_text().replace('"s"', '"t"'))
    with pytest.raises(ValueError, match=r"starts/000-ar\.json is of session s"):
        lossless_results(tmp_path, session="t")


def test_what_the_target_said_of_other_answers_is_refused(tmp_path: Path) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))
    write_json(tmp_path / LOGITS, read_json(tmp_path / LOGITS) | {"answers": "of other ones"})
    with pytest.raises(ValueError, match=r"logits\.json is about other answers .* run `eyas score` again"):
        lossless_results(tmp_path, session="s")


def test_a_wrong_sampler_fails_sampled_cells_and_not_greedy_ones(tmp_path: Path) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))
    write_json(tmp_path / SAMPLER, fake_counts(rounds=5000, wrong=True))
    lossless = lossless_results(tmp_path, session="s")["lossless"]
    assert lossless["L0"]["passed"] is False
    assert lossless_outcome(lossless, arm="k3", temperature=0.0) is True
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is False


def test_what_did_not_run_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    lossless = run_fake(tmp_path, FakeLauncher(right_rule, failing=("ngram",)))["lossless"]
    assert (lossless["status"], lossless["passed"]) == ("partial", None)
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is True
    assert lossless_outcome(lossless, arm="ngram", temperature=0.0) is None
    without_plain = run_fake(tmp_path / "b", FakeLauncher(right_rule, failing=("ar",)))
    assert without_plain["lossless"]["L1"]["why"] == "the start of plain decoding did not finish"
    assert without_plain["lossless"]["passed"] is None
    why = "the sampler's process failed: exit code 1; see sampler.log"
    write_json(tmp_path / SAMPLER, {"session": "s", "why": why})
    assert lossless_results(tmp_path, session="s")["lossless"]["L0"]["why"] == why
    nothing = lossless_results(tmp_path / "nowhere", session="s")
    assert nothing["lossless"]["status"] == "not run"
    assert nothing["parity"] is None
    assert lossless_outcome(nothing["lossless"], arm="k3", temperature=0.0) is None
    assert lossless_outcome(None, arm="k3", temperature=0.0) is None


def test_where_another_sampler_served_the_levels_of_the_engine_decide(tmp_path: Path) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))
    write_json(tmp_path / SAMPLER, fake_counts(rounds=5000, wrong=True))
    for path in (tmp_path / STARTS).glob("*-k3.json"):
        description = read_json(path)
        write_json(path, description | {"engine": description["engine"] | {"model_runner_v2": True}})
    lossless = lossless_results(tmp_path, session="s")["lossless"]
    assert lossless["L0"]["passed"] is False
    assert lossless["L0"]["applies"] is False
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is True


def test_without_samples_greedy_cells_are_judged_alone(tmp_path: Path) -> None:
    lossless = run_fake(tmp_path, FakeLauncher(right_rule), samples=0)["lossless"]
    assert (lossless["status"], lossless["passed"]) == ("done", True)
    assert "samples 0" in lossless["L3"]["why"]
    assert lossless["L4"]["passed"] is None
    assert lossless_outcome(lossless, arm="k3", temperature=0.0) is True
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is None


def test_a_continued_session_keeps_what_was_asked_and_forgets_other_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))

    def asked_again(*_: Any, **__: Any) -> Any:
        raise AssertionError("the answers have not changed")

    monkeypatch.setattr(run_module, "answer_logits", asked_again)
    again = run_fake(tmp_path, FakeLauncher(right_rule), predict=asked_again)
    assert again["parity"]["passed"]
    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: target_that_says({}))
    fewer = run_fake(tmp_path, FakeLauncher(right_rule), arms=ARMS[:2])
    assert [row["arm"] for row in fewer["lossless"]["arms"]] == ["k3"]
    assert not list((tmp_path / STARTS).glob("*ngram*"))
