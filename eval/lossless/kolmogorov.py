"""The two-sample Kolmogorov-Smirnov test: its statistic, its exact p-value, and permutations within pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from eyas.eval.lossless.chi_square import POWER


def ks_statistic(left: Sequence[float], right: Sequence[float]) -> float:
    """Largest distance between the two empirical distribution functions."""
    a, b = np.sort(np.asarray(left, dtype=float)), np.sort(np.asarray(right, dtype=float))
    points = np.concatenate([a, b])
    shares = (np.searchsorted(sample, points, side="right") / len(sample) for sample in (a, b))
    return float(np.abs(next(shares) - next(shares)).max())


def ks_p_value(statistic: float, n: int, m: int) -> float:
    """Exact P(statistic or more) for samples of n and m without ties; with ties it is an upper bound (conservative).

    Of all orders of n + m values, those whose lattice path stays strictly inside the band (Hodges 1958). Counted as shares, so
    that nothing overflows: the path at (i, j) came from (i - 1, j) with weight i / (i + j).
    """
    bound = statistic - 1e-12
    shares = np.ones(m + 1)
    for j in range(1, m + 1):
        shares[j] = shares[j - 1] if j / m < bound else 0.0
    for i in range(1, n + 1):
        shares[0] = shares[0] if i / n < bound else 0.0
        for j in range(1, m + 1):
            inside = abs(i / n - j / m) < bound
            shares[j] = (shares[j] * i + shares[j - 1] * j) / (i + j) if inside else 0.0
    return float(min(1.0, max(0.0, 1 - shares[m])))


def paired_permutation_p(left: Sequence[float], right: Sequence[float], *, seed: int, permutations: int) -> float:
    """p-value of the statistic when the two values of a pair may be swapped.

    Both samples answer the same prompts, and prompts differ more than answers do, so the plain p-value is too large:
    swapping within a prompt is the null hypothesis itself.
    """
    pairs = np.array([left, right], dtype=float)
    observed = ks_statistic(pairs[0], pairs[1])
    generator = np.random.default_rng(seed)
    swaps = generator.random((permutations, pairs.shape[1])) < 0.5
    as_large = 0
    for swap in swaps:
        one, other = np.where(swap, pairs[::-1], pairs)
        as_large += ks_statistic(one, other) >= observed - 1e-12
    return (1 + as_large) / (1 + permutations)


def paired_shift_p(left: Sequence[float], right: Sequence[float], *, seed: int, permutations: int) -> float:
    """Two-sided p-value of "the right is longer or shorter", by the mean difference of pairs whose signs may be flipped.

    It sees a small shift that is common to all prompts, which the distance of distribution functions does not.
    """
    differences = np.asarray(right, dtype=float) - np.asarray(left, dtype=float)
    observed = abs(differences.sum())
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(permutations, len(differences)))
    as_large = int((np.abs(signs @ differences) >= observed - 1e-9).sum())
    return (1 + as_large) / (1 + permutations)


def detectable_distance(n: int, m: int, *, level: float) -> float:
    """Distance of two distribution functions that the test at `level` finds with probability `POWER` or more.

    The critical value is sqrt(-ln(level / 2) (1/n + 1/m) / 2); where the distributions are farthest apart, the
    difference of shares is normal with a variance of at most (1/n + 1/m) / 4, and the statistic is no smaller there.
    """
    scale = math.sqrt((n + m) / (n * m))
    critical = scale * math.sqrt(-math.log(level / 2) / 2)
    return min(1.0, critical + NormalDist().inv_cdf(POWER) * scale / 2)
