"""How many starts a session makes: as many as the recipe says, or as many as fit into a time budget.

A first round, one start of every arm, tells how long a start takes. What the starts of one arm scatter by is not known
before some have run, so a usual scatter is assumed here; the report prints what the measured one resolves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.eval.power import TYPICAL_NOISE, plan_starts, resolved_ratio
from eyas.eval.settings import Repeats
from eyas.heads.files import read_json, write_json

FILE = "starts_plan.json"


def decide_starts(
    score_dir: Path, *, repeats: Repeats, arms: int, turns: int, first_round: Callable[[], float]
) -> dict[str, Any]:
    """How many starts each arm gets, and what they resolve. Kept in starts_plan.json, so that a resumed session agrees.

    Args:
        score_dir: of the session.
        repeats: what the recipe says.
        arms: AR among them.
        turns: of a round, one after the other: as many as arms, or side by side as pairs.
        first_round: runs one round and returns the mean seconds of a turn; called only with a budget.
    """
    wanted = {
        "budget_minutes": repeats.budget_minutes,
        "at_least": repeats.starts_per_arm,
        "arms": arms,
        "turns": turns,
    }
    path = score_dir / FILE
    if path.is_file():
        plan = read_json(path)
        if {name: plan.get(name) for name in wanted} == wanted:
            return plan
    found = {"starts_per_arm": repeats.starts_per_arm}
    if repeats.budget_minutes is not None:
        found = _fill_budget(repeats, minutes=repeats.budget_minutes, turns=turns, seconds=first_round())
    resolved = _detectable(found["starts_per_arm"], arms=arms, blocks=repeats.blocks)
    write_json(path, wanted | found | {"assumed_noise": vars(TYPICAL_NOISE), "detectable_ratio": resolved})
    return read_json(path)


def _fill_budget(repeats: Repeats, *, minutes: float, turns: int, seconds: float) -> dict[str, Any]:
    fit = plan_starts(
        seconds_per_start=seconds,
        budget_seconds=60 * minutes,
        arms=turns,
        blocks=repeats.blocks,
    ).starts
    starts = max(fit, repeats.starts_per_arm)
    return {"starts_per_arm": starts, "fit": fit, "seconds_per_start": seconds, "seconds": starts * turns * seconds}


def _detectable(starts: int, *, arms: int, blocks: int) -> float | None:
    return None if starts < 2 else resolved_ratio(TYPICAL_NOISE, starts=starts, blocks=blocks, arms=arms)


def plan_words(plan: dict[str, Any]) -> str:
    """What the plan means, in a line."""
    words = f"{plan['starts_per_arm']} starts of each of {plan['arms']} arms"
    if plan["budget_minutes"] is not None:
        words += (
            f" ({plan['fit']} fit into {plan['budget_minutes']:g} minutes at {plan['seconds_per_start']:.0f} s a start; "
            f"they take {plan['seconds'] / 60:.0f})"
        )
    if plan["detectable_ratio"] is None:
        return f"{words}: one start shows no scatter, so no difference can be told from chance"
    return (
        f"{words}: with the noise usual on a small machine they resolve differences of about "
        f"{100 * (plan['detectable_ratio'] - 1):.0f} % in one cell; the report says what they did resolve"
    )
