"""Student's t, the beta distribution and an exact interval for a rate, for which numpy has no functions.

All rest on the regularised incomplete beta function by its continued fraction (Press et al., Numerical Recipes, 6.4),
accurate to about 1e-14 here; scipy is not a dependency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

TINY = 1e-300
STEPS = 500
MANY_DEGREES = 1e7
"""From here on Student's t is the normal distribution to more digits than anything here has."""


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), the probability that a beta(a, b) variable lies below `x`; a and b positive."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(x, a, b) / a
    return 1 - math.exp(log_front) * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def student_tail(t: float, degrees: float) -> float:
    """Probability that |T| exceeds |t| for Student's t with `degrees` degrees of freedom (any positive real)."""
    if degrees >= MANY_DEGREES:
        return math.erfc(abs(t) / math.sqrt(2))
    if math.isinf(t):
        return 0.0
    return incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


@lru_cache(maxsize=4096)
def student_quantile(tail: float, degrees: float) -> float:
    """The t that |T| exceeds with probability `tail`: 2.776 for tail 0.05 and 4 degrees of freedom."""
    assert 0 < tail <= 1, f"a tail of {tail} is no probability"
    t = NormalDist().inv_cdf(1 - tail / 2)  # too small, since Student's tails are heavier
    if degrees >= MANY_DEGREES:
        return t
    for _ in range(STEPS):  # the tail is convex, so Newton's method comes from the left and never goes too far
        step = (student_tail(t, degrees) - tail) / (2 * _student_density(t, degrees))
        t += step
        if abs(step) <= 1e-12 * (1 + t):
            break
    return t


def _student_density(t: float, degrees: float) -> float:
    log_front = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    return math.exp(log_front - (degrees + 1) / 2 * math.log1p(t * t / degrees))


def beta_quantile(probability: float, a: float, b: float) -> float:
    return _crossing(lambda x: incomplete_beta(x, a, b) - probability, 0.0, 1.0)


def rate_interval(hits: float, trials: int, *, level: float) -> tuple[float, float]:
    """Clopper and Pearson's exact interval for a rate after `hits` of `trials` (a mean of counts may be no integer)."""
    assert trials > 0, "a rate of nothing"
    tail = (1 - level) / 2
    low = 0.0 if hits <= 0 else beta_quantile(tail, hits, trials - hits + 1)
    high = 1.0 if hits >= trials else beta_quantile(1 - tail, hits + 1, trials - hits)
    return low, high


def _crossing(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function passes zero between `low` and `high`, to the last digits."""
    while high - low > 1e-12 * (1 + high):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
