"""The first round of a session with a time budget: how long a start takes, and so how many there will be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eyas.eval.budget import FirstRound, decide_starts, plan_words, rest_words
from eyas.eval.grid import (
    finished_rounds,
    most_starts_per_arm,
    plan_turns,
    require_both_sides,
    require_numbers,
    run_turns,
)
from eyas.eval.records import StartRecord, read_starts
from eyas.eval.sessions import Session
from eyas.eval.settings import Checks, Repeats


def settle_starts(
    session: Session, *, repeats: Repeats, schedule: bool, checks: Checks, say: Callable[[str], None]
) -> dict[str, Any]:
    """How many starts there will be, told to the user; with a budget the first round runs for it."""
    most_arms = len(session.arms) + schedule  # in its own phase, beside AR and any of the others
    require_numbers(most_arms, protocol=repeats.protocol, starts_per_arm=repeats.starts_per_arm)
    plan = decide_starts(
        session.directory,
        repeats=repeats,
        arms=len(session.arms) + (repeats.protocol == "side-by-side"),
        most=most_starts_per_arm(most_arms, protocol=repeats.protocol),
        first_round=lambda: run_first_round(session),
    )
    say(plan_words(plan))
    rest = rest_words(plan, heads=len(session.heads), arms=len(session.arms), schedule=schedule, checks=checks)
    if rest is not None:
        say(rest)
    return plan


def run_first_round(session: Session) -> FirstRound:
    """The grid's first round. Starts of further rounds, from an earlier call, stay: how many will be wanted is not known yet."""
    turns = plan_turns(session.arms, protocol=session.plan.protocol, starts_per_arm=1)
    run_turns(session.starts, plan=session.plan, turns=turns, launcher=session.launcher)
    require_both_sides(session.starts)
    seconds = seconds_of_turns(read_starts(session.starts))
    if not seconds:
        raise ValueError(
            f"no start of the first round finished, so nothing says how many fit into score.budget_minutes; see the logs in "
            f"{session.starts}"
        )
    rounds = finished_rounds(session.starts, plan=session.plan, arms=session.arms)
    return FirstRound(sum(seconds) / len(seconds), rounds)


def seconds_of_turns(starts: Sequence[StartRecord]) -> list[float]:
    """Seconds of every start that finished, and of every pair: its first engine waits while the second one loads."""
    turns: dict[int, list[float]] = {}
    for start in starts:
        if "seconds" in start.description:
            key = start.start if start.beside is None else -1 - start.round
            turns.setdefault(key, []).append(start.description["seconds"])
    return [max(seconds) for seconds in turns.values()]
