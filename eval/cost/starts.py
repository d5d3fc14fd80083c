"""A quantity measured in several starts of several arms at several batch sizes, and its resampling over starts.

The start of a process is a random effect of its own, and a large one on a CPU. It is shared by all cells of that start, so
whole starts are resampled, never single cells. An arm has few starts (three by default), too few to show their spread; how
a process happens to start has nothing to do with the arm, so the deviations of all arms' starts are pooled, each
widened by sqrt(n / (n - 1)) for the mean that was taken out of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eyas.eval.records import Blocks

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StartValues:
    """Logarithms of a positive quantity: arm -> [starts, batch sizes], NaN where a start has no value."""

    batch_sizes: tuple[int, ...]
    logs: dict[str, Floats]

    def means(self) -> dict[str, Floats]:
        """Geometric mean over the starts of each arm, [batch sizes]; NaN where no start has a value."""
        return {arm: np.exp(_mean(logs)) for arm, logs in self.logs.items()}

    def at(self, chosen: Sequence[int]) -> StartValues:
        """The same at some of the batch sizes."""
        columns = [self.batch_sizes.index(size) for size in chosen]
        return StartValues(tuple(chosen), {arm: logs[:, columns] for arm, logs in self.logs.items()})

    def draws(self, count: int, *, seed: int) -> dict[str, Floats] | None:
        """Resampled means, arm -> [count, batch sizes]; None when no arm has two starts to show their spread."""
        pool = self._deviations()
        if pool is None:
            return None
        generator = np.random.default_rng(seed)
        drawn = {}
        for arm, logs in self.logs.items():
            chosen = generator.integers(len(pool), size=(count, len(logs)))
            drawn[arm] = np.exp(_mean(logs) + pool[chosen].mean(axis=1))
        return drawn

    def spread(self) -> float | None:
        """Standard deviation of a start's log value, pooled over arms and batch sizes; None when nothing shows it."""
        pool = self._deviations()
        return None if pool is None else float(np.sqrt(np.mean(pool**2)))

    def _deviations(self) -> Floats | None:
        """Deviations of starts from their arm's mean, [starts of all arms with two or more, batch sizes]."""
        rows = []
        for logs in self.logs.values():
            if len(logs) > 1:
                counts = np.maximum(np.sum(~np.isnan(logs), axis=0), 1)
                widened = (logs - _mean(logs)) * np.sqrt(counts / np.maximum(counts - 1, 1))
                rows.append(np.nan_to_num(widened))
        return np.concatenate(rows) if rows else None


def _mean(logs: Floats) -> Floats:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no value is NaN, as documented
        return np.nanmean(logs, axis=0)


def start_values(
    by_size: Mapping[int, Mapping[str, Sequence[Blocks]]],
    *,
    arms: Sequence[str],
    value: Callable[[Blocks], float | None],
) -> StartValues:
    """`value` of every start of every arm at every batch size. An arm's n-th start is the same process at all of them.

    A start that lacks a cell (its process died there) would shift the later ones of that cell, so an arm counts with as
    many starts as its fullest cell has and the cell's missing ones are NaN at the end: the mean is right, and only
    which deviations belong to one process is approximate.
    """
    logs = {}
    for arm in arms:
        starts = max((len(cells.get(arm, ())) for cells in by_size.values()), default=0)
        if not starts:
            continue
        table = np.full((starts, len(by_size)), np.nan)
        for column, cells in enumerate(by_size.values()):
            for row, blocks in enumerate(cells.get(arm, ())):
                found = value(blocks)
                if found is not None and found > 0:
                    table[row, column] = np.log(found)
        logs[arm] = table
    return StartValues(tuple(by_size), logs)


def percentile_interval(values: Floats, *, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval; infinities are values like any other."""
    ordered = np.sort(values)
    tail = (1 - level) / 2
    low, high = (round(share * (len(ordered) - 1)) for share in (tail, 1 - tail))
    return float(ordered[low]), float(ordered[high])
