"""Intervals for a ratio of two arms: a hierarchical bootstrap over process starts and prompts, honest with three starts.

The start of a process is a random effect (memory placement, threads): on two cores it alone made one of four
AR-against-AR pairs look "10 % faster". A draw therefore resamples

1. starts, each arm's on its own (pairs of starts where two engines ran side by side). A start brings its blocks along:
   its mean holds their noise already, and drawing them once more inside it would count that twice;
2. prompts, jointly in every start and block of both arms, because all answer the same prompts and the difference
   between prompts is no noise of the ratio. Weights are exponential (Rubin's Bayesian bootstrap), so that no draw is
   left without prompts. The noise of single answers lies in starts and in prompts and is subtracted once (two-way
   clustering, Cameron, Gelbach and Miller 2011).

Percentiles of draws over three starts are far too narrow: three values show too little spread (by sqrt(2/3)), and show
it too uncertainly. So starts are drawn from residuals of *all* arms of the cell, inflated to an unbiased variance, and
the interval is Student's t with the degrees of freedom that those residuals and the prompts give (Satterthwaite). The
one assumption, that starts of all arms scatter alike, and what happens where they do not, is measured in
`eyas.eval.simulation`; docs/evaluation.md has the table of coverage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eyas.eval.distributions import student_quantile, student_tail
from eyas.eval.records import AR, Blocks, CellKey, Cells
from eyas.eval.samples import Floats, Metric, Sample, take_sample

DRAWS = 2000
LEVEL = 0.95

Partners = Mapping[str, Sequence[tuple[int, int]]]
"""Side by side: arm -> its pairs of starts, as (index among the AR starts, index among its own)."""


@dataclass(frozen=True)
class RatioInterval:
    """A ratio, its interval at `LEVEL`, and the two-sided p-value of a ratio of 1 (below 1 - LEVEL when 1 is outside).

    `standard_error` is of the log ratio. `indicative`: no arm of the cell has two starts, or the cell has one prompt, so
    that nothing shows how they scatter; the interval is too narrow and no verdict may rest on it.
    """

    ratio: float
    low: float
    high: float
    p_value: float
    standard_error: float
    degrees_of_freedom: float
    indicative: bool = False


@dataclass(frozen=True)
class Pool:
    """How starts of one cell scatter about the mean of their arm, on the log scale.

    `values` are residuals of all arms, scaled so that their mean square is the unbiased pooled variance.
    """

    values: Floats
    degrees: int

    @property
    def sd(self) -> float:
        return math.sqrt(float(np.mean(self.values**2))) if self.degrees else 0.0


@dataclass(frozen=True)
class StartResiduals:
    """The pool of every cell. Cells are not pooled: noise depends on the batch size, and a start touches them all."""

    by_cell: dict[CellKey, Pool]


class _Part(NamedTuple):
    """A share of the variance of the log ratio.

    `estimate` is what was estimated, with `degrees` of freedom: the share, or more where another part's was taken away.
    """

    variance: float
    degrees: float
    estimate: float


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def bootstrap_ratio(
    baseline: Sequence[Blocks],
    treated: Sequence[Blocks],
    *,
    metric: Metric = "throughput",
    residuals: StartResiduals | None = None,
    paired: bool = False,
    seed: int,
    draws: int = DRAWS,
) -> RatioInterval:
    """`treated` over `baseline`: ratio of geometric means over starts, with its interval.

    Args:
        baseline: blocks of one cell in every start of the baseline arm.
        treated: the same cell, with the same prompts, in every start of the other arm.
        metric: of which the ratio is; above 1 is better for throughput and worse for the latencies.
        residuals: of all arms of the session (`start_residuals`); None pools these two arms only.
        paired: start i of both arms ran at the same time.
        seed: of the resampling.
        draws: number of resamples.
    """
    first, second = take_sample(baseline, metric=metric), take_sample(treated, metric=metric)
    groups = [second.start_means() - first.start_means()] if paired else [first.start_means(), second.start_means()]
    pool = pool_residuals(groups) if residuals is None else residuals.by_cell[baseline[0][0].key]
    return compare(first, second, pool=pool, paired=paired, seed=seed, draws=draws)


def start_residuals(cells: Cells, *, metric: Metric = "throughput", partners: Partners | None = None) -> StartResiduals:
    """The scatter of starts in every cell, pooled over its arms."""
    pools = {}
    for key, arms in cells.items():
        samples = {arm: take_sample(starts, metric=metric) for arm, starts in arms.items()}
        pools[key] = pool_of(samples, partners=partners)
    return StartResiduals(pools)


def pool_of(samples: Mapping[str, Sample], *, partners: Partners | None = None) -> Pool:
    """The pool of one cell from the samples of all its arms."""
    if partners is None:
        return pool_residuals([sample.start_means() for sample in samples.values()])
    pairs = [sides(samples, arm, partners=partners) for arm in partners if arm in samples]
    return pool_residuals([treated.start_means() - baseline.start_means() for baseline, treated in pairs])


def sides(samples: Mapping[str, Sample], arm: str, *, partners: Partners | None) -> tuple[Sample, Sample]:
    """AR and `arm` as they are compared: all starts, or those that ran side by side, in the same order."""
    if partners is None:
        return samples[AR], samples[arm]
    return (
        samples[AR].select([baseline for baseline, _ in partners[arm]]),
        samples[arm].select([treated for _, treated in partners[arm]]),
    )


def compared_arms(samples: Mapping[str, Sample], *, partners: Partners | None) -> list[str]:
    """The arms of a cell that can be compared with AR: all others, side by side those with a pair."""
    return [arm for arm in samples if arm != AR and (partners is None or arm in partners)]


def pool_residuals(groups: Sequence[Floats]) -> Pool:
    """Residuals of the groups about their means; a group of one says nothing about scatter.

    Args:
        groups: per arm, the log values of its starts (or log ratios of its pairs of starts).
    """
    several = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in several)
    if not degrees:
        return Pool(np.zeros(0), 0)
    residuals = np.concatenate([group - group.mean() for group in several])
    return Pool(residuals * math.sqrt(len(residuals) / degrees), degrees)


def compare(
    baseline: Sample, treated: Sample, *, pool: Pool, paired: bool = False, seed: int, draws: int = DRAWS
) -> RatioInterval:
    """`bootstrap_ratio` from arrays."""
    assert baseline.prompts == treated.prompts, "both arms of a cell serve the same prompts"
    assert not paired or baseline.starts == treated.starts, "a pair has a start of each arm"
    generator = np.random.default_rng(seed)
    point = float(treated.start_means().mean() - baseline.start_means().mean())
    if pool.degrees:
        starts = _start_part(baseline.starts, treated.starts, pool, paired=paired, generator=generator, draws=draws)
    else:
        starts = _block_part(baseline, treated)
    prompts = _prompt_part(baseline, treated, paired=paired, generator=generator, draws=draws)
    error = math.sqrt(starts.variance + prompts.variance)
    unknown = not pool.degrees or len(baseline.prompts) < 2
    return _t_interval(point, error, _satterthwaite([starts, prompts]), indicative=unknown)


def moved(interval: RatioInterval, *, log_factor: float) -> RatioInterval:
    """The interval that the same records give when the treated arm's log values all move by `log_factor`."""
    point = math.log(interval.ratio) + log_factor
    return _t_interval(point, interval.standard_error, interval.degrees_of_freedom, indicative=interval.indicative)


def _start_part(
    baseline: int, treated: int, pool: Pool, *, paired: bool, generator: np.random.Generator, draws: int
) -> _Part:
    """Step 1: variance over draws of the mean of resampled starts, treated minus baseline."""
    drawn = generator.choice(pool.values, size=(draws, treated)).mean(axis=1)
    if not paired:
        drawn = drawn - generator.choice(pool.values, size=(draws, baseline)).mean(axis=1)
    variance = float(drawn.var())
    return _Part(variance, pool.degrees, variance)


def _block_part(baseline: Sample, treated: Sample) -> _Part:
    """In place of step 1 where no arm has two starts: variance of the difference that blocks alone explain."""
    squares, degrees, weight = 0.0, 0, 0.0
    for sample in (baseline, treated):
        residuals = sample.log_values() - sample.start_means()[sample.start_of_row]
        squares += float(np.sum(residuals**2))
        degrees += len(residuals) - sample.starts
        weight += float(np.sum(1 / sample.blocks_of_start)) / sample.starts**2
    variance = squares / degrees * weight if degrees else 0.0
    return _Part(variance, max(degrees, 1), variance)


def _prompt_part(
    baseline: Sample, treated: Sample, *, paired: bool, generator: np.random.Generator, draws: int
) -> _Part:
    """Step 2: variance over draws of the prompts' weights, without the noise of single answers that step 1 holds."""
    if len(baseline.prompts) < 2:
        return _Part(0.0, 1, 0.0)
    shares = _shares(baseline, treated)
    weights = generator.standard_exponential((draws, len(shares)))
    drawn = float((treated.weighted(weights) - baseline.weighted(weights)).var())
    # Exponential weights scatter a mean by P / (P + 1) of what multinomial ones do.
    drawn *= 1 + float(np.sum(shares**2))
    if paired:
        answers = _answer_noise(treated.influence() - baseline.influence())
    else:
        answers = _answer_noise(treated.influence()) + _answer_noise(baseline.influence())
    shrunk, degrees = small_sample(shares)
    return _Part(max(drawn - answers, 0.0) / shrunk, degrees, drawn / shrunk)


def _shares(baseline: Sample, treated: Sample) -> Floats:
    """[P] the weight of each prompt in the metric, summing to 1: long answers weigh more than short ones."""
    sums = np.concatenate([baseline.numerator, baseline.denominator, treated.numerator, treated.denominator])
    return (sums / sums.sum(axis=1, keepdims=True)).mean(axis=0)


def small_sample(shares: Floats) -> tuple[float, float]:
    """By how much residuals about a mean with these weights are too small, and their degrees of freedom.

    (P - 1) / P and P - 1 where the weights are equal; fewer degrees where a few long answers carry the mean. Both are
    moments of the quadratic form that estimates the variance (Bell and McCaffrey 2002).
    """
    squares = shares**2
    form = np.diag(squares) - np.outer(squares, shares) - np.outer(shares, squares)
    form += squares.sum() * np.outer(shares, shares)
    trace = float(np.trace(form))
    return trace / float(squares.sum()), trace**2 / float(np.sum(form**2))


def _answer_noise(influence: Floats) -> float:
    """Variance of a mean over starts and prompts that comes from single answers; `influence` is [S, P]."""
    starts = len(influence)
    if starts < 2:
        return 0.0
    residuals = influence - influence.mean(axis=0)
    return float(np.sum(residuals**2)) / (starts * (starts - 1))


def _satterthwaite(parts: Sequence[_Part]) -> float:
    """Degrees of freedom of a variance estimated in parts (Satterthwaite 1946).

    A difference of estimates is as uncertain as what it was taken from. Without that, prompts that by luck scatter no more
    than answers do would pass for known exactly, and far out in the tail, where Holm's correction looks, too much is called.
    """
    spread = sum(part.estimate**2 / part.degrees for part in parts)
    return sum(part.variance for part in parts) ** 2 / spread if spread else parts[0].degrees


def _t_interval(point: float, error: float, degrees: float, *, indicative: bool) -> RatioInterval:
    degrees = max(degrees, 1.0)
    if error:
        half, p_value = student_quantile(1 - LEVEL, degrees) * error, student_tail(point / error, degrees)
    else:
        half, p_value = 0.0, float(point == 0)
    return RatioInterval(
        ratio=math.exp(point),
        low=math.exp(point - half),
        high=math.exp(point + half),
        p_value=p_value,
        standard_error=error,
        degrees_of_freedom=degrees,
        indicative=indicative,
    )
