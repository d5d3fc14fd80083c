"""The chi-square distribution and Pearson's tests, with numpy and math only.

A test says which differences it could have found: `detectable_tv` gives the total-variation distance at which it
rejects with probability `POWER`, whatever shape the difference has. The argument is Cauchy and Schwarz's: cells
whose probabilities differ by d_i under weights w_i have (sum |d_i|)^2 <= sum d_i^2 / w_i, and the right side times a
number of samples is the non-centrality of the statistic (Cohen 1988, Statistical Power Analysis, ch. 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_EXPECTED = 5.0
"""Cells expected to hold fewer samples are pooled: below it the statistic is not chi-square distributed (Cochran 1954)."""

POWER = 0.8
TINY = 1e-300
EPSILON = 1e-15
MAX_TERMS = 100_000


@dataclass(frozen=True)
class ChiSquare:
    """A statistic with its degrees of freedom and p-value. With 0 degrees of freedom nothing was testable and p is 1."""

    statistic: float
    degrees: int
    p_value: float


def survival(statistic: float, degrees: float) -> float:
    """P(chi-square with `degrees` > `statistic`): the regularised upper incomplete gamma function Q(degrees/2, x/2).

    Series for small x, continued fraction (Lentz) for large x: Press et al., Numerical Recipes, section 6.2.
    """
    if degrees <= 0 or statistic <= 0:
        return 1.0
    if math.isinf(statistic):
        return 0.0
    shape, x = degrees / 2, statistic / 2
    log_scale = shape * math.log(x) - x - math.lgamma(shape)
    if x < shape + 1:
        return max(0.0, 1.0 - math.exp(log_scale) * _series(shape, x))
    return min(1.0, math.exp(log_scale) * _fraction(shape, x))


def _series(shape: float, x: float) -> float:
    term = total = 1.0 / shape
    for step in range(1, MAX_TERMS):
        term *= x / (shape + step)
        total += term
        if term < total * EPSILON:
            break
    return total


def _fraction(shape: float, x: float) -> float:
    b = x + 1 - shape
    c = 1 / TINY
    d = 1 / b
    result = d
    for step in range(1, MAX_TERMS):
        a = -step * (step - shape)
        b += 2
        d = 1 / _away_from_zero(a * d + b)
        c = _away_from_zero(b + a / c)
        result *= d * c
        if abs(d * c - 1) < EPSILON:
            break
    return result


def _away_from_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def critical_value(level: float, degrees: int) -> float:
    """The statistic that is exceeded with probability `level`."""
    high = max(1.0, float(degrees))
    while survival(high, degrees) > level:
        high *= 2
    return _bisect(lambda x: survival(x, degrees) > level, high)


@lru_cache(maxsize=4096)
def noncentrality(level: float, degrees: int, *, power: float = POWER) -> float:
    """Non-centrality at which a test at `level` rejects with probability `power`."""
    critical = critical_value(level, degrees)
    high = 1.0
    while noncentral_survival(critical, degrees, high) < power:
        high *= 2
    return _bisect(lambda x: noncentral_survival(critical, degrees, x) < power, high)


def _bisect(below: Callable[[float], bool], high: float) -> float:
    low = 0.0
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        if below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def noncentral_survival(statistic: float, degrees: int, centre: float) -> float:
    """P(non-central chi-square > `statistic`): central ones of degrees + 2j, mixed by a Poisson law of mean centre / 2."""
    mean, x = centre / 2, statistic / 2
    if mean == 0 or statistic <= 0:
        return survival(statistic, degrees)
    reach = 12 * math.sqrt(mean) + 30
    first, last = max(0, math.floor(mean - reach)), math.ceil(mean + reach)
    tail, total = survival(statistic, degrees + 2 * first), 0.0
    for j in range(first, last + 1):
        total += math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) * tail
        shape = degrees / 2 + j
        tail += math.exp(shape * math.log(x) - x - math.lgamma(shape + 1))  # Q(a + 1, x) = Q(a, x) + x^a e^-x / a!
    return min(1.0, total)


def detectable_tv(samples: float, degrees: int, *, level: float) -> float | None:
    """Smallest total-variation distance, over the pooled cells, that a test at `level` finds with probability `POWER`.

    Args:
        samples: n of a goodness-of-fit test; n m / (n + m) of a two-sample test.
        degrees: of freedom; None is returned for 0, where nothing can be found.
    """
    if degrees <= 0 or samples <= 0:
        return None
    return min(1.0, 0.5 * math.sqrt(noncentrality(level, degrees) / samples))


def pool_small(expected: Floats, *, minimum: float = MIN_EXPECTED) -> Ints:
    """Group number of every cell [C], so that each group expects at least `minimum` (unless all together do not).

    The smallest cells form one group; when that is still too small, the next larger cells join it.
    """
    order = np.argsort(expected, kind="stable")
    total = np.cumsum(expected[order])
    small = int(np.searchsorted(expected[order], minimum, side="left"))
    if small:
        small = max(small, int(np.searchsorted(total, minimum, side="left")) + 1)
    groups = np.empty(len(expected), dtype=np.int64)
    groups[order[:small]] = 0
    groups[order[small:]] = np.arange(len(expected) - min(small, len(expected))) + (1 if small else 0)
    return groups


def pooled(values: NDArray[np.generic], groups: Ints) -> Floats:
    """Sum of `values` [..., C] in each group [..., G]."""
    count = int(groups.max()) + 1
    sums = np.zeros((*values.shape[:-1], count))
    for group in range(count):
        sums[..., group] = values[..., groups == group].sum(axis=-1)
    return sums


def goodness_of_fit(counts: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """Pearson's test of counts [C] against exact probabilities [C]. A sample in an impossible cell gives p = 0."""
    observed, exact = np.asarray(counts, dtype=float), np.asarray(probabilities, dtype=float)
    assert observed.shape == exact.shape
    assert abs(exact.sum() - 1) < 1e-9, f"probabilities sum to {exact.sum()}"
    if observed[exact <= 0].sum() > 0:
        return ChiSquare(math.inf, int((exact > 0).sum()), 0.0)
    possible = exact > 0
    expected = exact[possible] * observed.sum()
    groups = pool_small(expected)
    expected, observed = pooled(expected, groups), pooled(observed[possible], groups)
    degrees = len(expected) - 1
    if degrees == 0 or not observed.sum():
        return ChiSquare(0.0, 0, 1.0)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ChiSquare(statistic, degrees, survival(statistic, degrees))


def total_variation(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Distance of the empirical distribution from the exact one. Without `noise_floor` beside it the number says nothing."""
    observed = np.asarray(counts, dtype=float)
    return float(0.5 * np.abs(observed / observed.sum() - np.asarray(probabilities)).sum())


def noise_floor(probabilities: Sequence[float], samples: int) -> float:
    """Expected `total_variation` of `samples` draws from the exact distribution itself.

    Each share is about normal, and E|N(0, s)| = s sqrt(2 / pi).
    """
    exact = np.asarray(probabilities, dtype=float)
    return float(0.5 * np.sqrt(2 * exact * (1 - exact) / (math.pi * samples)).sum())
