"""Acceptance rows of a session: what is pooled, what is not, and what a schedule's changing k does to the rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.acceptance import acceptance_results, acceptance_rows, acceptance_summary, offline_of
from eyas.eval.acceptance.intervals import ratio_interval, tau_intervals
from eyas.eval.acceptance.rates import by_drafted_length, conditional_rates, product_limit_rates, wasted_tokens
from eyas.eval.acceptance.rows import acceptance_cell_rows, acceptance_position_rows, reconciliation_rows
from eyas.eval.records import ArmFacts, CellKey, Cells
from tests.served_steps import served, served_cell

AR = ArmFacts("ar", 0, None, False)
K3 = ArmFacts("head", 3, {"num_speculative_tokens": 3}, False)
NGRAM = ArmFacts("other", 4, {"method": "ngram"}, False)
SCHEDULE = ArmFacts("schedule", 3, {"num_speculative_tokens": 3}, False)
ARMS = {"ar": AR, "k3": K3, "ngram": NGRAM, "schedule": SCHEDULE}


def one_cell(arm: str, cell_requests: dict[int, list], *, temperature: float = 0.0, starts: int = 1) -> Cells:
    return {
        CellKey("heldout", temperature, size): {
            arm: [[served_cell(requests, batch_size=size, temperature=temperature)] for _ in range(starts)]
        }
        for size, requests in cell_requests.items()
    }


def test_product_limit_undoes_the_censoring_by_short_chains() -> None:
    # 100 steps of k=1 and 100 of k=3, of a head that accepts .6, then .5, then .2 of what it tries.
    short = [1] * 60 + [0] * 40
    long = [0] * 40 + [1] * 30 + [2] * 24 + [3] * 6
    accepted, drafted = [short, long], [[1] * 100, [3] * 100]
    conditional = conditional_rates(accepted, drafted, draft_length=3)
    assert conditional == pytest.approx([0.6, 0.5, 0.2])
    assert product_limit_rates(conditional) == pytest.approx([0.6, 0.3, 0.06])
    summary = acceptance_summary([served([(1, a) for a in short] + [(3, a) for a in long])], draft_length=3)
    assert summary["marginal"] == pytest.approx([0.6, 0.15, 0.03]), "of all steps, drafted so far or not"
    assert summary["marginal_product_limit"] == pytest.approx([0.6, 0.3, 0.06])
    assert summary["tau_step_weighted"] == pytest.approx(1 + 0.6 + 0.15 + 0.03)


def test_product_limit_knows_what_follows_a_position_that_always_misses() -> None:
    assert product_limit_rates([0.5, 0.0, None, None]) == [0.5, 0.0, 0.0, 0.0]
    assert product_limit_rates([0.5, None, None]) == [0.5, None, None]


steps = st.lists(st.integers(1, 4).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=60)


@given(steps)
def test_what_is_verified_is_kept_or_wasted(counts: list[tuple[int, int]]) -> None:
    request = served(counts)
    summary = acceptance_summary([request], draft_length=4)
    wasted = summary["wasted"]
    assert wasted["verified"] == pytest.approx(wasted["wasted"] + summary["tau_step_weighted"])
    assert wasted["share"] == pytest.approx(1 - summary["tau_step_weighted"] / wasted["verified"])
    assert sum(row["steps"] for row in summary["by_drafted"]) == len(counts) == sum(summary["histogram"])
    assert summary["tau_step_weighted"] == pytest.approx(1 + sum(summary["marginal"]))
    assert summary["tau_all_steps"] == pytest.approx(summary["tau_step_weighted"]), "every step drafted, none was cut"


def test_wasted_tokens_of_fixed_k() -> None:
    assert wasted_tokens([[3, 0, 1, 2]], [[3, 3, 3, 3]]) == {"verified": 4.0, "wasted": 1.5, "share": 0.375}
    assert wasted_tokens([[]], [[]]) is None


def test_rates_by_drafted_length() -> None:
    rows = by_drafted_length([[0, 1, 3]], [[1, 1, 3]])
    assert rows[0] == {"drafted": 1, "steps": 2, "tau": 1.5, "draft_acceptance_rate": 0.5}
    assert rows[1] == {"drafted": 3, "steps": 1, "tau": 4.0, "draft_acceptance_rate": 1.0}


def test_steps_without_draft_lower_what_a_step_brings_but_not_tau() -> None:
    summary = acceptance_summary([served([(3, 2), None, (3, 2), None])], draft_length=3)
    assert summary["tau_step_weighted"] == 3
    assert summary["tau_all_steps"] == 2


def test_tau_within_the_answer_leaves_out_what_nobody_received() -> None:
    summary = acceptance_summary([served([(3, 3), (3, 3)], max_tokens=6)], draft_length=3)
    assert summary["tau_step_weighted"] == 4
    assert summary["tau_within_answer"] == 1 + (3 + 0) / 2


def test_loops_are_told_apart() -> None:
    loop = served([(3, 3)] * 10, prompt_id="loop", token_ids=[1, 2, 3, 4] * 10 + [1])
    sober = [served([(3, 0)] * 10, prompt_id="a"), served([(3, 1)] * 10, prompt_id="b")]
    summary = acceptance_summary([loop, *sober], draft_length=3)
    assert summary["tau_step_weighted"] == pytest.approx(1 + 40 / 30)
    assert summary["tau_without_loops"] == 1.5
    assert summary["tau_of_loops"] == 4
    assert summary["loop_requests"] == 1


def test_interval_of_a_ratio_matches_the_normal_theory() -> None:
    # Ratio of sums of 400 independent pairs: sd = sqrt(var(x - r y) / n) / mean(y) = 0.5 / 20 = 0.025 with y = 1.
    generator = np.random.default_rng(0)
    x = generator.normal(2, 0.5, size=400)
    bounds = ratio_interval(x, np.ones(400), clusters=[str(index) for index in range(400)])
    assert bounds is not None
    middle, spread = float(x.mean()), float(x.std() / 20)
    assert bounds == pytest.approx([middle - 1.96 * spread, middle + 1.96 * spread], abs=0.005)


def test_repeats_of_a_prompt_and_turns_of_a_conversation_are_no_new_evidence() -> None:
    distinct = [served([(3, index % 4)] * 5, prompt_id=f"p{index}") for index in range(40)]
    wide = tau_intervals(distinct)["step_weighted"]
    assert tau_intervals([*distinct, *distinct, *distinct])["step_weighted"] == wide
    turns = [
        served([(3, index % 4)] * 5, prompt_id=f"p{index}-{turn}", conversation=f"c{index}")
        for index in range(40)
        for turn in range(3)
    ]
    found = tau_intervals(turns)["step_weighted"]
    assert wide is not None
    assert found is not None
    assert found[1] - found[0] == pytest.approx(wide[1] - wide[0], rel=0.15)


def test_one_prompt_has_no_interval() -> None:
    assert tau_intervals([served([(3, 1)]), served([(3, 2)])]) == {"step_weighted": None, "request_mean": None}


def test_a_request_without_drafted_steps_has_no_tau_of_its_own() -> None:
    requests = [served([None] * 5, prompt_id="a"), served([(1, 1)] * 4, prompt_id="b"), served([(1, 0)], prompt_id="c")]
    assert tau_intervals(requests)["request_mean"] == pytest.approx([1, 2])
    assert acceptance_summary(requests, draft_length=1)["tau_request_percentiles"] == pytest.approx([1.1, 1.5, 1.9])


def test_rows_take_the_cell_with_the_most_prompts_and_every_cell_of_a_schedule() -> None:
    few, many = [served([(3, 0)] * 4)], [served([(3, 1)] * 4, prompt_id=f"p{index}") for index in range(3)]
    cells = one_cell("k3", {1: few, 4: many}, starts=2)
    for key, by_arm in one_cell("schedule", {1: many, 4: [served([None] * 4)]}).items():
        cells[key] |= by_arm
    cells[CellKey("heldout", 0.0, 4)]["ar"] = [[served_cell([served([None])], batch_size=4)]]
    rows = acceptance_rows(cells, ARMS, offline=None)
    assert [(row["arm"], row["batch_size"]) for row in rows] == [("k3", 4), ("schedule", 1), ("schedule", 4)]
    head, _, idle = rows
    assert (head["requests"], head["starts"], head["tau_step_weighted"]) == (6, 2, 2.0)
    assert head["reconciled"] is True
    assert head["counters"]["num_accepted_tokens"] == 24
    assert idle["tau_step_weighted"] is None, "k = 0 at this batch size: nothing was drafted"
    assert idle["tau_all_steps"] == 1
    assert idle["wasted"] is None
    assert len(acceptance_cell_rows(cells, ARMS)) == len(reconciliation_rows(cells, ARMS)) == 4


def test_temperatures_are_kept_apart() -> None:
    cold = one_cell("k3", {1: [served([(3, 2)] * 4)]})
    warm = one_cell("k3", {1: [served([(3, 0)] * 4)]}, temperature=1.0)
    rows = acceptance_rows(cold | warm, ARMS, offline=None)
    assert [(row["temperature"], row["tau_step_weighted"]) for row in rows] == [(0.0, 3.0), (1.0, 1.0)]


def test_an_arm_drafts_more_than_its_configuration_names() -> None:
    cells = one_cell("suffix", {1: [served([(6, 6), (2, 0)])]})
    (row,) = acceptance_rows(cells, {"suffix": ArmFacts("other", 0, {"method": "suffix"}, False)}, offline=None)
    assert row["draft_length"] == 6
    assert row["histogram"] == [1, 0, 0, 0, 0, 0, 1]


def test_offline_tau_stands_beside_served_tau_at_the_same_chain_length() -> None:
    context = {
        "training": {
            "heldout": {
                "chain_length": 5,
                "heldout_tau": 2.2,
                "heldout_marginal": [0.5, 0.3, 0.2, 0.12, 0.08],
                "estimator": "e",
            }
        }
    }
    offline = offline_of(context)
    requests = [served([(3, 3), (3, 0), (3, 1), (3, 0)])]
    cells = one_cell("k3", {1: requests}) | one_cell("k3", {1: requests}, temperature=1.0)
    cold, warm = acceptance_rows(cells, ARMS, offline=offline)
    assert cold["offline"]["draft_length"] == 3
    assert cold["offline"]["offline_tau"] == pytest.approx(2.0)
    assert cold["offline"]["served_tau"] == pytest.approx(2.0)
    assert cold["offline"]["relative_difference"] == pytest.approx(0)
    assert warm["offline"] is None, "the trainer walked greedy answers"
    assert offline_of({"training": {}}) is None
    assert offline_of({}) is None


def test_no_drafting_arm_gives_empty_rows() -> None:
    cells = one_cell("ar", {1: [served([None] * 4)]})
    assert acceptance_results(cells, {"ar": AR}, offline=None) == {
        "acceptance": [],
        "acceptance_cells": [],
        "acceptance_positions": [],
        "reconciliation": [],
    }


def test_position_rows_share_their_buckets() -> None:
    long = [served([(3, 1)] * 50, prompt_id="long")]
    short = [served([(4, 0)] * 20, prompt_id="short")]
    cells = one_cell("k3", {1: long})
    cells[CellKey("heldout", 0.0, 1)]["ngram"] = [[served_cell(short)]]
    rows = acceptance_position_rows(cells, ARMS)
    assert [(row["arm"], row["from"]) for row in rows] == [
        ("k3", 0),
        ("k3", 16),
        ("k3", 32),
        ("k3", 64),
        ("ngram", 0),
        ("ngram", 16),
    ]
