from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.acceptance import (
    acceptance_summary,
    conditional_rates,
    is_loop,
    marginal_rates,
    reconcile,
    repeated_ngram_share,
    tau_request_mean,
    tau_step_weighted,
)
from tests.eval_records import request

steps = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=10)


def test_the_two_estimators_of_tau_differ_when_long_answers_are_accepted_less() -> None:
    accepted = [[0] * 9, [3]]
    assert tau_step_weighted(accepted) == pytest.approx(1 + 3 / 10)
    assert tau_request_mean(accepted) == pytest.approx((1 + 4) / 2)


def test_rates_by_position() -> None:
    accepted = [[3, 0, 1, 2], [1, 0]]
    assert marginal_rates(accepted, draft_length=3) == pytest.approx([4 / 6, 2 / 6, 1 / 6])
    full = [[3] * len(request) for request in accepted]
    assert conditional_rates(accepted, full, draft_length=3) == pytest.approx([4 / 6, 2 / 4, 1 / 2])


def test_a_position_that_was_not_drafted_is_no_miss_of_the_conditional_rate() -> None:
    assert conditional_rates([[1, 1]], [[1, 2]], draft_length=3) == [1.0, 0.0, None]


@given(steps)
def test_tau_is_one_plus_the_sum_of_marginals(accepted: list[list[int]]) -> None:
    assert tau_step_weighted(accepted) == pytest.approx(1 + sum(marginal_rates(accepted, draft_length=3)))


@given(steps)
def test_marginals_are_the_products_of_conditionals(accepted: list[list[int]]) -> None:
    drafted = [[3] * len(request) for request in accepted]
    product = 1.0
    conditional = conditional_rates(accepted, drafted, draft_length=3)
    for marginal, rate in zip(marginal_rates(accepted, draft_length=3), conditional, strict=True):
        product *= 0.0 if rate is None else rate
        assert marginal == pytest.approx(product)


def test_summary_of_one_request() -> None:
    accepted = [3, 0, 1, 2] * 5
    summary = acceptance_summary([request(accepted=accepted)], draft_length=3)
    assert summary["histogram"] == [5, 5, 5, 5]
    assert summary["tau_at_shorter_chains"] == pytest.approx([1.75, 2.25, 2.5])
    assert summary["draft_acceptance_rate"] == pytest.approx(0.5)
    assert summary["steps"] == 20


def test_no_steps_give_no_rates() -> None:
    summary = acceptance_summary([request(accepted=[])], draft_length=3)
    assert summary["tau"] is None
    assert summary["marginal"] == []


def test_reconciliation_leaves_what_was_cut_at_the_end() -> None:
    # 1 prefill token, 3 steps that accepted 3 each: 1 + 3 + 9 = 13 tokens, of which the answer kept 11.
    tally = reconcile([request(token_ids=list(range(11)), accepted=[3, 3, 3])])
    assert tally["residual"] == -2
    assert tally["residual_share"] == pytest.approx(-2 / 11)


def test_loops_are_flagged() -> None:
    assert repeated_ngram_share(list(range(50))) == 0
    assert repeated_ngram_share([1, 2, 3]) == 0
    assert is_loop(request(token_ids=[1, 2, 3, 4] * 10))
    assert not is_loop(request(token_ids=list(range(40))))
