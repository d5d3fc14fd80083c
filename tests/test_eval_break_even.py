"""Where drafting pays: crossings, their words, their intervals over starts and prompts, the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.cost.break_even import (
    ALWAYS,
    NEVER,
    beginning,
    break_even,
    describe,
    linear_break_even,
    paying_ranges,
)
from eyas.eval.cost.prompt_draws import common_prompts, draw_weights, tau_factors
from eyas.eval.cost.rows import cost_results
from eyas.eval.records import CellRecord, Cells
from tests.cost_cells import facts, serve, session
from tests.cost_laws import (
    DRAFTS,
    LENGTHS,
    SEQUENCE,
    SIZES,
    STEP,
    TAUS,
    TOKEN,
    linear_law,
    linear_session,
)


def test_break_even_measured_and_predicted() -> None:
    result = linear_session()
    exact = {
        arm: linear_break_even(
            step=STEP, draft=DRAFTS[arm], token=TOKEN, sequence=SEQUENCE, draft_length=LENGTHS[arm], tau=TAUS[arm]
        )
        for arm in LENGTHS
    }
    for row in result["break_even"]:
        predicted = row["predicted_decode"]["batch_size"]
        if exact[row["arm"]] < 32:
            assert predicted == pytest.approx(exact[row["arm"]], rel=0.1)
            assert row["measured_decode"]["batch_size"] == pytest.approx(exact[row["arm"]], rel=0.15)
            low, high = row["predicted_decode"]["interval"]
            assert low < predicted < high < 1.15 * low, "equal starts, and prompts that accept nearly alike"
        else:
            assert row["predicted_decode"]["label"] == "> 32"
    assert result["break_even"][0]["closed_form"] == pytest.approx(exact["k3"], rel=0.1)


def test_crossing_is_interpolated_in_the_logarithm_of_the_batch_size() -> None:
    assert paying_ranges([1, 4, 16], [2.0, 1.25, 0.8]) == [(NEVER, pytest.approx(8))]
    assert paying_ranges([1, 4], [0.9, 0.8]) == []
    assert paying_ranges([1, 4], [1.2, 1.0]) == [(NEVER, ALWAYS)]


def test_a_head_may_begin_to_pay_above_the_smallest_size_and_pay_twice() -> None:
    """A dear draft costs at batch size 1 and pays at 4: "< 1" would be the opposite of what was measured."""
    late = paying_ranges([1, 4, 16], [0.8, 1.25, 0.8])
    assert late == [(pytest.approx(2), pytest.approx(8))]
    assert (beginning(late), break_even(late)) == (pytest.approx(2), pytest.approx(8))
    twice = paying_ranges([1, 4, 16, 64, 256], [1.25, 0.8, 1.25, 1.25, 0.8])
    assert twice == [(NEVER, pytest.approx(2)), (pytest.approx(8), pytest.approx(128))]
    assert break_even(twice) == pytest.approx(128)
    assert paying_ranges([1, 4], [0.8, 1.25]) == [(pytest.approx(2), ALWAYS)]
    assert (beginning([]), break_even([])) == (ALWAYS, NEVER)
    assert describe(late, None, smallest=1, largest=16)["label"] == "pays from 2 to 8"
    assert describe(twice, None, smallest=1, largest=256)["label"] == "pays from 1 to 2, pays from 8 to 128"


def test_crossings_beyond_the_tested_range_are_words() -> None:
    assert describe([(NEVER, ALWAYS)], None, smallest=1, largest=32)["label"] == "> 32"
    row = describe([], [[], [(NEVER, 4.0)], [(3.0, ALWAYS)]], smallest=2, largest=32)
    assert (row["label"], row["interval_label"], row["batch_size"]) == ("< 2", "< 2 to > 32", None)
    assert row["begins_interval_label"] is None
    row = describe([(3.0, 9.0)], [[], [(NEVER, 4.0)], [(3.0, ALWAYS)]], smallest=2, largest=32)
    assert (row["interval_label"], row["begins_interval_label"]) == ("< 2 to > 32", "< 2 to > 32")
    row = describe([(3.0, ALWAYS)], [[(3.0, ALWAYS)]], smallest=2, largest=32)
    assert (row["label"], row["begins"], row["ranges"]) == ("pays from 3 on", 3.0, [[3.0, None]])
    assert describe([(NEVER, 4.0)], [[(NEVER, 4.0)]], smallest=2, largest=32)["begins_interval_label"] is None


def two_kinds_of_prompts(good: int, bad: int) -> list:
    """One start at batch size 1: `good` prompts accept 3 drafts of 3 in every step, `bad` ones none."""
    accepts = {"good": [3], "bad": [0]}
    cells = [
        serve("k3", batch_size=1, law=linear_law, draft_length=3, accepts=accepts[kind], requests=1)
        for kind in ("good",) * good + ("bad",) * bad
    ]
    requests = [replace(cell.requests[0], prompt_id=f"p{number}") for number, cell in enumerate(cells)]
    return [replace(cells[0], requests=requests)]


def test_tau_is_drawn_with_the_prompts_of_all_batch_sizes_together() -> None:
    """A good prompt takes 40 tokens in 10 steps, a bad one in 40: weights (2, 0) and (0, 2) give tau 4 and 1."""
    cells = two_kinds_of_prompts(1, 1)
    weights = {"p0": np.array([1.0, 2.0, 0.0]), "p1": np.array([1.0, 0.0, 2.0])}
    assert tau_factors(cells, weights) * (80 / 50) == pytest.approx([80 / 50, 4.0, 1.0])
    assert tau_factors(cells, {"p0": np.ones(1)}) * (80 / 50) == pytest.approx([4.0]), "the common prompts alone"
    alike = draw_weights({1: {"k3": [cells]}}, count=50, seed=1)
    assert set(alike) == {"p0", "p1"}
    assert tau_factors(two_kinds_of_prompts(2, 0), alike) == pytest.approx(np.ones(50))


def test_a_larger_batch_with_worse_prompts_moves_no_break_even() -> None:
    """The prompts that only batch sizes above 4 have accept nothing; tau of the others is 2 at every size."""
    cells = session(linear_law, lengths={"k3": 3}, accepts={"k3": [1]}, batch_sizes=SIZES)
    (alike,) = cost_results(cells, facts({"k3": 3}), [], seed=0)["break_even"]
    for by_arm in cells.values():
        by_arm["k3"] = [[worse_beyond(block, prompts=6) for block in start] for start in by_arm["k3"]]
    (mixed,) = cost_results(cells, facts({"k3": 3}), [], seed=0)["break_even"]
    assert common_prompts({key.batch_size: by_arm for key, by_arm in cells.items()}) == {f"p{n}" for n in range(6)}
    assert alike["measured_decode"]["batch_size"] is not None
    assert mixed["measured_decode"]["batch_size"] == pytest.approx(alike["measured_decode"]["batch_size"], rel=0.02)


def worse_beyond(block: CellRecord, *, prompts: int) -> CellRecord:
    """The answers behind the first `prompts` ones took a step for every token, and the steps of the block brought less."""
    requests = [
        each if number < prompts else replace(each, chunk_sizes=[1] * each.n_out)
        for number, each in enumerate(block.requests)
    ]
    before, after = (
        sum(sum(each.chunk_sizes[1:]) for each in some) / sum(len(each.chunk_sizes) - 1 for each in some)
        for some in (block.requests, requests)
    )
    steps = [step._replace(tokens=max(step.running, step.tokens * after / before)) for step in block.steps]
    return replace(block, requests=requests, steps=steps)


def test_luck_with_the_prompts_is_in_the_interval_of_a_break_even() -> None:
    """Equal starts leave no noise of starts: with prompts that accept alike the interval is a point, else it is wide."""
    cells = session(linear_law, lengths={"k3": 3}, accepts={"k3": [1]}, batch_sizes=SIZES)
    low, high = break_even_interval(cells)
    assert low == pytest.approx(high)
    for by_arm in cells.values():
        by_arm["k3"] = [[answered_unevenly(block) for block in start] for start in by_arm["k3"]]
    low, high = break_even_interval(cells)
    assert high > 1.2 * low


def break_even_interval(cells: Cells) -> list[float]:
    (row,) = cost_results(cells, facts({"k3": 3}), [], seed=0)["break_even"]
    return row["measured_decode"]["interval"]


def answered_unevenly(block: CellRecord) -> CellRecord:
    """The same steps; every second answer took 3 tokens from each of its own, the others 2."""
    chunks = [1, *[3] * 13, 1], [1, *[2] * 20]
    requests = [replace(each, chunk_sizes=chunks[number % 2]) for number, each in enumerate(block.requests)]
    return replace(block, requests=requests)


def test_values_of_the_preprint() -> None:
    """The fitted H100 constants of arXiv 2601.11580's simulator, GSM8K marginals, k = 3.

    The mean context is the one free number; 177 tokens give all four of the published check's figures.
    """
    step, draft, token, context = 5.886e-3 + 1.207e-3, 2.135e-3, 2.101e-5, 177 * 3.926e-8
    tau = 1 + sum((0.673, 0.440, 0.281))

    def speedup(size: int) -> float:
        shared = step + context * size
        return tau * (shared + token * size) / (shared + draft + 4 * token * size)

    assert [round(speedup(size), 2) for size in (1, 64, 128)] == [1.83, 1.41, 1.22]
    found = linear_break_even(step=step, draft=draft, token=token, sequence=context, draft_length=3, tau=tau)
    assert round(found) == 322
    assert speedup(322) == pytest.approx(1, abs=1e-3)


@given(
    step=st.floats(1e-3, 0.1),
    draft=st.floats(0, 0.05),
    token=st.floats(1e-6, 1e-2),
    sequence=st.floats(0, 1e-2),
    length=st.integers(1, 8),
    share=st.floats(0, 1),
)
def test_the_closed_form_is_where_the_speedup_is_one(
    step: float, draft: float, token: float, sequence: float, length: int, share: float
) -> None:
    tau = 1 + share * length
    size = linear_break_even(step=step, draft=draft, token=token, sequence=sequence, draft_length=length, tau=tau)

    def speedup(size: float) -> float:
        return tau * (step + (token + sequence) * size) / (step + draft + (token * (length + 1) + sequence) * size)

    if size == NEVER:
        assert speedup(1e-6) <= 1 + 1e-6
    elif size == ALWAYS:
        assert speedup(1e9) >= 1 - 1e-6
    else:
        assert speedup(size) == pytest.approx(1, rel=1e-6)
