from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.eval.calibration import calibrate, known_slow, simulate_like, splits
from eyas.eval.calibration_command import main, sentences
from eyas.eval.coverage import VARIANTS, designs, grid_table
from eyas.eval.records import AR, ArmFacts, Cells
from eyas.eval.samples import Sample, take_sample
from eyas.eval.stats import Pool, pool_of
from tests.eval_noise import facts, noisy_session
from tests.eval_records import write_start

TWIN = ArmFacts("other", 0, None, False)


@pytest.fixture(scope="module")
def null_session() -> Cells:
    """AR only, 40 cells, six starts."""
    return noisy_session({}, seed=9, cells=40, starts=6, requests=8)


def test_splits_put_half_of_the_starts_aside_and_each_pair_of_groups_once() -> None:
    assert splits(3, seed=0) == []
    assert splits(4, seed=0) == [(0, 1), (0, 2), (0, 3)]
    assert len(splits(6, seed=0)) == 10
    assert len({frozenset(way) for way in splits(12, seed=0)}) == 10
    assert splits(12, seed=0) == splits(12, seed=0)


def test_ar_against_ar_over_forty_cells_is_not_called_and_a_slow_down_is(null_session: Cells) -> None:
    calibration = calibrate(null_session, arms=facts(), seed=1, draws=300, simulated_tests=300)
    assert calibration is not None
    records = calibration["records"]
    assert (records["cells"], records["sessions"], records["tests"]) == (40, 10, 400)
    assert records["enough_tests"]
    assert records["false_positive_rate"] <= calibration["stated_rate"] == pytest.approx(0.05)
    assert (
        records["false_positive_interval"][0] <= records["false_positive_rate"] <= records["false_positive_interval"][1]
    )
    assert records["coverage"] == pytest.approx(0.95, abs=0.05)
    found = [each["found"] for each in records["detection"]]
    assert found == sorted(found)
    assert found[-1] == 1.0
    assert records["passed"]
    assert calibration["simulated"]["no_difference"]["coverage"] == pytest.approx(0.95, abs=0.03)


def test_a_start_that_ran_twice_as_fast_by_luck_makes_no_verdict() -> None:
    """What happened to the prototype: one of four pairs of AR processes differed by 10 %."""
    cells = noisy_session({}, seed=2, cells=10, starts=6, start_sd=0.002, requests=8)
    for group in cells.values():
        group[AR][0] = [replace(block, makespan=block.makespan / 1.1) for block in group[AR][0]]
    calibration = calibrate(cells, arms=facts(), seed=1, draws=300, simulated_tests=300)
    assert calibration is not None
    assert calibration["records"]["false_positive_rate"] <= 0.05


def test_intervals_too_narrow_fail_the_calibration(null_session: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with a tenth of the scatter of starts, AR against AR is called."""
    from eyas.eval import calibration as module

    def narrow(samples: Mapping[str, Sample]) -> Pool:
        pool = pool_of(samples)
        return replace(pool, values=pool.values / 10)

    monkeypatch.setattr(module, "pool_of", narrow)
    monkeypatch.setattr(module, "null_band", lambda _, **__: (1.0, 1.0))
    calibration = module.calibrate(null_session, arms=facts(), seed=1, draws=100, simulated_tests=20)
    assert calibration is not None
    assert calibration["records"]["false_positive_rate"] > 0.2
    assert calibration["records"]["coverage"] < 0.8
    assert not calibration["records"]["passed"]


def test_a_twin_of_ar_is_compared_as_it_stands() -> None:
    cells = noisy_session({"twin": 1.0, "k3": 1.3}, seed=5, cells=3, starts=3, requests=8)
    arms = {**facts("k3"), "twin": TWIN}
    calibration = calibrate(cells, arms=arms, seed=1, draws=200, simulated_tests=20)
    assert calibration is not None
    assert (calibration["records"]["sessions"], calibration["records"]["tests"]) == (1, 3)
    assert not calibration["records"]["enough_tests"]
    assert calibration["records"]["false_positive_rate"] == 0


def test_side_by_side_twins_are_compared_in_pairs() -> None:
    cells = noisy_session({"twin": 1.0}, seed=5, cells=2, starts=3, requests=8)
    arms = {**facts(), "twin": TWIN}
    calibration = calibrate(
        cells, arms=arms, partners={"twin": [(0, 0), (1, 1), (2, 2)]}, seed=1, draws=200, simulated_tests=20
    )
    assert calibration is not None
    assert calibration["records"]["sessions"] == 1


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
    arms = {**facts(), "slow": ArmFacts("other", 0, None, False, slowed_by=0.4)}
    calibration = calibrate(cells, arms=arms, seed=1, draws=200, simulated_tests=20)
    assert calibration is not None
    (slowed,) = calibration["slowed"]
    assert (slowed["arm"], slowed["slowed_by"], slowed["cells"], slowed["found"]) == ("slow", 0.4, 3, 1.0)
    assert calibration["records"]["sessions"] == 3
    assert any("slowed by 40% in the engine, is called slower in 100%" in line for line in sentences(calibration))


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
    assert simulated["no_difference"]["coverage"] == pytest.approx(0.95, abs=0.03)
    assert simulated["slow_down"]["slower"] > 0.5
    json.dumps(simulated, allow_nan=False)


def test_the_command_prints_rates_coverage_and_detection(tmp_path: Path) -> None:
    cells = noisy_session({"slow": 0.6}, seed=3, cells=4, starts=4, requests=8)
    write_records(tmp_path / "starts", cells)
    lines: list[str] = []
    assert (
        main([str(tmp_path), "--slow", "slow", "--json", str(tmp_path / "c.json"), "--tests", "20"], say=lines.append)
        == 0
    )
    text = "\n".join(lines)
    assert "12 tests (4 cells, 3 ways" in text
    assert "hold 1 in" in text and "stated: at most 5%" in text
    assert "1.5x in 100%" in text
    assert "called so in 100% of 4 cells" in text
    assert json.loads((tmp_path / "c.json").read_text())["records"]["tests"] == 12


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


def test_the_table_of_coverage_covers_the_promised_range() -> None:
    every = list(designs())
    assert {design.starts for design in every} == {3, 5, 8}
    assert {design.arms for design in every} == {2, 5, 9}
    assert {design.prompts for design in every} == {6, 16, 64}
    assert {(design.start_sd, design.block_sd) for design in every} >= {(0.0, 0.02), (0.1, 0.12)}
    assert len({name for name, _ in VARIANTS}) == len(VARIANTS)


def test_the_table_has_a_row_per_design_and_a_column_per_number_of_prompts() -> None:
    lines: list[str] = []
    found = grid_table(tests=1, say=lines.append)
    assert len(found) == len(list(designs()))
    assert len(lines) == 2 + len(found) // 3
    assert {line.count("|") for line in lines} == {8}
