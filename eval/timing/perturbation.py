"""How much the instruments slow a step down: timed steps against their plain neighbours in the same block.

Steps come in fours: plain, timed, timed, plain. Within a four the machine is in one state and a steady drift cancels, so
the mean log ratio over fours is the slow-down, and its spread over fours tells how well it is known. Beside it stands what
the clock is known to add by itself: its cost per call times the calls of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from eyas.eval.records import StepRecord
from eyas.eval.timing.clock import ORDER
from eyas.eval.timing.steps import pure_decode_steps

LEVEL = 0.95
MIN_FOURS = 5
MAX_PERTURBATION = 0.03
"""Share of a step that the instruments may add, or take away, for its parts to be those of an undisturbed step."""


def perturbation(blocks: Sequence[Mapping[str, Any]], *, running: int, step_seconds: float) -> dict[str, Any]:
    """The slow-down of pure decode steps with `running` requests, as a share of a step.

    Args:
        blocks: raw block records with `steps` and a `timing` that has a report.
        step_seconds: of a typical step, which the clock's own cost is a share of.

    Returns:
        perturbation and its 95 % perturbation_interval, None with fewer than `MIN_FOURS` whole fours; their number,
        perturbation_fours; clock_share, the clock's own cost; undisturbed: True when the whole interval lies within
        `MAX_PERTURBATION` of 0, False when the perturbation exceeds it beyond chance, None when that is not settled.
    """
    ratios = [ratio for block in blocks for ratio in _log_ratios(block["steps"], running=running)]
    reports = [block["timing"]["report"] for block in blocks]
    calls = sum(sum(report["calls"].values()) for report in reports)
    cost = sum(sum(report["calls"].values()) * report["call_cost"] for report in reports)
    timed_steps = sum(len(report["steps"]) for report in reports)
    facts = {"perturbation_fours": len(ratios), "clock_share": cost / timed_steps / step_seconds if calls else 0.0}
    if len(ratios) < MIN_FOURS:
        return facts | {"perturbation": None, "perturbation_interval": None, "undisturbed": None}
    middle = fmean(ratios)
    reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * stdev(ratios) / math.sqrt(len(ratios))
    interval = [math.expm1(middle - reach), math.expm1(middle + reach)]
    share = math.expm1(middle)
    return facts | {
        "perturbation": share,
        "perturbation_interval": interval,
        "undisturbed": _undisturbed(share, low=interval[0], high=interval[1]),
    }


def _undisturbed(share: float, *, low: float, high: float) -> bool | None:
    if max(-low, high) <= MAX_PERTURBATION:
        return True
    beyond_chance = low > 0 or high < 0
    return False if beyond_chance and abs(share) > MAX_PERTURBATION else None


def _log_ratios(steps: Sequence[Sequence[Any]], *, running: int) -> list[float]:
    """Log of timed over plain seconds of each four whose steps all are of the kind that is compared."""
    size = len(ORDER)
    fours = [[StepRecord(*step) for step in steps[begin : begin + size]] for begin in range(0, len(steps), size)]
    return [_log_ratio(four) for four in fours if len(pure_decode_steps(four, running=running)) == size]


def _log_ratio(four: Sequence[StepRecord]) -> float:
    sides: dict[bool, list[float]] = {True: [], False: []}
    for step, timed in zip(four, ORDER, strict=True):
        sides[timed].append(math.log(step.seconds))
    return fmean(sides[True]) - fmean(sides[False])
