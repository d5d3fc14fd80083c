"""What a head would have to reach, from starts of plain decoding and of synthetic acceptance: rows from raw records.

The step time of speculative decoding does not depend on how many drafts are accepted; each k is measured at two synthetic
acceptance lengths to show that, and their step times are pooled. Then tau_min(B, k) = T_SD / T_AR is the tau that a head
must exceed, and (k + 1) / tau_min the speedup of one whose every draft is accepted: decoding only, since prompts are
read as fast with a head as without one at best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.eval.cost.starts import StartValues, percentile_interval, start_values
from eyas.eval.cost.steps import BySize, all_blocks, step_seconds, tokens_per_step
from eyas.eval.records import AR, ArmFacts, StartRecord, arms_of, cells_by_arm

LABEL = "synthetic: the head's weights are random and its acceptance is made up; these are costs of steps, no result of any head"
DRAWS = 1000
SAME = 0.05
"""Step times of two acceptance lengths that differ by no more are the same, or by no more than starts do by chance."""
WORTH = 1.05
"""A speedup below this is not worth training for: prompts, tails and noise eat it."""


@dataclass(frozen=True)
class Reference:
    """A published head, for scale: its marginal acceptance by position."""

    name: str
    marginals: tuple[float, ...]

    def tau(self, draft_length: int) -> float:
        """tau at this chain length. Positions beyond the published ones go on at the last conditional rate."""
        rates = list(self.marginals)
        while len(rates) < draft_length:
            rates.append(rates[-1] * rates[-1] / rates[-2])
        return 1 + sum(rates[:draft_length])


MODEST = Reference("EAGLE-3 head of Qwen3-8B", (0.654, 0.399, 0.202))
GOOD = Reference("EAGLE-3 head of Llama-3.1-8B", (0.7296, 0.5208, 0.3545))
REFERENCES = {"modest": MODEST, "good": GOOD}
SOURCE = "vLLM's own test of acceptance lengths (MT-Bench, T = 0, k = 3); longer chains continued at the last conditional rate"


def ceiling_results(starts: Sequence[StartRecord], *, context: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about the ceiling as JSON-able values.

    Args:
        starts: of plain decoding and of synthetic arms, one dataset and temperature.
        context: what was measured, stored as it is.
    """
    arms, cells = arms_of(starts), cells_by_arm(starts)
    by_size = {key.batch_size: cells[key] for key in sorted(cells, key=lambda key: key.batch_size)}
    pairs = _pairs(arms)
    times = start_values(by_size, arms=list(arms), value=step_seconds)
    rows = _rows(by_size, times, arms=arms, pairs=pairs)
    return {
        "synthetic": True,
        "label": LABEL,
        "context": dict(context),
        "starts": {arm: sum(start.arm == arm for start in starts) for arm in arms},
        "start_sd": times.spread(),
        "rows": rows,
        "references": {
            name: {"name": reference.name, "taus": {str(k): reference.tau(k) for k in pairs}, "source": SOURCE}
            for name, reference in REFERENCES.items()
        },
        "reach": {
            "best_case": _reach(rows, "best_case", least=1.0),
            **{name: _reach(rows, name, least=WORTH) for name in REFERENCES},
        },
        "worth": WORTH,
        "validated": _validated(rows),
    }


def _pairs(arms: Mapping[str, ArmFacts]) -> dict[int, list[str]]:
    """Draft length, ascending -> its synthetic arms by rising acceptance length."""
    synthetic = sorted((name for name, facts in arms.items() if facts.synthetic), key=lambda name: _asked(arms[name]))
    pairs: dict[int, list[str]] = {}
    for name in synthetic:
        pairs.setdefault(arms[name].draft_length, []).append(name)
    return dict(sorted(pairs.items()))


def _asked(facts: ArmFacts) -> float:
    assert facts.speculative_config is not None
    return facts.speculative_config["synthetic_acceptance_length"]


def _rows(
    by_size: BySize, times: StartValues, *, arms: Mapping[str, ArmFacts], pairs: Mapping[int, list[str]]
) -> list[dict[str, Any]]:
    means, drawn = times.means(), times.draws(DRAWS, seed=0)
    rows = []
    for (column, size), (length, names) in itertools.product(enumerate(by_size), pairs.items()):
        known = [name for name in names if not math.isnan(means[name][column])]
        plain = float(means[AR][column]) if AR in means else math.nan
        if not known or math.isnan(plain):
            continue
        logs = [math.log(means[name][column]) for name in known]
        seconds = math.exp(sum(logs) / len(logs))
        interval = None
        if drawn is not None:
            pooled = np.mean([np.log(drawn[name][:, column]) for name in known], axis=0)
            interval = list(percentile_interval(np.exp(pooled) / drawn[AR][:, column]))
        rows.append(
            {
                "batch_size": size,
                "draft_length": length,
                "ar_step_seconds": plain,
                "step_seconds": seconds,
                **_needed(seconds / plain, interval=interval, draft_length=length),
                "lengths": [
                    {
                        "acceptance_length": _asked(arms[name]),
                        "measured_tau": tokens_per_step(all_blocks(by_size[size][name])),
                        "step_seconds": float(means[name][column]),
                    }
                    for name in known
                ],
                **_agreement([float(means[name][column]) for name in known], spread=_spread(times, known)),
            }
        )
    return rows


def _needed(tau_min: float, *, interval: list[float] | None, draft_length: int) -> dict[str, Any]:
    """What a head must reach, and what it would earn: in the best case, and as published heads accept."""
    taus = {"best_case": draft_length + 1.0} | {name: each.tau(draft_length) for name, each in REFERENCES.items()}
    return {
        "tau_min": tau_min,
        "tau_min_interval": interval,
        "needed_share": (tau_min - 1) / draft_length,
        **{name: tau / tau_min for name, tau in taus.items()},
        "intervals": {
            name: None if interval is None else [tau / interval[1], tau / interval[0]] for name, tau in taus.items()
        },
    }


def _spread(times: StartValues, arms: Sequence[str]) -> float:
    """Standard deviation of the log ratio of two arms' step times that starts alone explain."""
    spread = times.spread() or 0.0
    return spread * math.sqrt(sum(1 / len(times.logs[arm]) for arm in arms))


def _agreement(seconds: Sequence[float], *, spread: float) -> dict[str, Any]:
    """Did the acceptance lengths give the same step time? None with only one of them."""
    if len(seconds) < 2:
        return {"lengths_differ_by": None, "lengths_may_differ_by": None, "lengths_agree": None}
    apart = seconds[-1] / seconds[0] - 1
    allowed = max(SAME, math.expm1(2 * spread))
    return {"lengths_differ_by": apart, "lengths_may_differ_by": allowed, "lengths_agree": abs(apart) <= allowed}


def _reach(rows: Sequence[Mapping[str, Any]], name: str, *, least: float) -> list[dict[str, Any]]:
    """Per batch size: is there a draft length at which the speedup of `name` is at least `least`?

    "yes" when one has it at the bad end of its interval, "no" when none has it at the good end, "not settled" between.
    Beside it stands the fastest draft length, of those that settle a "yes". Without intervals the values are taken as
    they are; the words say so.
    """
    found = []
    for size, group in itertools.groupby(rows, key=lambda row: row["batch_size"]):
        lengths = list(group)
        sure = [row for row in lengths if _ends(row, name)[0] >= least]
        possible = any(_ends(row, name)[1] >= least for row in lengths)
        shown = max(sure or lengths, key=lambda row: row[name])
        outcome = "yes" if sure else "not settled" if possible else "no"
        place = {"batch_size": size, "outcome": outcome, "draft_length": shown["draft_length"]}
        found.append(place | {"speedup": shown[name], "interval": shown["intervals"][name]})
    return found


def _ends(row: Mapping[str, Any], name: str) -> tuple[float, float]:
    interval = row["intervals"][name]
    return (row[name], row[name]) if interval is None else (interval[0], interval[1])


def _validated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the cells with two acceptance lengths: how many agree, and the largest difference."""
    compared = [row for row in rows if row["lengths_agree"] is not None]
    return {
        "cells": len(compared),
        "agree": sum(row["lengths_agree"] for row in compared),
        "largest_difference": max((abs(row["lengths_differ_by"]) for row in compared), default=None),
    }
