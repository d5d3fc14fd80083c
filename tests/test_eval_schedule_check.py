"""The schedule measured as an arm of its own: what runs beside it, what it promises, and the choice made once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.eval.arms import Arm
from eyas.eval.comparison import Comparison
from eyas.eval.cost.fixed_lengths import fastest_arms, fixed_ratios
from eyas.eval.cost.schedule import choose_schedule
from eyas.eval.cost.schedule_check import _not_slower, passed, schedule_rows
from eyas.eval.records import AR, ArmFacts, CellKey, Cells, read_starts
from eyas.eval.report.sections.schedule import schedule_section
from eyas.eval.schedule_phase import arms_of_schedule, schedule_results
from eyas.eval.stats import RatioInterval
from eyas.heads.files import read_json, write_json
from tests.cost_cells import NOISE, facts, measured
from tests.eval_full_session import write_full_session
from tests.eval_records import cell

LENGTHS = {"k3": 3, "k1": 1}
BASE = {"method": "eagle3", "model": "head", "num_speculative_tokens": 5}


def judged(
    rates: Mapping[int, Mapping[str, float]],
    *,
    noise: Sequence[float] = NOISE,
    grid: Mapping[str, float] | None = None,
) -> list[dict]:
    """`grid`: the grid's ratios to plain decoding in every cell."""
    config = BASE | {"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    arms = facts(LENGTHS) | {"schedule": ArmFacts("schedule", 3, config, False)}
    cells = measured(rates, noise=noise)
    return schedule_rows(cells, arms, grid={key: dict(grid or {}) for key in cells}, seed=0)


def test_a_schedule_that_keeps_both_promises() -> None:
    rows = judged({1: {"ar": 40, "k3": 60, "schedule": 59.5}, 16: {"ar": 300, "k3": 150, "schedule": 299}})
    assert [row["best_fixed_arm"] for row in rows] == ["k3", AR]
    assert passed(rows) is True


@pytest.mark.parametrize(
    ("schedule", "noise", "slower", "within"),
    [
        (290.0, NOISE, "no", "not resolved"),
        (299.0, NOISE, "yes", "yes"),
        (240.0, NOISE, "no", "no"),
        (285.0, (0.9, 1.0, 1.1), "yes", "not resolved"),
        # One start shows no chance to compare with, two are one pair of processes: whatever the ratio, nothing is claimed.
        (285.0, (1.0,), "not resolved", "not resolved"),
        (299.0, (1.0,), "not resolved", "not resolved"),
        (320.0, (1.0,), "not resolved", "not resolved"),
        (299.0, (0.99, 1.01), "not resolved", "not resolved"),
        (240.0, (0.99, 1.01), "not resolved", "not resolved"),
    ],
)
def test_promises(schedule: float, noise: Sequence[float], slower: str, within: str) -> None:
    (row,) = judged({16: {"ar": 300, "k3": 150, "schedule": schedule}}, noise=noise)
    assert (row["not_slower_than_ar"], row["within_best_fixed"]) == (slower, within)


def test_below_the_null_band_but_not_beyond_the_interval_is_not_resolved() -> None:
    interval = RatioInterval(0.96, 0.91, 1.01, 0.1, 0.02, 9.0, indicative=False)
    compared = Comparison({"throughput": interval}, (0.97, 1.03), (300.0, 288.0), starts=3, prompts=12)
    assert _not_slower(compared, interval) == "not resolved"
    assert _not_slower(replace(compared, null_band=(0.95, 1.05)), interval) == "yes"
    assert _not_slower(replace(compared, null_band=None), interval) == "not resolved"
    above = replace(interval, ratio=1.02, low=0.99, high=1.05)
    assert _not_slower(compared, above) == "yes"
    assert _not_slower(replace(compared, starts=2), above) == "not resolved"


def test_a_length_that_did_not_run_beside_the_schedule_and_may_be_better_leaves_it_open() -> None:
    """The schedule is at 1.2 of plain decoding: k = 1 at 1.3 in the grid would leave it 8 % behind, at 1.22 less than 2 %."""
    rates = {16: {"ar": 100, "k3": 115, "schedule": 120}}
    (row,) = judged(rates, grid={"k3": 1.15, "k1": 1.3})
    assert (row["within_best_fixed"], row["absent_and_better"]) == ("not resolved", ["k1"])
    (row,) = judged(rates, grid={"k3": 1.4, "k1": 1.22})
    assert (row["within_best_fixed"], row["absent_and_better"]) == ("yes", [])


def test_the_schedule_runs_beside_every_length_that_was_the_fastest_somewhere() -> None:
    """k = 5 wins one cell by less than chance, so it is never chosen and has to run all the same; k = 2 wins nowhere."""
    lengths = {"k5": 5, "k3": 3, "k2": 2}
    arms = facts(lengths)
    cells = measured({1: {"ar": 40, "k5": 50, "k3": 60, "k2": 55}}) | measured(
        {16: {"ar": 300, "k5": 301, "k3": 250, "k2": 299}}
    )
    schedule = choose_schedule(cells, arms)
    assert [choice.arm for choice in schedule.choices] == ["k3", AR]
    ratios = fixed_ratios(cells, arms, partners=None)
    assert ratios[CellKey("heldout", 0.0, 16)]["k5"] == pytest.approx(301 / 300)
    assert fastest_arms(ratios) == {"k3", "k5"}
    fixed = [Arm(name, "head", BASE | {"num_speculative_tokens": length}) for name, length in lengths.items()]
    beside = arms_of_schedule(schedule, fixed=fixed, fastest=fastest_arms(ratios), base=BASE)
    assert [arm.name for arm in beside] == [AR, "k5", "k3", "schedule"]


def test_side_by_side_ratios_are_those_of_pairs_and_synthetic_arms_have_none() -> None:
    """Each pair ran at a speed of its own; k = 1 is twice as fast as its partner."""
    key = CellKey("heldout", 0.0, 1)
    starts = {"ar": (40.0, 10.0), "k1": (20.0,)}
    cells: Cells = {key: {arm: [[cell(rate)] for rate in rates] for arm, rates in starts.items()}}
    assert fixed_ratios(cells, facts({"k1": 1}), partners={"k1": [(1, 0)]})[key] == {"k1": pytest.approx(2.0)}
    assert fixed_ratios(cells, facts({"k1": 1}, synthetic=True), partners=None) == {}


def test_the_choice_is_made_again_from_the_records(tmp_path: Path) -> None:
    """schedule.json keeps what was served; a choice that the records do not lead to is seen."""
    write_full_session(tmp_path)
    starts = read_starts(tmp_path / "starts")
    found = schedule_results(tmp_path, starts, seed=0)
    assert found is not None
    assert found["recomputed_ranges"] == found["ranges"]
    stored = read_json(tmp_path / "schedule.json")
    other = stored | {"ranges": [[1, 32, 5]], "choices": []}
    write_json(tmp_path / "schedule.json", other)
    changed = schedule_results(tmp_path, starts, seed=0)
    assert changed is not None
    assert changed["ranges"] == [[1, 32, 5]]
    assert changed["recomputed_ranges"] == found["ranges"]
    assert changed["choices"] == found["choices"]
    section = schedule_section({"schedule": changed, "arms": {}})
    assert "differs from what the records lead to" in section.alerts[0]
    assert schedule_section({"schedule": found, "arms": {}}).alerts == []
    mended = schedule_section({"schedule": found, "arms": {}, "mends": ["the sampler of the CPU build"]})
    assert "without the mends" in mended.alerts[0]


def test_slower_than_the_best_fixed_length_is_a_broken_promise_though_faster_than_plain() -> None:
    rows = judged({1: {"ar": 40, "k3": 60, "schedule": 50}})
    assert (rows[0]["not_slower_than_ar"], rows[0]["within_best_fixed"], passed(rows)) == ("yes", "no", False)
    assert rows[0]["ratio_to_best_fixed"] == pytest.approx(50 / 60)


def test_nothing_measured_is_no_pass() -> None:
    assert passed([]) is None
    assert AR == "ar"
