"""Which step brought which tokens, and whether the counts explain the output."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.acceptance.positions import bucket_edges, placed_steps, position_rows
from eyas.eval.acceptance.reconcile import passes, reconcile, reconcile_counters, unexplained_tokens
from eyas.eval.acceptance.steps import (
    accepted_in_answer,
    chunks_of_steps,
    cut_at_end,
    decode_steps,
    received_counts,
    step_positions,
    undrafted_steps,
)
from tests.served_steps import Step, served


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    drafted = st.integers(1, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
    return draw(st.lists(st.one_of(st.none(), drafted), min_size=1, max_size=40))


def test_without_undrafted_steps_every_chunk_is_a_step() -> None:
    request = served([(3, 2), (3, 0), (3, 3)])
    assert request.chunk_sizes == [1, 3, 1, 4]
    assert step_positions(request) == [1, 4, 5]
    assert undrafted_steps(request) == 0
    assert cut_at_end(request) == 0


def test_a_step_that_accepted_something_is_found_among_steps_without_draft() -> None:
    request = served([None, None, (3, 2), None, (3, 1), None])
    assert step_positions(request) == [3, 7]
    assert undrafted_steps(request) == 4


def test_misses_among_steps_without_draft_are_spread_evenly() -> None:
    assert chunks_of_steps([1, 1, 1, 1, 1], [0]) == [3]
    assert chunks_of_steps([1, 1, 1, 1, 1], [0, 0]) == [2, 4]
    assert chunks_of_steps([1, 1, 1, 1, 1], [0, 0, 0, 0]) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("last", "max_tokens", "cut"), [((3, 3), 3, 2), ((3, 3), 2, 3), ((3, 3), 5, 0), ((3, 0), 2, 0), (None, 2, 0)]
)
def test_what_the_end_of_the_answer_cut(last: Step, max_tokens: int, cut: int) -> None:
    request = served([last], max_tokens=max_tokens)
    assert cut_at_end(request) == cut
    assert unexplained_tokens(request) == 0


def test_counts_that_contradict_the_chunks_have_no_positions() -> None:
    assert chunks_of_steps([1, 2, 3], [1, 1]) is None, "a chunk of 3 tokens is no step that accepted 1"
    assert chunks_of_steps([1, 1], [0, 0]) is None, "two steps, one chunk"
    assert chunks_of_steps([1, 3, 1], [0, 0]) is None, "a chunk of 3 tokens without a step that accepted"
    assert chunks_of_steps([1], [2]) is None
    assert chunks_of_steps([], []) == []


@given(step_lists(), st.integers(2, 60))
def test_whatever_a_request_went_through_is_explained_to_the_token(steps: list[Step], max_tokens: int) -> None:
    request = served(steps, max_tokens=max_tokens)
    ran, cut = [], 0
    position = 1
    expected = []
    for step in steps:
        if position >= max_tokens:
            break
        ran.append(step)
        if step is not None:
            expected.append((position, *step, min(step[1], max_tokens - position - 1)))
        position += 1 + (0 if step is None else step[1])
    cut = max(0, position - max_tokens)
    assert decode_steps(request) == len(ran)
    assert undrafted_steps(request) == sum(step is None for step in ran)
    assert unexplained_tokens(request) == 0
    # A cut step with nothing left of its drafts looks like any other one-token step; it is found all the same.
    assert cut_at_end(request) == (cut if ran and ran[-1] is not None else 0)
    placed = placed_steps(request)
    assert [(step.drafted, step.accepted) for step in placed] == [(k, accepted) for _, k, accepted, _ in expected]
    assert received_counts(request) == [received for *_, received in expected]
    # A walk over the answer finds every draft that stands in it.
    assert accepted_in_answer(request) == [min(accepted, max_tokens - where) for where, _, accepted, _ in expected]
    for step, (where, _, accepted, _) in zip(placed, expected, strict=True):
        if accepted > 0:
            assert step.position == where
    assert all(a.position < b.position for a, b in pairwise(placed))


@given(step_lists(), st.integers(1, 5))
def test_tokens_that_came_from_nowhere_are_unexplained(steps: list[Step], extra: int) -> None:
    request = served(steps)
    more = replace(request, n_out=request.n_out + extra)
    assert unexplained_tokens(more) == extra
    tally = reconcile([request, more])
    assert tally["unexplained"] == extra
    assert tally["worst"] == [{"prompt_id": "p0", "unexplained": extra}]


def test_reconciliation_names_its_residual() -> None:
    # Prefill 1; steps bring 4, 1, 1 (no draft), and of the last 4 only 2 fit: 9 tokens.
    tally = reconcile([served([(3, 3), (3, 0), None, (3, 3)], max_tokens=9)])
    assert tally["output_tokens"] == 9
    assert (tally["steps"], tally["accepted"]) == (3, 6)
    assert tally["residual"] == 9 - (1 + 3 + 6) == -1
    assert tally["residual"] == tally["undrafted_steps"] - tally["cut_at_end"] + tally["unexplained"]
    assert (tally["undrafted_steps"], tally["cut_at_end"], tally["unexplained"]) == (1, 2, 0)


def test_one_percent_unexplained_passes_and_more_does_not() -> None:
    whole = served([None] * 99)
    lost = replace(whole, n_out=99)
    no_counters = reconcile_counters([whole], {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0})
    assert passes(reconcile([lost, whole]), no_counters)
    assert not passes(reconcile([replace(whole, n_out=98)]), no_counters)
    # Opposite errors of two requests do not cancel.
    assert not passes(reconcile([replace(whole, n_out=97), replace(whole, n_out=103)]), no_counters)


def test_the_engines_counters_are_held_against_the_requests() -> None:
    requests = [served([(3, 2), (3, 0)]), served([(2, 1)])]
    right = {"num_drafts": 3, "num_draft_tokens": 8, "num_accepted_tokens": 3}
    assert [row["difference"] for row in reconcile_counters(requests, right)] == [0, 0, 0]
    wrong = reconcile_counters(requests, right | {"num_accepted_tokens": 4})
    assert wrong[2] == {"counter": "num_accepted_tokens", "engine": 4, "requests": 3, "difference": 1, "share": 0.25}
    assert not passes(reconcile(requests), wrong)
    assert reconcile_counters(requests, dict.fromkeys(right, 0))[0]["share"] == 1


def test_buckets_follow_the_longest_answer() -> None:
    assert bucket_edges(2000) == [0, 32, 128, 512]
    assert bucket_edges(400) == [0, 32, 128]
    assert bucket_edges(128) == [0, 16, 32, 64]
    assert bucket_edges(40) == [0, 8, 16, 32]
    assert bucket_edges(20) == [0, 8, 16]
    assert bucket_edges(0) == [0]


def test_acceptance_by_output_position() -> None:
    # Steps begin at 1, 4, 7, ...: accepted 2 of 2 before position 32, then 0 of 2.
    long = served([(2, 2)] * 11 + [(2, 0)] * 20, prompt_id="long")
    short = served([(2, 0)] * 3, prompt_id="short")
    first, second = position_rows([long, short], edges=[0, 32, 128])
    assert (first["from"], first["to"], second["to"]) == (0, 32, 128)
    assert (first["steps"], first["requests"]) == (14, 2)
    assert first["tau"] == pytest.approx(1 + 22 / 14)
    assert first["tau_of_longest"] == 3
    assert first["draft_acceptance_rate"] == pytest.approx(22 / 28)
    assert first["first_position_rate"] == pytest.approx(11 / 14)
    assert second["tau"] == second["tau_of_longest"] == 1
    assert second["longest_requests"] == 1
    assert second["interval"] is None, "one prompt does not show how prompts differ"
    assert first["interval"][0] <= first["tau"] <= first["interval"][1]


def test_the_end_of_the_answer_is_no_fall_of_acceptance() -> None:
    """Every step accepts 3 of 3; of the last only one token is left, so tau of what was received would be 1 there."""
    first, last = position_rows([served([(3, 3)] * 5, max_tokens=18)], edges=[0, 17])
    assert (first["tau"], last["tau"], last["steps"]) == (4, 4, 1)


def test_a_step_belongs_to_the_bucket_of_the_position_where_it_begins() -> None:
    request = served([(1, 1)] * 3 + [(1, 0)])
    assert step_positions(request) == [1, 3, 5, 7]
    first, second = position_rows([request], edges=[0, 5])
    assert (first["steps"], second["steps"]) == (2, 2)
    assert (first["tau"], second["tau"]) == (2, 1.5)


def test_a_request_whose_counts_contradict_its_chunks_has_no_place() -> None:
    broken = replace(served([(2, 2)] * 5), chunk_sizes=[1, 15])
    assert placed_steps(broken) == []
    assert position_rows([broken], edges=[0, 32]) == []
