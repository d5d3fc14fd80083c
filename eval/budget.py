"""How many starts a session makes: as many as the recipe says, or as many as fit into a time budget.

A first round, one start of every arm, tells how long a start takes. What the starts of one arm scatter by is not known
before some have run, so a usual scatter is assumed here; the report prints what the measured one resolves.

The budget is of the grid alone. What comes on top of it is named, with its time as far as that can be known.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from eyas.eval.power import TYPICAL_NOISE, plan_starts, resolved_ratio
from eyas.eval.settings import Checks, Repeats
from eyas.heads.files import read_json, write_json

FILE = "starts_plan.json"


class FirstRound(NamedTuple):
    """Mean seconds of a start, which side by side are those of its pair, and the whole rounds that lie there by now."""

    seconds_per_start: float
    rounds: int


def decide_starts(
    score_dir: Path, *, repeats: Repeats, arms: int, most: int, first_round: Callable[[], FirstRound]
) -> dict[str, Any]:
    """How many starts each arm gets, and what they resolve. Kept in starts_plan.json, so that a resumed session agrees.

    Args:
        score_dir: of the session.
        repeats: what the recipe says.
        arms: AR among them, and side by side its twin.
        most: starts that an arm can have.
        first_round: runs one round; called only with a budget.
    """
    wanted = {
        "budget_minutes": repeats.budget_minutes,
        "at_least": repeats.starts_per_arm,
        "arms": arms,
        "protocol": repeats.protocol,
    }
    path = score_dir / FILE
    if path.is_file():
        plan = read_json(path)
        if {name: plan.get(name) for name in wanted} == wanted:
            return plan
    found = {"starts_per_arm": repeats.starts_per_arm}
    if repeats.budget_minutes is not None:
        found = _fill_budget(repeats, minutes=repeats.budget_minutes, arms=arms, most=most, first=first_round())
    resolved = _detectable(found["starts_per_arm"], arms=arms, repeats=repeats)
    write_json(path, wanted | found | {"assumed_noise": vars(TYPICAL_NOISE), "detectable_ratio": resolved})
    return read_json(path)


def _fill_budget(repeats: Repeats, *, minutes: float, arms: int, most: int, first: FirstRound) -> dict[str, Any]:
    """As many starts as fit, and no fewer than are there already: what was measured costs nothing any more."""
    paired = repeats.protocol == "side-by-side"
    fit = plan_starts(
        seconds_per_start=first.seconds_per_start,
        budget_seconds=60 * minutes,
        arms=arms,
        blocks=repeats.blocks,
        paired=paired,
    ).starts
    starts = max(min(fit, most), repeats.starts_per_arm, first.rounds)
    seconds = starts * (arms - 1 if paired else arms) * first.seconds_per_start
    return {"starts_per_arm": starts, "fit": fit, "seconds_per_start": first.seconds_per_start, "seconds": seconds}


def _detectable(starts: int, *, arms: int, repeats: Repeats) -> float | None:
    paired = repeats.protocol == "side-by-side"
    if starts < 2 or arms - paired < 2:
        return None
    return resolved_ratio(TYPICAL_NOISE, starts=starts, blocks=repeats.blocks, arms=arms, paired=paired)


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
        f"{100 * (plan['detectable_ratio'] - 1):.0f} % in one cell, and larger ones only where many cells are judged "
        "together; the report says what they did resolve"
    )


def rest_words(plan: dict[str, Any], *, heads: int, arms: int, schedule: bool, checks: Checks) -> str | None:
    """What comes on top of a budget, which is of the grid alone; None without a budget, or where nothing comes.

    Args:
        plan: from `decide_starts`.
        heads: arms of the head, each of which the schedule's phase may start again.
        arms: of the session, AR among them.
        schedule, checks: what the session measures beside the grid.
    """
    if plan["budget_minutes"] is None:
        return None
    starts, seconds, load = plan["starts_per_arm"], plan["seconds_per_start"], checks.open_loop
    parts = {
        f"the schedule's own starts (up to {_minutes(starts * (heads + 2) * seconds)})": schedule,
        f"{arms} instrumented starts": checks.time_split,
        "the losslessness ladder": checks.lossless.requests > 0,
        f"the open loop ({_minutes(starts * arms * sum(load.requests / rate for rate in load.rates))} of arrivals and the "
        "loading of servers)": bool(load.rates),
    }
    named = [words for words, measured in parts.items() if measured]
    return f"the budget is of the grid; on top of it come {', '.join(named)}" if named else None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes"
