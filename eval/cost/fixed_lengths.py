"""The head's fixed draft lengths as the grid measured them: what a schedule has to be held against."""

from __future__ import annotations

import math
from collections.abc import Mapping

from eyas.eval.records import AR, ArmFacts, CellKey, Cells
from eyas.eval.samples import take_sample
from eyas.eval.stats import Partners, compared_arms, sides

Ratios = dict[CellKey, dict[str, float]]
"""Cell -> arm -> its throughput over that of plain decoding."""


def fixed_ratios(cells: Cells, arms: Mapping[str, ArmFacts], *, partners: Partners | None) -> Ratios:
    """Point estimates of every fixed draft length of a head in every cell. Synthetic acceptance is no head's."""
    ratios: Ratios = {}
    for key, by_arm in cells.items():
        samples = {arm: take_sample(starts, metric="throughput") for arm, starts in by_arm.items()}
        for arm in compared_arms(samples, partners=partners) if AR in samples else ():
            if arms[arm].kind == "head" and not arms[arm].synthetic:
                plain, drafted = (side.start_means().mean() for side in sides(samples, arm, partners=partners))
                ratios.setdefault(key, {})[arm] = math.exp(drafted - plain)
    return ratios


def fastest_arms(ratios: Ratios) -> set[str]:
    """Arms that are the fastest of some cell, and faster there than plain decoding, beyond chance or not."""
    best = [max(by_arm.items(), key=lambda item: item[1]) for by_arm in ratios.values()]
    return {arm for arm, ratio in best if ratio > 1}
