from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eyas.eval.records import AR, AR_TWIN, ArmFacts, CellKey, Cells
from eyas.eval.stats import RatioInterval
from eyas.eval.verdict import MIN_PROMPTS, RULES, Evidence, best_arm, direction, judge, session_verdicts
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
    prompts=16,
    needed_prompts=16,
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
        (replace(GOOD, null_band=None), "INCONCLUSIVE", "no null band"),
        (replace(GOOD, prompts=5), "INCONCLUSIVE", "5 independent prompts of the 16 this cell needs"),
        (replace(SLOW, prompts=1), "INCONCLUSIVE", "1 independent prompt of the 16"),
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
    return session_verdicts(
        {"grid": (cells, None)}, arms=facts(*arms), lossless_passed=True, configs_void={}, min_requests={}, seed=1
    )


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
    synthetic = session_verdicts(
        {"grid": (cells, None)},
        arms=facts("k3", synthetic=True),
        lossless_passed=True,
        configs_void={},
        min_requests={},
        seed=1,
    )
    void = session_verdicts(
        {"grid": (cells, None)},
        arms=facts("k3"),
        lossless_passed=True,
        configs_void={"k3": "dtype"},
        min_requests={},
        seed=1,
    )
    assert {row["verdict"] for row in synthetic + void} == {"NOT SUPPORTED"}
    assert {row["direction"] for row in synthetic + void} == {"faster"}


def test_a_cell_with_fewer_prompts_than_it_needs_says_so() -> None:
    cells = noisy_session({"k3": 1.5}, seed=3, cells=2)
    wanted = {CellKey("heldout", 0.0, 2): 64}
    rows = session_verdicts(
        {"grid": (cells, None)},
        arms=facts("k3"),
        lossless_passed=True,
        configs_void={},
        min_requests=wanted,
        seed=1,
    )
    assert [row["verdict"] for row in rows] == ["SUPPORTED", "INCONCLUSIVE"]
    assert "16 independent prompts of the 64" in rows[1]["reason"]
    assert [row["needed_prompts"] for row in rows] == [MIN_PROMPTS, 64]


def test_the_recipe_cannot_ask_for_fewer_prompts_than_a_verdict_needs() -> None:
    cells = noisy_session({"k3": 1.5}, seed=3, cells=1, requests=MIN_PROMPTS - 1)
    (row,) = session_verdicts(
        {"grid": (cells, None)},
        arms=facts("k3"),
        lossless_passed=True,
        configs_void={},
        min_requests=dict.fromkeys(cells, 1),
        seed=1,
    )
    assert (row["verdict"], row["needed_prompts"]) == ("INCONCLUSIVE", MIN_PROMPTS)


def test_the_turns_of_one_conversation_are_one_prompt() -> None:
    """Sixteen turns of one talk decide nothing, however clear they are; the interval knows no scatter of prompts."""
    cells = noisy_session({"k3": 1.5}, seed=3, cells=1)
    for blocks in (blocks for group in cells.values() for starts in group.values() for blocks in starts):
        blocks[:] = [
            replace(block, requests=[replace(each, conversation="talk") for each in block.requests]) for block in blocks
        ]
    (row,) = rows_of(cells)
    assert (row["requests"], row["prompts"], row["indicative"], row["direction"]) == (16, 1, True, None)
    assert row["verdict"] == "INCONCLUSIVE"
    assert "1 independent prompt of the 12" in row["reason"]


def test_lossless_may_be_known_by_arm_and_temperature() -> None:
    cells = noisy_session({"k3": 1.5}, seed=3, cells=1)
    warm = {CellKey("heldout", 1.0, 1): group for group in cells.values()}
    rows = session_verdicts(
        {"grid": ({**cells, **warm}, None)},
        arms=facts("k3"),
        lossless_passed=lambda arm, temperature: (arm == "k3" and temperature == 0) or None,
        configs_void={},
        min_requests={},
        seed=1,
    )
    assert [row["verdict"] for row in rows] == ["SUPPORTED", "INCONCLUSIVE"]


def test_looping_answers_and_counters_that_disagree_are_seen_in_the_records() -> None:
    loop = [1, 2] * 20
    looping = [replace(each, token_ids=loop, n_out=40) for each in cell(60.0, requests=12).requests]
    counters = {**cell(60.0, requests=12, accepted=K3_STEPS).counters, "num_drafts": 90}
    drafted = [[replace(cell(rate, requests=12, accepted=K3_STEPS), counters=counters)] for rate in (60, 61, 62)]
    plain = [[replace(cell(rate, requests=12), requests=looping)] for rate in (40, 41, 42)]
    (row,) = rows_of({cell(1.0).key: {AR: plain, "k3": drafted}})
    assert row["loop_share"] == 1
    assert row["reconciliation"] > 0.01
    assert row["verdict"] == "INCONCLUSIVE"
    assert "loop" in row["reason"] and "counters" in row["reason"]


def test_an_engine_that_drafts_and_tells_no_answer_about_it_does_not_reconcile() -> None:
    """Counters of drafts without any per-request count: tau would rest on nothing, and no gap may hide that."""
    counted = cell(60.0, requests=12, accepted=K3_STEPS)
    silent = [replace(each, per_step_accepted=None, per_step_drafted=None) for each in counted.requests]
    drafted = [[replace(cell(rate, requests=12), requests=silent, counters=counted.counters)] for rate in (60, 61, 62)]
    plain = [[cell(rate, requests=12)] for rate in (40, 41, 42)]
    (row,) = rows_of({cell(1.0).key: {AR: plain, "k3": drafted}})
    assert row["reconciliation"] == 1
    assert "counters and token counts differ by 100.0%" in row["reason"]


def test_the_schedule_is_judged_in_its_phase_and_all_rows_are_corrected_together() -> None:
    """Holm by hand: m = 3, the smallest p-value counts three times."""
    grid = noisy_session({"k3": 1.1, "k1": 1.02}, seed=6, cells=1)
    later = noisy_session({"k3": 1.3, "schedule": 1.06}, seed=7, cells=1)
    arms = {**facts("k3", "k1"), "schedule": ArmFacts("schedule", 3, {"method": "eagle3"}, False)}
    rows = session_verdicts(
        {"grid": (grid, None), "schedule": (later, None)},
        arms=arms,
        lossless_passed=True,
        configs_void={},
        min_requests={},
        seed=1,
    )
    assert [(row["phase"], row["arm"]) for row in rows] == [("grid", "k3"), ("grid", "k1"), ("schedule", "schedule")]
    lowest, middle, highest = sorted(rows, key=lambda row: row["p_value"])
    assert lowest["p_holm"] == pytest.approx(min(1, 3 * lowest["p_value"]))
    assert middle["p_holm"] == pytest.approx(min(1, max(lowest["p_holm"], 2 * middle["p_value"])))
    assert highest["p_holm"] == pytest.approx(min(1, max(middle["p_holm"], highest["p_value"])))
    assert lowest["p_value"] < middle["p_value"]


def side_by_side(twins: tuple[float, ...]) -> list[dict]:
    """An arm 1.2 times as fast as AR in three pairs, and pairs of AR and its twin with these ratios."""
    plain = [[cell(rate, requests=12)] for rate in (40, 80, 20, 60, 30)]
    plain += [[cell(50.0, requests=12)] for _ in twins]
    drafted = [
        [cell(1.2 * rate * noise, requests=12, accepted=K3_STEPS)] for rate, noise in ((20, 1.01), (80, 1), (30, 0.99))
    ]
    twin = [[cell(50.0 * ratio, requests=12)] for ratio in twins]
    group = {AR: plain, "k3": drafted, "alone": drafted, **({AR_TWIN: twin} if twins else {})}
    pairs = {"k3": [(2, 0), (1, 1), (4, 2)], AR_TWIN: [(5 + index, index) for index in range(len(twins))]}
    arms = {**facts("k3", "alone"), AR_TWIN: ArmFacts("other", 0, None, False)}
    return session_verdicts(
        {"grid": ({cell(1.0).key: group}, {arm: own for arm, own in pairs.items() if own})},
        arms=arms,
        lossless_passed=True,
        configs_void={},
        min_requests={},
        seed=1,
    )


def test_side_by_side_starts_are_compared_in_pairs_and_the_twin_has_no_row() -> None:
    (row,) = side_by_side((1.01, 0.99, 1.0))
    assert row["arm"] == "k3"
    assert row["ratio"] == pytest.approx(1.2, rel=1e-3)
    assert row["starts"] == 3
    assert row["verdict"] == "SUPPORTED"


def test_side_by_side_the_band_is_what_ar_and_its_twin_differ_by() -> None:
    """Root mean square 0.2 about a ratio of 1, three pairs, t = 2.776 at the four degrees of both arms' pairs."""
    (row,) = side_by_side((math.exp(0.2), math.exp(-0.2), math.exp(0.2)))
    assert math.log(row["null_band"][1]) == pytest.approx(2.776445 * 0.2 / math.sqrt(3), rel=1e-4)
    assert row["verdict"] == "INCONCLUSIVE"
    (alone,) = side_by_side(())
    assert alone["null_band"] is None
    assert alone["verdict"] == "INCONCLUSIVE"
    assert "no null band" in alone["reason"]


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
