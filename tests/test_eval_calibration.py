from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eyas.eval.calibration import calibrate, known_slow, splits, swaps
from eyas.eval.calibration_command import main, sentences
from eyas.eval.calibration_outcome import MIN_CELLS, MIN_SESSIONS, outcome
from eyas.eval.coverage import VARIANTS, designs, grid_table
from eyas.eval.made_up import SESSIONS, simulate_like
from eyas.eval.records import AR, AR_TWIN, ArmFacts, Cells
from eyas.eval.report.sections.calibration import calibration_section
from eyas.eval.samples import Sample, take_sample
from eyas.eval.stats import Pool, pool_of
from eyas.eval.verdict import MIN_PROMPTS
from eyas.recipes.load import load_recipe
from tests.eval_noise import facts, noisy_session
from tests.eval_records import cell, write_start

TWIN = ArmFacts("other", 0, None, False)
SLOW = ArmFacts("other", 0, None, False, slowed_by=0.4)


@pytest.fixture(scope="module")
def null_session() -> Cells:
    """AR and an arm slowed by 40 %, 40 cells, six starts."""
    return noisy_session({"slow": 1 / 1.4}, seed=9, cells=40, starts=6, requests=12)


def test_splits_put_half_of_the_starts_aside_and_each_pair_of_groups_once() -> None:
    assert splits(3, seed=0) == []
    assert splits(4, seed=0) == [(0, 1), (0, 2), (0, 3)]
    assert len(splits(6, seed=0)) == 10
    assert len({frozenset(way) for way in splits(12, seed=0)}) == 10
    assert splits(12, seed=0) == splits(12, seed=0)


def test_swaps_let_engines_trade_places_and_never_all_of_them() -> None:
    assert swaps(3, seed=0) == []
    assert swaps(4, seed=0) == [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)]
    assert len(set(swaps(8, seed=0))) == 10


def test_ar_against_ar_over_forty_cells_is_not_called_and_a_slow_down_is(null_session: Cells) -> None:
    arms = {**facts(), "slow": SLOW}
    calibration = calibrate(null_session, arms=arms, seed=1, draws=300, simulated_tests=300)
    assert calibration is not None
    records = calibration["records"]
    assert (records["cells"], records["sessions"], records["tests"]) == (40, 10, 400)
    assert calibration["stated_rate"] == pytest.approx(0.05)
    assert records["session_rate"] == records["alarms"] / 10 <= 0.2
    assert records["session_rate_interval"][0] <= records["session_rate"] <= records["session_rate_interval"][1]
    assert records["called"] <= records["session_rate"], "a session that calls a test calls one of 40 at least"
    assert records["coverage"] == pytest.approx(0.95, abs=0.05)
    found = [each["found"] for each in records["detection"]]
    assert found == sorted(found)
    assert found[-1] == 1.0
    simulated = calibration["simulated"]["no_difference"]
    assert simulated["coverage"] == pytest.approx(0.95, abs=0.03)
    assert (simulated["sessions"], simulated["tests"]) == (SESSIONS, 40 * SESSIONS)
    assert (calibration["passed"], calibration["failed"], calibration["lacking"]) == (True, [], [])
    assert sentences(calibration)[-1] == "Calibration passed."


QUIET = {
    "cells": 40,
    "sessions": 10,
    "session_rate_interval": [0.0025, 0.445],
    "detection": [{"slow_down": 1.5, "found": 1.0}],
}
FOUND_SLOW = [{"arm": "slow", "cells": 40, "found": 0.95}]
MADE_UP = {"no_difference": {"alarms_interval": [0.0, 0.09]}}


@pytest.mark.parametrize(
    ("records", "slowed", "made_up", "passed", "why"),
    [
        (QUIET, FOUND_SLOW, MADE_UP, True, ""),
        (QUIET, FOUND_SLOW, None, True, ""),
        (None, FOUND_SLOW, MADE_UP, None, "AR against AR in 0 cells"),
        ({**QUIET, "cells": 39}, FOUND_SLOW, MADE_UP, None, "39 cells and 10 splits"),
        ({**QUIET, "sessions": 3}, FOUND_SLOW, MADE_UP, None, "40 cells and 3 splits"),
        (QUIET, [], MADE_UP, None, "no arm was slowed"),
        ({**QUIET, "session_rate_interval": [0.067, 0.65]}, FOUND_SLOW, MADE_UP, False, "at least 7% of the splits"),
        (QUIET, FOUND_SLOW, {"no_difference": {"alarms_interval": [0.06, 0.2]}}, False, "6% of the made-up sessions"),
        ({**QUIET, "detection": [{"slow_down": 1.5, "found": 0.8}]}, FOUND_SLOW, MADE_UP, False, "slowed 1.5x"),
        (QUIET, [{**FOUND_SLOW[0], "found": 0.85}], MADE_UP, False, "called slower in 85% of 40 cells"),
        (QUIET, [{"arm": "slow", "cells": 0, "found": None}], MADE_UP, False, "in 0% of 0 cells"),
        ({**QUIET, "cells": 3, "session_rate_interval": [0.3, 0.9]}, [], None, False, "at least 30% of the splits"),
    ],
)
def test_what_passes_and_what_does_not(
    records: dict | None, slowed: list[dict], made_up: dict | None, passed: bool | None, why: str
) -> None:
    found = outcome(records, slowed=slowed, simulated=made_up)
    assert found["passed"] is passed
    assert why in " ".join(found["failed"] + found["lacking"])


def test_a_start_that_ran_twice_as_fast_by_luck_makes_no_verdict() -> None:
    """What happened to the prototype: one of four pairs of AR processes differed by 10 %."""
    cells = noisy_session({}, seed=2, cells=10, starts=6, start_sd=0.002, requests=8)
    for group in cells.values():
        group[AR][0] = [replace(block, makespan=block.makespan / 1.1) for block in group[AR][0]]
    calibration = calibrate(cells, arms=facts(), seed=1, draws=300, simulated_tests=300)
    assert calibration is not None
    assert calibration["records"]["called"] <= 0.05


def test_intervals_too_narrow_fail_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with a tenth of the scatter of starts, AR against AR is called."""
    from eyas.eval import calibration as module

    def narrow(samples: Mapping[str, Sample]) -> Pool:
        pool = pool_of(samples)
        return replace(pool, values=pool.values / 10)

    monkeypatch.setattr(module, "pool_of", narrow)
    monkeypatch.setattr(module, "null_band", lambda _, **__: (1.0, 1.0))
    cells = noisy_session({}, seed=9, cells=40, starts=6, start_sd=0.15, requests=12)
    calibration = module.calibrate(cells, arms=facts(), seed=1, draws=100, simulated_tests=20)
    assert calibration is not None
    assert calibration["records"]["session_rate"] > 0.5
    assert calibration["records"]["called"] > 0.2
    assert calibration["records"]["coverage"] < 0.8
    assert calibration["passed"] is False
    assert "of the splits of the AR starts call a difference where there is none" in calibration["failed"][0]


def test_a_twin_of_ar_is_compared_as_it_stands() -> None:
    cells = noisy_session({"twin": 1.0, "k3": 1.3}, seed=5, cells=3, starts=3, requests=8)
    arms = {**facts("k3"), "twin": TWIN}
    calibration = calibrate(cells, arms=arms, seed=1, draws=200, simulated_tests=20)
    assert calibration is not None
    assert (calibration["records"]["sessions"], calibration["records"]["tests"]) == (1, 3)
    assert calibration["records"]["alarms"] == 0
    assert calibration["passed"] is None


def test_side_by_side_twins_are_compared_in_pairs_and_trade_places() -> None:
    cells = noisy_session({AR_TWIN: 1.0, "k3": 1.3}, seed=5, cells=2, starts=5, requests=12)
    pairs = [(start, start) for start in range(5)]
    calibration = calibrate(
        cells,
        arms={**facts("k3"), AR_TWIN: TWIN},
        partners={AR_TWIN: pairs, "k3": pairs},
        seed=1,
        draws=200,
        simulated_tests=20,
    )
    assert calibration is not None
    assert calibration["records"]["sessions"] == 1 + 10
    assert calibration["records"]["alarms"] == 0
    assert calibration["records"]["detection"][-1]["found"] == 1
    assert calibration["simulated"]["design"]["paired"]
    assert calibration["simulated"]["design"]["tests"] == 2, "two cells with one arm beside AR and its twin"
    three = calibrate(
        cells, arms={**facts(), AR_TWIN: TWIN}, partners={AR_TWIN: pairs[:3]}, seed=1, draws=100, simulated_tests=20
    )
    assert three is not None and three["records"]["sessions"] == 1


def test_an_exchange_of_starts_is_one_of_records() -> None:
    first, second = (
        take_sample([[cell(rate)] for rate in rates], metric="throughput") for rates in ((40, 41, 42), (50, 51, 52))
    )
    assert first.exchanged(second, {0: 2, 2: 1}).start_means() == pytest.approx(np.log([52, 41, 51]))
    assert first.exchanged(second, {}).start_means() == pytest.approx(first.start_means())


def test_too_few_starts_leave_the_records_out_and_one_start_everything() -> None:
    three = calibrate(
        noisy_session({"k3": 1.2}, seed=1, cells=1, starts=3), arms=facts("k3"), seed=1, draws=100, simulated_tests=20
    )
    assert three is not None and three["records"] is None
    assert "four starts" in sentences(three)[0]
    assert calibrate(noisy_session({"k3": 1.2}, seed=1, cells=1, starts=1), arms=facts("k3"), seed=1) is None
    assert calibrate({}, arms={}, seed=1) is None


def test_an_arm_known_to_be_slow_is_called_so_in_every_cell() -> None:
    cells = noisy_session({"slow": 0.75}, seed=6, cells=5, starts=4)
    samples = {
        key: {arm: take_sample(starts, metric="throughput") for arm, starts in group.items()}
        for key, group in cells.items()
    }
    judged = known_slow(samples, "slow", seed=1)
    assert judged == {"arm": "slow", "cells": 5, "found": 1.0, "ratio": pytest.approx(0.75, rel=0.05)}
    assert known_slow(samples, "slow", partners={}, seed=1)["found"] is None


def test_an_arm_slowed_in_the_engine_is_reported_and_is_no_twin() -> None:
    cells = noisy_session({"slow": 0.7}, seed=6, cells=3, starts=4, requests=8)
    arms = {**facts(), "slow": SLOW}
    calibration = calibrate(cells, arms=arms, seed=1, draws=200, simulated_tests=20)
    assert calibration is not None
    (slowed,) = calibration["slowed"]
    assert (slowed["arm"], slowed["slowed_by"], slowed["cells"], slowed["found"]) == ("slow", 0.4, 3, 1.0)
    assert calibration["records"]["sessions"] == 3
    assert any("slowed by 40% in the engine, is called slower in 100%" in line for line in sentences(calibration))
    assert calibration["passed"] is None, "three cells are too few"


def test_the_report_says_whether_it_passed_and_prints_the_rate_of_sessions() -> None:
    cells = noisy_session({"slow": 0.7}, seed=6, cells=3, starts=4, requests=12)
    calibration = calibrate(cells, arms={**facts(), "slow": SLOW}, seed=1, draws=200, simulated_tests=20)
    assert calibration is not None
    section = calibration_section({"calibration": calibration})
    assert section.alerts == []
    assert section.paragraphs[-1].startswith(
        "Calibration undecided, too little to say that it passed: AR against AR in 3"
    )
    records, slowed, made_up = (each.rows[0] for each in section.tables)
    assert records[1:4] == ["none", "0 of 3", "0.0 % to 70.8 %"], "1 - 0.025 ** (1 / 3)"
    assert slowed[0] == "slow"
    assert made_up[2] == "40"
    failed = calibration | {"failed": ["arm slow was not found"], "passed": False}
    assert calibration_section({"calibration": failed}).alerts == ["Calibration FAILED: arm slow was not found."]


def test_a_control_that_is_not_found_fails_the_calibration() -> None:
    """What is said to be 40 % slower and runs as fast as AR: a mistake in the engine's wait, or statistics that see nothing."""
    cells = noisy_session({"slow": 1.0}, seed=6, cells=3, starts=4, requests=12)
    calibration = calibrate(cells, arms={**facts(), "slow": SLOW}, seed=1, draws=200, simulated_tests=20)
    assert calibration is not None
    assert calibration["passed"] is False
    assert any("arm slow" in reason for reason in calibration["failed"])


def test_made_up_sessions_have_the_design_and_noise_of_the_real_one() -> None:
    cells = noisy_session({"k3": 1.2, "k1": 1.1}, seed=8, cells=6, starts=4)
    samples = {
        key: {arm: take_sample(starts, metric="throughput") for arm, starts in group.items()}
        for key, group in cells.items()
    }
    simulated = simulate_like(samples, seed=1)
    assert simulated is not None
    assert (simulated["design"]["arms"], simulated["design"]["starts"], simulated["design"]["prompts"]) == (3, 4, 16)
    assert simulated["design"]["start_sd"] == pytest.approx(0.03, abs=0.012)
    assert (simulated["design"]["cells"], simulated["design"]["tests"]) == (6, 12)
    assert simulated["no_difference"]["tests"] == 12 * simulated["no_difference"]["sessions"]
    assert simulated["no_difference"]["coverage"] == pytest.approx(0.95, abs=0.03)
    assert simulated["slow_down"]["slower"] > 0.5
    json.dumps(simulated, allow_nan=False)


def test_the_command_prints_rates_coverage_and_detection(tmp_path: Path) -> None:
    cells = noisy_session({"slow": 0.6}, seed=3, cells=40, starts=5, requests=12)
    write_records(tmp_path / "starts", cells)
    lines: list[str] = []
    command = [str(tmp_path), "--slow", "slow", "--json", str(tmp_path / "c.json"), "--tests", "20"]
    assert main(command, say=lines.append) == 0
    text = "\n".join(lines)
    assert "10 sessions without a difference" in text and "of 40 cells" in text
    assert "hold 1 in" in text and "stated: at most 5% of sessions" in text
    assert "1.5x in 100%" in text
    assert "Arm slow, known to be slow, is called slower in 100% of 40 cells" in text
    assert lines[-1] == "Calibration passed."
    assert json.loads((tmp_path / "c.json").read_text())["records"]["tests"] == 400


@pytest.mark.parametrize(("cells", "starts", "options"), [(2, 3, ["--slow", "slow"]), (2, 5, ["--slow", "slow"])])
def test_the_command_passes_on_nothing(tmp_path: Path, cells: int, starts: int, options: list[str]) -> None:
    write_records(tmp_path / "starts", noisy_session({"slow": 0.6}, seed=3, cells=cells, starts=starts, requests=12))
    lines: list[str] = []
    assert main([str(tmp_path), *options, "--tests", "20"], say=lines.append) == 1
    assert lines[-1].startswith("Calibration undecided")
    assert "it takes 40 cells and 10 splits" in lines[-1]


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    lines: list[str] = []
    assert main([str(tmp_path)], say=lines.append) == 1
    assert "holds no finished start" in lines[-1]
    write_records(tmp_path / "starts", noisy_session({"k3": 1.2}, seed=3, cells=1, starts=1))
    assert main([str(tmp_path)], say=lines.append) == 1
    assert "starts_per_arm" in lines[-1]
    write_records(tmp_path / "starts", noisy_session({"k3": 1.2}, seed=3, cells=1, starts=2))
    assert main([str(tmp_path), "--slow", "k9", "--tests", "20"], say=lines.append) == 1
    assert "no cell has an arm 'k9'" in lines[-1]


def write_records(directory: Path, cells: Cells) -> None:
    starts = {arm: len(own) for group in cells.values() for arm, own in group.items()}
    for number, (arm, index) in enumerate((arm, index) for index in range(max(starts.values())) for arm in starts):
        blocks = [block for group in cells.values() for block in group[arm][index]]
        write_start(directory, number, arm, blocks, draft_length=0 if arm == AR else 3, round=index)


def test_the_shipped_recipe_measures_what_a_calibration_needs() -> None:
    score = load_recipe("smollm2-135m-calibration-cpu").score
    datasets = 1 + bool(score.humaneval_requests)
    assert datasets * len(score.batch_sizes) * len(score.temperatures) >= MIN_CELLS
    assert len(splits(score.starts_per_arm, seed=0)) >= MIN_SESSIONS
    assert {arm: config["slowed_by"] for arm, config in score.arms.items()} == {"same": 0.0, "slow": 0.15}
    assert score.min_requests >= MIN_PROMPTS and score.humaneval_requests >= max(score.batch_sizes)


def test_the_table_of_coverage_covers_the_promised_range() -> None:
    every = list(designs())
    assert {design.starts for design in every} == {3, 5, 8}
    assert {design.arms for design in every} == {2, 5, 9}
    assert {design.prompts for design in every} == {12, 16, 64}
    assert {(design.start_sd, design.block_sd) for design in every} >= {(0.0, 0.02), (0.1, 0.12)}
    assert len({name for name, _ in VARIANTS}) == len(VARIANTS)


def test_the_table_has_a_row_per_design_and_a_column_per_number_of_prompts() -> None:
    lines: list[str] = []
    found = grid_table(tests=1, say=lines.append)
    assert len(found) == len(list(designs()))
    assert len(lines) == 2 + len(found) // 3
    assert {line.count("|") for line in lines} == {8}
