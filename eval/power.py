"""How small a difference a session can resolve, and how many starts fit into a time budget.

The variance of a log ratio of two arms with n starts of b blocks each over P prompts is

    2 / n * (start_sd^2 + block_sd^2 / b) + prompt_sd^2 / P

and a difference is called when the ratio passes both the interval and the AR-against-AR null band. The smallest
difference that is called with probability `power` is the quantile of (what must be passed, minus the luck of the ratio)
over the ways in which the scatter of starts is estimated, AR's own and that of all arms. All sd are of logs: 0.05 is 5 %.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.eval.distributions import student_quantile
from eyas.eval.records import AR, ArmFacts, CellKey, Cells
from eyas.eval.samples import Sample, take_sample
from eyas.eval.stats import LEVEL, Pool, compare, pool_of, pool_residuals

POWER = 0.8
MOST_STARTS = 50
LUCKS = 2000
TARGET_RATIOS = (1.03, 1.05, 1.1, 1.2)
"""Differences for which the needed starts are printed."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of logs in one cell.

    Attributes:
        start_sd: between starts, beyond what their blocks explain.
        block_sd: between blocks of a start; 0 where starts have one block, whose noise is then in `start_sd`.
        prompt_sd: of one prompt's ratio between arms.
        prompts: in the cell.
    """

    start_sd: float
    block_sd: float
    prompt_sd: float
    prompts: int


TYPICAL_NOISE = Noise(start_sd=0.04, block_sd=0.08, prompt_sd=0.1, prompts=16)
"""Of the 2-core CPU machine of the project, for a plan before anything is measured: block sd 7 to 12 %, starts to 10 %."""


@dataclass(frozen=True)
class StartsPlan:
    """What fits into a budget: starts of each arm (0 = not even one), their seconds, and the ratio they resolve.

    `detectable_ratio` is above 1; a slow-down is found from 1 / `detectable_ratio` on. None below two starts.
    """

    starts: int
    seconds: float
    detectable_ratio: float | None


def smallest_detectable_ratio(
    *,
    start_sd: float,
    block_sd: float,
    starts: int,
    blocks: int = 1,
    prompt_sd: float = 0.0,
    prompts: int = 1,
    arms: int = 2,
    tests: int = 1,
    power: float = POWER,
) -> float:
    """The ratio above 1 that a session calls different from 1 with probability `power`.

    Args:
        start_sd, block_sd, prompt_sd, prompts: as in `Noise`.
        starts, blocks: of each arm, and of each start.
        arms: in the cell, AR among them; their starts are pooled.
        tests: cells tested in the session; the first of Holm's steps asks this much of the smallest p-value.
        power: probability of finding it.

    Raises:
        ValueError: fewer than two starts, which show no scatter.
    """
    noise = Noise(start_sd, block_sd, prompt_sd, prompts)
    return resolved_ratio(noise, starts=starts, blocks=blocks, arms=arms, tests=tests, power=power)


def resolved_ratio(noise: Noise, *, starts: int, blocks: int, arms: int, tests: int = 1, power: float = POWER) -> float:
    """`smallest_detectable_ratio` of a noise that was measured."""
    if starts < 2:
        raise ValueError(
            f"{starts} start per arm shows no scatter, so no difference can be told from chance; plan 2 or more"
        )
    assert arms > 1, "AR and something else"
    generator = np.random.default_rng(0)
    own, degrees = starts - 1, arms * (starts - 1)
    ar, others = generator.chisquare(own, LUCKS), generator.chisquare(degrees - own, LUCKS)
    pooled, widest = (ar + others) / degrees, np.maximum(ar / own, (ar + others) / degrees)
    of_starts = 2 / starts * (noise.start_sd**2 + noise.block_sd**2 / blocks)
    of_prompts = noise.prompt_sd**2 / noise.prompts
    t = student_quantile((1 - LEVEL) / tests, _degrees(of_starts, of_prompts, degrees=degrees, prompts=noise.prompts))
    interval = t * np.sqrt(of_starts * pooled + of_prompts)
    band = student_quantile(1 - LEVEL, degrees) * np.sqrt(of_starts * widest)
    luck = math.sqrt(of_starts + of_prompts) * generator.standard_normal(LUCKS)
    return math.exp(float(np.quantile(np.maximum(interval, band) - luck, power)))


def _degrees(of_starts: float, of_prompts: float, *, degrees: int, prompts: int) -> float:
    """Satterthwaite's degrees of freedom of the two parts."""
    spread = of_starts**2 / degrees + of_prompts**2 / max(prompts - 1, 1)
    return (of_starts + of_prompts) ** 2 / spread if spread else degrees


def starts_needed(ratio: float, *, noise: Noise, blocks: int, arms: int) -> int | None:
    """Fewest starts per arm that resolve `ratio` (above 1) in one test; None when `MOST_STARTS` do not."""

    def resolves(starts: int) -> bool:
        return resolved_ratio(noise, starts=starts, blocks=blocks, arms=arms) <= ratio

    plans = range(2, MOST_STARTS + 1)
    first = bisect_left(plans, True, key=resolves)
    return plans[first] if first < len(plans) else None


def plan_starts(
    *,
    seconds_per_start: float,
    budget_seconds: float,
    arms: int,
    noise: Noise = TYPICAL_NOISE,
    blocks: int = 1,
    tests: int = 1,
    power: float = POWER,
) -> StartsPlan:
    """As many starts of every arm as the time allows, and what they resolve.

    Args:
        seconds_per_start: of one process with all its cells, loading included, mean over arms.
        budget_seconds: for the whole session.
        arms: AR among them.
        noise: measured by an earlier session on this machine, or the typical one.
        blocks, tests, power: as in `smallest_detectable_ratio`.
    """
    assert seconds_per_start > 0 and arms > 0, "a start takes time"
    starts = max(int(budget_seconds // (seconds_per_start * arms)), 0)
    resolved = None
    if starts >= 2:
        resolved = resolved_ratio(noise, starts=starts, blocks=blocks, arms=arms, tests=tests, power=power)
    return StartsPlan(starts, starts * arms * seconds_per_start, resolved)


def measured_noise(samples: Mapping[str, Sample]) -> Noise | None:
    """The noise of one cell from the samples of its arms; None where no arm has two starts or AR is missing."""
    pool = pool_of(samples)
    if not pool.degrees or AR not in samples:
        return None
    blocks = float(np.mean(np.concatenate([sample.blocks_of_start for sample in samples.values()])))
    block_sd = _block_pool(samples).sd
    start_sd = math.sqrt(max(pool.sd**2 - block_sd**2 / blocks, 0.0))
    prompts = len(samples[AR].prompts)
    return Noise(start_sd, block_sd, _prompt_sd(samples), prompts)


def _block_pool(samples: Mapping[str, Sample]) -> Pool:
    groups = []
    for sample in samples.values():
        values = sample.log_values()
        groups += [values[sample.start_of_row == start] for start in range(sample.starts)]
    return pool_residuals(groups)


def _prompt_sd(samples: Mapping[str, Sample]) -> float:
    """Root mean square over arms, from the variance that prompts alone bring into the ratio to AR."""
    no_starts = Pool(np.zeros(1), 1)
    errors = [
        compare(samples[AR], sample, pool=no_starts, seed=0).standard_error
        for arm, sample in samples.items()
        if arm != AR
    ]
    prompts = len(samples[AR].prompts)
    return math.sqrt(float(np.mean(np.square(errors))) * prompts) if errors else 0.0


def power_rows(cells: Cells, *, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """Per cell: measured noise, what this session resolves, and how many starts smaller differences would need."""
    tests = sum(arm != AR and arm in group for group in cells.values() if AR in group for arm in arms)
    rows = []
    for key, group in cells.items():
        samples = {arm: take_sample(starts, metric="throughput") for arm, starts in group.items()}
        noise = measured_noise(samples)
        if noise is not None and len(samples) > 1:
            rows.append(_row(key, samples, noise=noise, tests=tests))
    return rows


def _row(key: CellKey, samples: Mapping[str, Sample], *, noise: Noise, tests: int) -> dict[str, Any]:
    starts = min(sample.starts for sample in samples.values())
    blocks, arms = round(float(np.mean(samples[AR].blocks_of_start))), len(samples)
    resolved: list[float | None] = [None, None]
    if starts > 1:
        resolved = [resolved_ratio(noise, starts=starts, blocks=blocks, arms=arms, tests=each) for each in (1, tests)]
    return {
        "dataset": key.dataset,
        "temperature": key.temperature,
        "batch_size": key.batch_size,
        "starts": starts,
        "blocks": blocks,
        "start_sd": noise.start_sd,
        "block_sd": noise.block_sd if blocks > 1 else None,
        "prompt_sd": noise.prompt_sd,
        "prompts": noise.prompts,
        "arms": arms,
        "tests": tests,
        "power": POWER,
        "smallest_detectable_ratio": resolved[0],
        "smallest_detectable_ratio_after_holm": resolved[1],
        "starts_needed": {
            f"{ratio:g}": starts_needed(ratio, noise=noise, blocks=blocks, arms=arms) for ratio in TARGET_RATIOS
        },
    }
