"""Acceptance rows of a session: what is pooled, what is not, and what a schedule's changing k does to the rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.acceptance import acceptance_results, acceptance_rows, acceptance_summary, offline_of
from eyas.eval.acceptance.intervals import tau_interval, tau_intervals
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
    assert summary["tau"] == pytest.approx(1 + 0.6 + 0.15 + 0.03)


def test_product_limit_knows_what_follows_a_position_that_always_misses() -> None:
    assert product_limit_rates([0.5, 0.0, None, None]) == [0.5, 0.0, 0.0, 0.0]
    assert product_limit_rates([0.5, None, None]) == [0.5, None, None]


steps = st.lists(st.integers(1, 4).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=60)


@given(steps)
def test_what_is_verified_is_kept_or_wasted(counts: list[tuple[int, int]]) -> None:
    request = served(counts, max_tokens=30)
    counts = counts[: len(request.per_step_accepted or [])]
    summary = acceptance_summary([request], draft_length=4)
    wasted = summary["wasted"]
    assert wasted["verified"] == pytest.approx(wasted["wasted"] + summary["tau"])
    assert wasted["share"] == pytest.approx(1 - summary["tau"] / wasted["verified"])
    assert sum(row["steps"] for row in summary["by_drafted"]) == len(counts) == sum(summary["histogram"])
    assert summary["tau_engine"] == pytest.approx(1 + sum(summary["marginal"]))
    assert summary["tau_all_steps"] == pytest.approx(summary["tau"]), "every step drafted"


def test_wasted_tokens_of_fixed_k() -> None:
    assert wasted_tokens([[3, 0, 1, 2]], [[3, 3, 3, 3]]) == {"verified": 4.0, "wasted": 1.5, "share": 0.375}
    assert wasted_tokens([[]], [[]]) is None


def test_rates_by_drafted_length() -> None:
    rows = by_drafted_length([[0, 1, 3]], [[1, 1, 3]])
    assert rows == [{"drafted": 1, "steps": 2, "tau": 1.5}, {"drafted": 3, "steps": 1, "tau": 4.0}]


def test_steps_without_draft_lower_what_a_step_brings_but_not_tau() -> None:
    summary = acceptance_summary([served([(3, 2), None, (3, 2), None])], draft_length=3)
    assert summary["tau"] == 3
    assert summary["tau_all_steps"] == 2


def test_tau_leaves_out_what_nobody_received() -> None:
    """Six tokens: one read, four, and one that was left of the four of the last step."""
    summary = acceptance_summary([served([(3, 3), (3, 3)], max_tokens=6)], draft_length=3)
    assert summary["tau"] == summary["tau_request_mean"] == summary["tau_all_steps"] == 2.5
    assert summary["tau_engine"] == 4
    assert summary["tau_at_shorter_chains"] == [1.5, 2, 2.5]
    assert summary["wasted"] == {"verified": 4.0, "wasted": 1.5, "share": 0.375}
    assert summary["marginal"] == summary["conditional"] == [1, 1, 1], "a chain that the end cut short is no miss"


def test_loops_are_told_apart() -> None:
    loop = served([(3, 3)] * 10, prompt_id="loop", token_ids=[1, 2, 3, 4] * 10 + [1])
    sober = [served([(3, 0)] * 10, prompt_id="a"), served([(3, 1)] * 10, prompt_id="b")]
    summary = acceptance_summary([loop, *sober], draft_length=3)
    assert summary["tau"] == pytest.approx(1 + 40 / 30)
    assert summary["tau_without_loops"] == 1.5
    assert summary["tau_of_loops"] == 4
    assert summary["loop_requests"] == 1


def test_the_interval_of_tau_matches_the_normal_theory() -> None:
    # A mean of 400 independent values, far from both ends: sd 0.5 / sqrt(400).
    generator = np.random.default_rng(0)
    x = generator.normal(2, 0.5, size=400)
    bounds = tau_interval(x.tolist(), [1.0] * 400, units=[str(index) for index in range(400)], longest=9)
    middle, spread = 1 + float(x.mean()), float(x.std(ddof=1) / 20)
    assert bounds == pytest.approx([middle - 1.966 * spread, middle + 1.966 * spread], abs=0.001)


def test_equal_weights_give_students_t() -> None:
    # log tau of 1 + (1, 2, 3, 4): mean 2.5, standard error sqrt(5/3 / 4), t = 3.1824 with 3 degrees of freedom.
    bounds = tau_interval([1, 2, 3, 4], [1] * 4, units=list("abcd"), longest=9)
    reach = math.exp(3.18245 * math.sqrt(5 / 12) / 3.5)
    assert bounds == pytest.approx([3.5 / reach, 3.5 * reach], rel=1e-5)


@pytest.mark.parametrize("prompts", [3, 8, 12])
def test_the_interval_of_tau_covers_what_it_says_with_few_prompts(prompts: int) -> None:
    """Prompts of uneven length with acceptance of their own; percentiles of a bootstrap cover 73, 88 and 92 %."""
    generator = np.random.default_rng(0)

    def serve(count: int) -> tuple[list[float], list[float]]:
        rates = generator.beta(2, 2, size=count)
        laws = np.stack([1 - rates, rates * (1 - rates), rates**2 * (1 - rates), rates**3], axis=1)
        steps = np.round(generator.integers(16, 64, size=count) / (1 + laws @ np.arange(4)))
        taken = [float(generator.multinomial(int(n), law) @ np.arange(4)) for n, law in zip(steps, laws, strict=True)]
        return taken, steps.tolist()

    taken, steps = serve(100_000)
    truth = 1 + sum(taken) / sum(steps)
    sessions, held = 1500, 0
    for _ in range(sessions):
        bounds = tau_interval(*serve(prompts), units=[str(index) for index in range(prompts)], longest=3)
        assert bounds is not None
        held += bounds[0] <= truth <= bounds[1]
    assert held / sessions == pytest.approx(0.95, abs=0.02)


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
    low, high = tau_intervals(requests)["request_mean"] or [0, 0]
    assert (low, high) == (1, 2), "two prompts say nothing but what is possible: 1 to 1 + k"
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
    assert (head["requests"], head["starts"], head["tau"]) == (6, 2, 2.0)
    assert head["reconciled"] is True
    assert head["counters"]["num_accepted_tokens"] == 24
    assert idle["tau"] is None, "k = 0 at this batch size: nothing was drafted"
    assert idle["tau_all_steps"] == 1
    assert idle["wasted"] is None
    assert len(acceptance_cell_rows(cells, ARMS)) == len(reconciliation_rows(cells, ARMS)) == 4


def test_temperatures_are_kept_apart() -> None:
    cold = one_cell("k3", {1: [served([(3, 2)] * 4)]})
    warm = one_cell("k3", {1: [served([(3, 0)] * 4)]}, temperature=1.0)
    rows = acceptance_rows(cold | warm, ARMS, offline=None)
    assert [(row["temperature"], row["tau"]) for row in rows] == [(0.0, 3.0), (1.0, 1.0)]


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
    cut = one_cell("k3", {1: [served([(3, 3), (3, 0), (3, 1), (3, 3)], max_tokens=9)]})
    (row,) = acceptance_rows(cut, ARMS, offline=offline)
    assert row["offline"]["served_tau"] == pytest.approx(1 + 4 / 4), "of the last step one token is in the answer"
    assert offline_of({"training": {}}) is None
    assert offline_of({}) is None


def test_tau_over_the_prompts_that_all_batch_sizes_share() -> None:
    """Batch size 1 serves a prompt with tau 3, batch size 4 three more with tau 1: the head is the same at both."""
    good, bad = served([(3, 2)] * 4, prompt_id="p0"), [served([(3, 0)] * 4, prompt_id=f"p{n}") for n in (1, 2, 3)]
    cells = one_cell("k3", {1: [good], 4: [good, *bad]}, starts=2)
    cells |= one_cell("k3", {4: bad}, temperature=1.0)
    small, large, alone = acceptance_cell_rows(cells, ARMS)
    assert (small["tau"], large["tau"]) == (3, 1.5)
    assert (small["tau_common"], large["tau_common"]) == (3, 3)
    assert large["tau_all_steps_common"] == 3
    assert (large["prompts"], large["common_prompts"], large["requests"]) == (4, 1, 8)
    assert large["tau_common_interval"] is None, "one prompt"
    assert (alone["tau_common"], alone["common_prompts"]) == (1, 3), "another temperature has sizes of its own"


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
