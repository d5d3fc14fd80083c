"""How small a difference a session can resolve, and how many starts fit into a time budget.

The variance of a log ratio of two arms with n starts of b blocks each over P prompts is

    2 / n * (start_sd^2 + block_sd^2 / b) + prompt_sd^2 / P

and a difference is called when the ratio passes both the interval and the AR-against-AR null band. The smallest
difference that is called with probability `power` is the quantile of (what must be passed, minus the luck of the ratio)
over the ways in which the scatter of starts is estimated, AR's own and that of all arms. All sd are of logs: 0.05 is 5 %.

Where two engines ran side by side a pair of starts is one draw of the ratio, so the 2 becomes a 1, start_sd is that of a
pair (what its blocks add is in it), and the scatter of AR about itself is that of its pairs with its twin.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.eval.distributions import student_quantile
from eyas.eval.records import AR, AR_TWIN, CellKey, Cells
from eyas.eval.samples import Floats, Sample, take_sample
from eyas.eval.stats import LEVEL, Partners, Pool, compare, compared_arms, pool_of, pool_residuals, sides

POWER = 0.8
MOST_STARTS = 50
LUCKS = 2000
TARGET_RATIOS = (1.03, 1.05, 1.1, 1.2)
"""Differences for which the needed starts are printed."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of logs in one cell.

    Attributes:
        start_sd: between starts, beyond what their blocks explain; side by side between pairs, blocks included.
        block_sd: between blocks of a start; 0 where starts have one block or run side by side: it is in `start_sd` then.
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


def resolved_ratio(
    noise: Noise,
    *,
    starts: int,
    blocks: int,
    arms: int,
    tests: int = 1,
    power: float = POWER,
    paired: bool = False,
) -> float:
    """`smallest_detectable_ratio` of a noise that was measured; `paired`: of pairs, AR's twin among the arms."""
    if starts < 2:
        raise ValueError(
            f"{starts} start per arm shows no scatter, so no difference can be told from chance; plan 2 or more"
        )
    groups = arms - 1 if paired else arms
    assert groups > 1, "AR and something else, side by side its twin as well"
    generator, degrees = np.random.default_rng(0), groups * (starts - 1)
    pooled, widest = _estimates(starts, groups=groups, paired=paired, generator=generator)
    of_starts = (1 if paired else 2) / starts * (noise.start_sd**2 + noise.block_sd**2 / blocks)
    of_prompts = noise.prompt_sd**2 / noise.prompts
    t = student_quantile((1 - LEVEL) / tests, _degrees(of_starts, of_prompts, degrees=degrees, prompts=noise.prompts))
    interval = t * np.sqrt(of_starts * pooled + of_prompts)
    band = student_quantile(1 - LEVEL, degrees) * np.sqrt(of_starts * widest)
    luck = math.sqrt(of_starts + of_prompts) * generator.standard_normal(LUCKS)
    return math.exp(float(np.quantile(np.maximum(interval, band) - luck, power)))


def _estimates(starts: int, *, groups: int, paired: bool, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """[LUCKS] estimates of a variance of 1: pooled over all groups, and the larger of that and the first group's own.

    Side by side the first group is the twin's, which scatters about its known mean.
    """
    own = starts - 1
    first, others = generator.chisquare(own, LUCKS), generator.chisquare((groups - 1) * own, LUCKS)
    pooled = (first + others) / (groups * own)
    alone = (first + generator.chisquare(1, LUCKS)) / starts if paired else first / own
    return pooled, np.maximum(alone, pooled)


def _degrees(of_starts: float, of_prompts: float, *, degrees: int, prompts: int) -> float:
    """Satterthwaite's degrees of freedom of the two parts."""
    spread = of_starts**2 / degrees + of_prompts**2 / max(prompts - 1, 1)
    return (of_starts + of_prompts) ** 2 / spread if spread else degrees


def starts_needed(
    ratio: float, *, noise: Noise, blocks: int, arms: int, tests: int, paired: bool = False
) -> int | None:
    """Fewest starts per arm (or pairs) that resolve `ratio` (above 1) among `tests`; None when `MOST_STARTS` do not."""

    def resolves(starts: int) -> bool:
        resolved = resolved_ratio(noise, starts=starts, blocks=blocks, arms=arms, tests=tests, paired=paired)
        return resolved <= ratio

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
    paired: bool = False,
) -> StartsPlan:
    """As many starts of every arm as the time allows, and what they resolve.

    Args:
        seconds_per_start: of one process with all its cells, loading included, mean over arms.
        budget_seconds: for the whole session.
        arms: AR among them, side by side its twin as well.
        noise: measured by an earlier session on this machine, or the typical one.
        blocks, tests, power: as in `smallest_detectable_ratio`.
        paired: every other arm runs beside an AR of its own, and `seconds_per_start` is of such a pair.
    """
    turns = arms - 1 if paired else arms
    assert seconds_per_start > 0 and turns > 0, "a start takes time"
    starts = max(int(budget_seconds // (seconds_per_start * turns)), 0)
    resolved = None
    if starts >= 2:
        resolved = resolved_ratio(
            noise, starts=starts, blocks=blocks, arms=arms, tests=tests, power=power, paired=paired
        )
    return StartsPlan(starts, starts * turns * seconds_per_start, resolved)


def measured_noise(samples: Mapping[str, Sample], *, partners: Partners | None = None) -> Noise | None:
    """The noise of one cell from the samples of its arms; None where too little is known.

    That is: no arm with two starts, no AR, one prompt, or side by side no pair of AR and its twin.
    """
    if AR not in samples or len(samples[AR].prompts) < 2:
        return None
    if partners is not None and (AR_TWIN not in partners or AR_TWIN not in samples):
        return None
    pool = pool_of(samples, partners=partners)
    if not pool.degrees:
        return None
    start_sd, block_sd = pool.sd, 0.0
    if partners is None:
        blocks = float(np.mean(np.concatenate([sample.blocks_of_start for sample in samples.values()])))
        block_sd = _block_pool(samples).sd
        start_sd = math.sqrt(max(pool.sd**2 - block_sd**2 / blocks, 0.0))
    return Noise(start_sd, block_sd, _prompt_sd(samples, partners=partners), len(samples[AR].prompts))


def _block_pool(samples: Mapping[str, Sample]) -> Pool:
    groups = []
    for sample in samples.values():
        values = sample.log_values()
        groups += [values[sample.start_of_row == start] for start in range(sample.starts)]
    return pool_residuals(groups)


def _prompt_sd(samples: Mapping[str, Sample], *, partners: Partners | None) -> float:
    """Root mean square over arms, from the variance that prompts alone bring into the ratio to AR."""
    no_starts = Pool(np.zeros(1), 1)
    errors = []
    for arm in compared_arms(samples, partners=partners):
        baseline, treated = sides(samples, arm, partners=partners)
        paired = partners is not None
        errors.append(compare(baseline, treated, pool=no_starts, paired=paired, seed=0).standard_error)
    prompts = len(samples[AR].prompts)
    return math.sqrt(float(np.mean(np.square(errors))) * prompts) if errors else 0.0


def power_rows(cells: Cells, *, tests: int, partners: Partners | None = None) -> list[dict[str, Any]]:
    """Per cell: measured noise, what this session resolves, and how many starts smaller differences would need.

    Args:
        cells: the records of the grid.
        tests: comparisons that Holm's correction counts, those of the schedule's phase among them.
        partners: which AR start ran beside which start; None where engines ran one at a time.
    """
    rows = []
    for key, group in cells.items():
        samples = {arm: take_sample(starts, metric="throughput") for arm, starts in group.items()}
        noise = measured_noise(samples, partners=partners)
        if noise is not None and len(samples) > (1 if partners is None else 2):
            rows.append(_row(key, samples, noise=noise, tests=max(tests, 1), partners=partners))
    return rows


def _row(
    key: CellKey, samples: Mapping[str, Sample], *, noise: Noise, tests: int, partners: Partners | None
) -> dict[str, Any]:
    paired = partners is not None
    starts = min(sides(samples, arm, partners=partners)[1].starts for arm in compared_arms(samples, partners=partners))
    starts = min(starts, samples[AR].starts)
    blocks, arms = round(float(np.mean(samples[AR].blocks_of_start))), len(samples)
    resolved: list[float | None] = [None, None]
    if starts > 1:
        resolved = [
            resolved_ratio(noise, starts=starts, blocks=blocks, arms=arms, tests=each, paired=paired)
            for each in (1, tests)
        ]
    return {
        "dataset": key.dataset,
        "temperature": key.temperature,
        "batch_size": key.batch_size,
        "starts": starts,
        "blocks": blocks,
        "start_sd": noise.start_sd,
        "block_sd": noise.block_sd if blocks > 1 and not paired else None,
        "prompt_sd": noise.prompt_sd,
        "prompts": noise.prompts,
        "arms": arms,
        "tests": tests,
        "power": POWER,
        "smallest_detectable_ratio": resolved[0],
        "smallest_detectable_ratio_after_holm": resolved[1],
        "starts_needed": {
            f"{ratio:g}": starts_needed(ratio, noise=noise, blocks=blocks, arms=arms, tests=tests, paired=paired)
            for ratio in TARGET_RATIOS
        },
    }
