"""Holm's correction: with many cells tested, some look different by chance."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given; those at or below alpha are rejected at family-wise error alpha.

    The i-th smallest of m is multiplied by m - i + 1 and never falls below a smaller one's (Holm 1979). Valid whatever
    the dependence between the tests, and cells of one start do depend on each other.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
