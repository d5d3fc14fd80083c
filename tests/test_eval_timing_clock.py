"""The clock of a step's parts, against a made-up time that the test controls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.timing import clock as clock_module
from eyas.eval.timing.clock import StepClock, StepFacts

FACTS = StepFacts(running=2, scheduled=8, drafted=6, decode=True)


class Hand:
    """A time that passes only when told to, and that serves as stamps too."""

    name = "by hand"

    def __init__(self) -> None:
        self.time = 0.0
        self.settled = False

    def now(self) -> float:
        return self.time

    def settle(self) -> None:
        self.settled = True

    def seconds(self, begin: float, end: float) -> float:
        assert self.settled, "stamps are read only after the device has settled"
        return end - begin

    def perf_counter(self) -> float:
        return self.time


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(clock_module, "time", hand)
    return hand


def run(clock: StepClock, hand: Hand, calls: list[Any]) -> None:
    """Spend a tree of calls: a number is time, a pair (part, calls) a nested call."""
    for call in calls:
        if isinstance(call, tuple):
            clock.enter(call[0])
            run(clock, hand, call[1])
            clock.leave()
        else:
            hand.time += call


def one_step(clock: StepClock, hand: Hand, calls: list[Any], *, facts: StepFacts | None = FACTS) -> None:
    clock.begin_step()
    if facts is not None:
        clock.note(facts)
    run(clock, hand, calls)
    clock.end_step()


def test_nested_calls_are_counted_once_in_the_innermost_part(hand: Hand) -> None:
    clock = StepClock(hand, order=(True,))
    one_step(clock, hand, [1, ("runner", [2, ("verify", [16]), 4, ("sample", [32, ("verify", [64])]), 8]), 128])
    report = clock.report()
    assert report["clock"] == "by hand"
    assert report["calls"] == {"runner": 1, "verify": 2, "sample": 1}
    (row,) = report["steps"]
    assert row["parts"] == {"runner": 14, "verify": 80, "sample": 32}
    assert row["rest"] == 129
    assert row["seconds"] == 255
    assert {name: row[name] for name in FACTS._fields} == FACTS._asdict()
    assert clock.report()["steps"] == [], "a report takes its steps along"


def test_inside_the_drafter_everything_is_drafting(hand: Hand) -> None:
    clock = StepClock(hand, order=(True,))
    one_step(clock, hand, [("draft", [1, ("verify", [2, ("sample", [4])]), 8]), ("verify", [16])])
    (row,) = clock.report()["steps"]
    assert row["parts"] == {"draft": 15, "verify": 16}


def test_calls_outside_a_step_and_steps_without_work_are_left_out(hand: Hand) -> None:
    clock = StepClock(hand, order=(True,))
    run(clock, hand, [("verify", [5, ("sample", [1])])])
    one_step(clock, hand, [3], facts=None)
    one_step(clock, hand, [("verify", [2])])
    report = clock.report()
    assert [row["seconds"] for row in report["steps"]] == [2]
    assert report["calls"] == {"verify": 1}


def test_a_step_that_fails_leaves_the_clock_usable(hand: Hand) -> None:
    clock = StepClock(hand, order=(True,))
    clock.begin_step()
    clock.note(FACTS)
    clock.enter("verify")
    clock.leave()
    clock.end_step()
    one_step(clock, hand, [("verify", [2])])
    assert len(clock.report()["steps"]) == 2


def test_only_every_other_step_is_timed(hand: Hand) -> None:
    clock = StepClock(hand)
    for seconds in range(1, 9):
        one_step(clock, hand, [("verify", [seconds])])
    report = clock.report()
    assert [(row["index"], row["seconds"]) for row in report["steps"]] == [(1, 2), (2, 3), (5, 6), (6, 7)]
    assert report["step_calls"] == 8
    assert report["calls"] == {"verify": 4}
    one_step(clock, hand, [])
    one_step(clock, hand, [("verify", [1])])
    assert [row["index"] for row in clock.report()["steps"]] == [1], "a report starts the order anew"


def test_what_timing_a_call_costs(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand, "now", lambda: setattr(hand, "time", hand.time + 0.5) or hand.time)
    assert clock_module.call_cost(hand) == 1, "two stamps of half a second"


trees = st.recursive(
    st.integers(0, 100),
    lambda inner: st.tuples(st.sampled_from(["verify", "sample", "runner", "draft"]), st.lists(inner, max_size=4)),
    max_leaves=20,
)


@given(st.lists(trees, max_size=8))
def test_parts_and_rest_add_up_to_the_step(calls: list[Any]) -> None:
    hand = Hand()
    before, clock_module.time = clock_module.time, hand  # hypothesis runs many examples in one call of a fixture
    try:
        clock = StepClock(hand, order=(True,))
        one_step(clock, hand, calls)
        (row,) = clock.report()["steps"]
    finally:
        clock_module.time = before
    assert sum(row["parts"].values()) + row["rest"] == row["seconds"] == hand.time
    assert all(seconds >= 0 for seconds in row["parts"].values())
