"""Are two samples of tokens drawn from one distribution? Pearson's test per prompt, with a permutation p-value.

Prompts are strata: statistics and degrees of freedom of the prompts add up, and labels are permuted within a prompt only,
because every prompt has a distribution of its own. Rare tokens of a prompt are pooled by their total count in both
samples, which the labels do not change, so that the permutation p-value is exact whatever was pooled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from eyas.eval.lossless.chi_square import ChiSquare, Floats, Ints, detectable_tv, pool_small, pooled, survival
from eyas.eval.lossless.words import permutations_for

PERMUTATIONS = 4000
"""At most, unless the level asks for smaller p-values than these can give."""

BATCH = 500
ENOUGH = 50
"""Permutations are drawn in batches until this many reach the observed statistic: the p-value is then known to 14 % and
far from any level (Besag and Clifford 1991)."""

CERTAIN = 0.9
"""Share of the samples that one value must have where nothing else is frequent enough for a cell of its own."""

ROUNDING = 1e-9
"""Two statistics of the same counts may differ by rounding; they count as equal."""


@dataclass(frozen=True)
class TwoSample:
    """Outcome of a test.

    Attributes:
        chi_square: statistic over all strata, with its asymptotic p-value.
        permutation_p: share of permutations (the observed one among them) with at least this statistic, to two digits.
        tv: total-variation distance over the pooled cells, mean over strata weighted by their sizes.
        detectable_tv: what the test would have found with probability 0.8, in the strata that could be tested; None when none
            could.
        rare_share: share of the samples in cells that hold several rare values: among those no difference is seen.
        samples: (left, right).
    """

    chi_square: ChiSquare
    permutation_p: float
    tv: float
    detectable_tv: float | None
    rare_share: float
    samples: tuple[int, int]


@dataclass(frozen=True)
class Stratum:
    """Two samples of one prompt.

    Attributes:
        table: counts [2, G]: frequent values one cell each, rare ones together in the first.
        rare: samples in a cell of several values, or beside the certain one.
        certain: there is one cell because one value has all but a few samples, so that another value would have made a
            second cell. Else one cell means that every value was too rare to be compared.
    """

    table: Ints
    rare: int
    certain: bool

    @property
    def degrees(self) -> int:
        """Of a test that could have found a difference; 0 = none could."""
        return max(self.table.shape[1] - 1, int(self.certain))


def stratum(left: Sequence[Hashable], right: Sequence[Hashable]) -> Stratum:
    counts = Counter(left), Counter(right)
    values = sorted({*counts[0], *counts[1]}, key=repr)
    table = np.array([[count[value] for value in values] for count in counts], dtype=np.int64)
    smaller_share = min(len(left), len(right)) / max(1, len(left) + len(right))
    totals = table.sum(axis=0)
    groups = pool_small(totals * smaller_share)
    shared = np.bincount(groups)[groups] > 1
    cells = pooled(table, groups).astype(np.int64)
    certain = bool(cells.shape[1] == 1 and totals.max() >= CERTAIN * totals.sum())
    rare = totals.sum() - totals.max() if certain else totals[shared].sum()
    return Stratum(cells, rare=int(rare), certain=certain)


def two_sample(strata: Sequence[Stratum], *, level: float, seed: int) -> TwoSample:
    """Test whether both rows of every stratum's table come from one distribution.

    Args:
        strata: one per prompt.
        level: at which p-values will be judged (after correction) and the smallest detectable difference is given.
    """
    tables = [each.table for each in strata]
    generator = np.random.default_rng(seed)
    observed = sum(float(_statistic(table[:1], table.sum(axis=0))[0]) for table in tables)
    degrees = sum(table.shape[1] - 1 for table in tables)
    as_large = drawn = 0
    while as_large < ENOUGH and drawn < permutations_for(level, at_least=PERMUTATIONS):
        as_large += int((_permuted(tables, generator) >= observed * (1 - ROUNDING)).sum())
        drawn += BATCH
    sizes = [_harmonic(table) for table in tables]
    tested = [size for size, each in zip(sizes, strata, strict=True) if each.degrees]
    samples = (sum(int(table[0].sum()) for table in tables), sum(int(table[1].sum()) for table in tables))
    return TwoSample(
        ChiSquare(observed, degrees, survival(observed, degrees)),
        (1 + as_large) / (1 + drawn),
        sum(size * _tv(table) for size, table in zip(sizes, tables, strict=True)) / max(sum(sizes), 1e-9),
        detectable_tv(sum(tested), sum(each.degrees for each in strata), level=level),
        sum(each.rare for each in strata) / max(1, sum(samples)),
        samples,
    )


def _permuted(tables: Sequence[Ints], generator: np.random.Generator) -> Floats:
    """The statistic [BATCH] after labels were permuted within each table."""
    total = np.zeros(BATCH)
    for table in tables:
        totals = table.sum(axis=0)
        left = generator.multivariate_hypergeometric(totals, int(table[0].sum()), size=BATCH)
        total += _statistic(left, totals)
    return total


def _statistic(left: Ints, totals: Ints) -> Floats:
    """Pearson's statistic of 2 x G tables given by their left rows [B, G] and their column totals [G]."""
    n, all_samples = left.sum(axis=1, keepdims=True), totals.sum()
    expected = n * totals / all_samples
    other = totals - expected
    squares = (left - expected) ** 2
    return np.where(totals > 0, squares / np.maximum(expected, 1e-12) + squares / np.maximum(other, 1e-12), 0).sum(
        axis=1
    )


def _harmonic(table: Ints) -> float:
    """n m / (n + m): how many samples of a goodness-of-fit test a two-sample test is worth."""
    n, m = int(table[0].sum()), int(table[1].sum())
    return n * m / max(1, n + m)


def _tv(table: Ints) -> float:
    n, m = table.sum(axis=1)
    return float(0.5 * np.abs(table[0] / n - table[1] / m).sum()) if n and m else 0.0
