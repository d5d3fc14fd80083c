"""The batch size up to which speculative decoding pays.

Measured: where the speedup falls through 1, interpolated in log B between two measured batch sizes. Predicted: where the
cost model's speedup does. A crossing that was not reached is said to lie beyond the tested range, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.cost.model import Fit
from eyas.eval.cost.starts import percentile_interval
from eyas.eval.records import AR

NEVER = 0.0
ALWAYS = math.inf
GRID_POINTS = 400
"""Batch sizes, evenly spaced in log B, between which the model's crossing is interpolated."""


def crossing(
    batch_sizes: Sequence[float] | NDArray[np.float64], speedups: Sequence[float] | NDArray[np.float64]
) -> float:
    """Batch size at which the speedup first falls below 1, with log speedup linear in log B between neighbours.

    `NEVER` (0) when it is below 1 at the smallest size already, `ALWAYS` (infinity) when it is not below 1 anywhere.
    """
    logs = np.log(np.asarray(speedups, dtype=float))
    sizes = np.log(np.asarray(batch_sizes, dtype=float))
    below = np.flatnonzero(logs < 0)
    if not below.size:
        return ALWAYS
    index = int(below[0])
    if index == 0:
        return NEVER
    share = logs[index - 1] / (logs[index - 1] - logs[index])
    return float(np.exp(sizes[index - 1] + share * (sizes[index] - sizes[index - 1])))


def linear_break_even(
    *, step: float, draft: float, token: float, sequence: float, draft_length: int, tau: float
) -> float:
    """B* of the linear form in closed form.

    tau (F + c B + s B) = F + d + c (k+1) B + s B at B* = (tau F - F - d) / (c (k+1 - tau) - (tau - 1) s). `NEVER` when the
    numerator is not positive, `ALWAYS` when the denominator is not.
    """
    gain = tau * step - (step + draft)
    loss = token * (draft_length + 1 - tau) - (tau - 1) * sequence
    if gain <= 0:
        return NEVER
    return gain / loss if loss > 0 else ALWAYS


def predicted_crossing(fitted: Fit, *, arm: str, tau: float, smallest: int, largest: int) -> float:
    """The model's crossing within the tested range."""
    grid = np.geomspace(smallest, largest, GRID_POINTS)
    return crossing(grid, tau * fitted.seconds(AR, grid) / fitted.seconds(arm, grid))


def describe(value: float, drawn: NDArray[np.float64] | None, *, smallest: int, largest: int) -> dict[str, Any]:
    """A crossing and its interval as JSON-able values and in words.

    Args:
        value: the crossing.
        drawn: resampled crossings; None when there is no interval.
    """
    low, high = (None, None) if drawn is None else percentile_interval(drawn)
    words = [_words(end, smallest=smallest, largest=largest) for end in (value, low, high)]
    return {
        "batch_size": _finite(value),
        "label": words[0],
        "interval": None if drawn is None else [_finite(low), _finite(high)],
        "interval_label": None if drawn is None else f"{words[1]} to {words[2]}",
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and value != NEVER and math.isfinite(value) else None


def _words(value: float | None, *, smallest: int, largest: int) -> str:
    if value is None:
        return ""
    if value == NEVER:
        return f"< {smallest}"
    return f"> {largest}" if math.isinf(value) else f"{value:.3g}"
