from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.eval.records import AR, CellKey, Cells
from eyas.eval.stats import RatioInterval
from eyas.eval.verdict import RULES, Evidence, best_arm, direction, judge, verdict_rows
from tests.eval_noise import facts, noisy_session
from tests.eval_records import K3_STEPS, cell

FASTER = RatioInterval(1.25, 1.15, 1.35, 0.001, 0.04, 6.0)
SLOWER = RatioInterval(0.8, 0.7, 0.9, 0.001, 0.05, 6.0)
UNDECIDED = RatioInterval(1.02, 0.97, 1.08, 0.4, 0.03, 6.0)
GOOD = Evidence(
    interval=FASTER,
    p_holm=0.01,
    null_band=(0.95, 1.05),
    starts=3,
    requests=16,
    needed_requests=16,
    loop_share=0.0,
    reconciliation=0.0,
    lossless_passed=True,
    synthetic=False,
    void=None,
)
SLOW = replace(GOOD, interval=SLOWER)


@pytest.mark.parametrize(
    ("evidence", "word", "reason"),
    [
        (GOOD, "SUPPORTED", "faster beyond chance, over 3 starts"),
        (SLOW, "SLOWER", "slower beyond chance"),
        (replace(GOOD, starts=2), "INCONCLUSIVE", "indicative only: 2 starts per arm; a verdict needs 3"),
        (replace(SLOW, starts=1), "INCONCLUSIVE", "indicative only: 1 start per arm"),
        (replace(GOOD, interval=replace(FASTER, indicative=True)), "INCONCLUSIVE", "indicative only"),
        (replace(GOOD, requests=5), "INCONCLUSIVE", "5 prompts of the 16 this cell needs"),
        (replace(SLOW, requests=5), "INCONCLUSIVE", "5 prompts of the 16"),
        (replace(GOOD, interval=UNDECIDED), "INCONCLUSIVE", "the interval includes 1"),
        (replace(GOOD, null_band=(0.75, 1.3)), "INCONCLUSIVE", "AR against AR gives 0.750 to 1.300"),
        (replace(SLOW, null_band=(0.75, 1.3)), "INCONCLUSIVE", "inside the null band"),
        (replace(GOOD, p_holm=0.2), "INCONCLUSIVE", "p = 0.200 after Holm's correction"),
        (replace(GOOD, loop_share=0.4), "INCONCLUSIVE", "40% of the answers loop"),
        (replace(GOOD, reconciliation=0.03), "INCONCLUSIVE", "counters and token counts differ by 3.0%"),
        (replace(GOOD, lossless_passed=None), "INCONCLUSIVE", "measured faster, but the lossless check did not run"),
        (replace(GOOD, lossless_passed=False), "NOT SUPPORTED", "lossless check failed"),
        (replace(GOOD, lossless_passed=False, interval=UNDECIDED), "NOT SUPPORTED", "lossless check failed"),
        (replace(SLOW, lossless_passed=False), "SLOWER", "slower beyond chance"),
        (replace(SLOW, loop_share=0.9, reconciliation=0.5), "SLOWER", "slower beyond chance"),
        (replace(GOOD, synthetic=True), "NOT SUPPORTED", "synthetic"),
        (replace(SLOW, synthetic=True), "NOT SUPPORTED", "synthetic"),
        (replace(GOOD, void="async_scheduling: True, False"), "NOT SUPPORTED", "void: async_scheduling"),
        (replace(SLOW, void="dtype"), "NOT SUPPORTED", "void"),
    ],
)
def test_rules(evidence: Evidence, word: str, reason: str) -> None:
    verdict = judge(evidence)
    assert verdict.word == word
    assert reason in verdict.reason


def test_every_lack_of_a_faster_cell_is_named() -> None:
    verdict = judge(replace(GOOD, lossless_passed=None, loop_share=0.4, reconciliation=0.03))
    assert verdict.reason.count(";") == 2


def test_without_a_null_band_nothing_is_called() -> None:
    assert direction(FASTER, p_holm=0.001, null_band=None) is None
    assert direction(FASTER, p_holm=0.001, null_band=(0.9, 1.1)) == "faster"
    assert direction(SLOWER, p_holm=0.001, null_band=(0.9, 1.1)) == "slower"


def rows_of(cells: Cells) -> list[dict]:
    """Rows of a session whose arms are heads."""
    arms = list(dict.fromkeys(arm for group in cells.values() for arm in group if arm != AR))
    return verdict_rows(cells, arms=facts(*arms), lossless_passed=True, configs_void={}, min_requests={}, seed=1)


def test_a_session_finds_the_faster_and_the_slower_arm_in_every_cell() -> None:
    rows = rows_of(noisy_session({"k3": 1.4, "k1": 1.0, "slow": 0.7}, seed=4))
    words = {arm: {row["verdict"] for row in rows if row["arm"] == arm} for arm in ("k3", "k1", "slow")}
    assert words == {"k3": {"SUPPORTED"}, "k1": {"INCONCLUSIVE"}, "slow": {"SLOWER"}}
    for row in rows:
        truth = {"k3": 1.4, "k1": 1.0, "slow": 0.7}[row["arm"]]
        assert row["ratio"] == pytest.approx(truth, rel=0.08)
        assert row["tokens_per_second"] / row["ar_tokens_per_second"] == pytest.approx(row["ratio"])
        assert row["p_holm"] >= row["p_value"]
        for name in ("tpot_ratio", "e2e_ratio", "ttft_ratio"):
            assert row[name]["ratio"] == pytest.approx(1 / truth, rel=0.08)
            assert row[name]["interval"][0] < row[name]["ratio"] < row[name]["interval"][1]


def test_rows_are_cells_with_ar_in_the_order_of_the_arms() -> None:
    cells = noisy_session({"k3": 1.2, "k1": 1.1}, seed=1, cells=2)
    del cells[CellKey("heldout", 0.0, 2)][AR]
    assert [(row["batch_size"], row["arm"]) for row in rows_of(cells)] == [(1, "k3"), (1, "k1")]


def test_one_pair_of_processes_decides_nothing() -> None:
    rows = rows_of(noisy_session({"k3": 3.0, "slow": 0.3}, seed=2, cells=1, starts=1))
    assert {row["verdict"] for row in rows} == {"INCONCLUSIVE"}
    assert all(row["indicative"] and row["null_band"] is None and row["direction"] is None for row in rows)


def test_synthetic_acceptance_and_void_configurations_are_never_supported() -> None:
    cells = noisy_session({"k3": 1.5}, seed=3, cells=2)
    synthetic = verdict_rows(
        cells,
        arms=facts("k3", synthetic=True),
        lossless_passed=True,
        configs_void={},
        min_requests={},
        seed=1,
    )
    void = verdict_rows(
        cells, arms=facts("k3"), lossless_passed=True, configs_void={"k3": "dtype"}, min_requests={}, seed=1
    )
    assert {row["verdict"] for row in synthetic + void} == {"NOT SUPPORTED"}
    assert {row["direction"] for row in synthetic + void} == {"faster"}


def test_a_cell_with_fewer_prompts_than_it_needs_says_so() -> None:
    cells = noisy_session({"k3": 1.5}, seed=3, cells=2)
    wanted = {CellKey("heldout", 0.0, 2): 64}
    rows = verdict_rows(cells, arms=facts("k3"), lossless_passed=True, configs_void={}, min_requests=wanted, seed=1)
    assert [row["verdict"] for row in rows] == ["SUPPORTED", "INCONCLUSIVE"]
    assert "16 prompts of the 64" in rows[1]["reason"]


def test_lossless_may_be_known_by_arm_and_temperature() -> None:
    cells = noisy_session({"k3": 1.5}, seed=3, cells=1)
    warm = {CellKey("heldout", 1.0, 1): group for group in cells.values()}
    rows = verdict_rows(
        {**cells, **warm},
        arms=facts("k3"),
        lossless_passed=lambda arm, temperature: (arm == "k3" and temperature == 0) or None,
        configs_void={},
        min_requests={},
        seed=1,
    )
    assert [row["verdict"] for row in rows] == ["SUPPORTED", "INCONCLUSIVE"]


def test_looping_answers_and_counters_that_disagree_are_seen_in_the_records() -> None:
    loop = [1, 2] * 20
    looping = [replace(each, token_ids=loop, n_out=40) for each in cell(60.0, requests=6).requests]
    counters = {**cell(60.0, requests=6, accepted=K3_STEPS).counters, "num_drafts": 90}
    drafted = [[replace(cell(rate, requests=6, accepted=K3_STEPS), counters=counters)] for rate in (60, 61, 62)]
    plain = [[replace(cell(rate, requests=6), requests=looping)] for rate in (40, 41, 42)]
    (row,) = rows_of({cell(1.0).key: {AR: plain, "k3": drafted}})
    assert row["loop_share"] == 1
    assert row["reconciliation"] > 0.01
    assert row["verdict"] == "INCONCLUSIVE"
    assert "loop" in row["reason"] and "counters" in row["reason"]


def test_side_by_side_starts_are_compared_in_pairs() -> None:
    plain = [[cell(rate, requests=6)] for rate in (40, 80, 20, 60, 30)]
    drafted = [
        [cell(1.2 * rate * noise, requests=6, accepted=K3_STEPS)] for rate, noise in ((20, 1.01), (80, 1), (30, 0.99))
    ]
    pairs = {"k3": [(2, 0), (1, 1), (4, 2)]}
    cells = {cell(1.0).key: {AR: plain, "k3": drafted, "alone": drafted}}
    (row,) = verdict_rows(
        cells,
        arms=facts("k3", "alone"),
        lossless_passed=True,
        configs_void={},
        min_requests={},
        partners=pairs,
        seed=1,
    )
    assert row["ratio"] == pytest.approx(1.2, rel=1e-3)
    assert row["starts"] == 3
    assert row["verdict"] == "SUPPORTED"


def test_the_written_rules_name_every_verdict() -> None:
    assert {rule.split(":")[0].split(",")[0] for rule in RULES} == {
        "SUPPORTED",
        "SLOWER",
        "NOT SUPPORTED",
        "INCONCLUSIVE",
    }


def test_best_arm_includes_plain_decoding_and_gives_it_ties() -> None:
    assert best_arm({"ar": 40.0, "k3": 50.0, "k1": 45.0}) == "k3"
    assert best_arm({"k3": 40.0, "ar": 40.0}) == "ar"
