"""The batch sizes at which speculative decoding pays, and the one at which it stops: the break-even.

Measured: where the speedup crosses 1, interpolated in log B between two measured batch sizes. Predicted: where the cost
model's speedup does. A crossing that was not reached is said to lie beyond the tested range, never guessed. A head may cost
at the smallest batch and pay at larger ones (its draft is a fixed cost), or pay twice, so all ranges are kept; the
break-even is the end of the last one.
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

Floats = NDArray[np.float64]
Range = tuple[float, float]
"""Batch sizes between which drafting pays: from `NEVER` (0) where it does at the smallest tested size already, up to
`ALWAYS` (infinity) where it still does at the largest."""


def paying_ranges(batch_sizes: Sequence[float] | Floats, speedups: Sequence[float] | Floats) -> list[Range]:
    """Where the speedup is at least 1, in ascending order, with log speedup linear in log B between neighbours."""
    logs, sizes = np.log(np.asarray(speedups, dtype=float)), np.log(np.asarray(batch_sizes, dtype=float))
    begins = [NEVER] if logs[0] >= 0 else []
    ends = []
    for index in range(1, len(logs)):
        if (logs[index - 1] >= 0) != (logs[index] >= 0):
            share = logs[index - 1] / (logs[index - 1] - logs[index])
            place = float(np.exp(sizes[index - 1] + share * (sizes[index] - sizes[index - 1])))
            (begins if logs[index] >= 0 else ends).append(place)
    return list(zip(begins, [*ends, ALWAYS], strict=False))


def break_even(ranges: Sequence[Range]) -> float:
    """Where drafting stops paying for good; `NEVER` where it pays nowhere."""
    return ranges[-1][1] if ranges else NEVER


def beginning(ranges: Sequence[Range]) -> float:
    """Where drafting begins to pay; `ALWAYS` where it pays nowhere."""
    return ranges[0][0] if ranges else ALWAYS


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


def predicted_ranges(fitted: Fit, *, arm: str, tau: float, smallest: int, largest: int) -> list[Range]:
    """Where the model says that `arm` pays, within the tested range."""
    grid = np.geomspace(smallest, largest, GRID_POINTS)
    return paying_ranges(grid, tau * fitted.seconds(AR, grid) / fitted.seconds(arm, grid))


def describe(
    ranges: Sequence[Range], drawn: Sequence[Sequence[Range]] | None, *, smallest: int, largest: int
) -> dict[str, Any]:
    """The ranges, the break-even and the beginning, with intervals, as JSON-able values and in words.

    Args:
        ranges: as measured.
        drawn: resampled ones; None when there is no interval.
        smallest, largest: tested batch sizes.

    Returns:
        `ranges` (ends that were not reached are None), `label` in words; `batch_size`, `interval` and `interval_label` of the
        break-even, and `begins` and `begins_interval_label` of the beginning, None where nothing says that it begins above the
        smallest size, and where drafting pays nowhere.
    """
    tested = {"smallest": smallest, "largest": largest}
    result = {
        "ranges": [[_finite(begin), _finite(end)] for begin, end in ranges],
        "label": _label(ranges, **tested),
        "batch_size": _finite(break_even(ranges)),
        "begins": _finite(beginning(ranges)),
        "interval": None,
        "interval_label": None,
        "begins_interval_label": None,
    }
    if drawn is None:
        return result
    ends = percentile_interval(np.array([break_even(each) for each in drawn]))
    begins = percentile_interval(np.array([beginning(each) for each in drawn]))
    late = bool(ranges) and (beginning(ranges) != NEVER or begins[1] != NEVER)
    return result | {
        "interval": [_finite(end) for end in ends],
        "interval_label": _span(ends, **tested),
        "begins_interval_label": _span(begins, **tested) if late else None,
    }


def _finite(value: float) -> float | None:
    return value if value != NEVER and math.isfinite(value) else None


def _label(ranges: Sequence[Range], *, smallest: int, largest: int) -> str:
    """The break-even alone where drafting pays up to it, else the ranges."""
    if len(ranges) < 2 and beginning(ranges) in (NEVER, ALWAYS):
        return _words(break_even(ranges), smallest=smallest, largest=largest)
    parts = []
    for begin, end in ranges:
        low = f"{smallest}" if begin == NEVER else f"{begin:.3g}"
        parts.append(f"pays from {low} " + ("on" if math.isinf(end) else f"to {end:.3g}"))
    return ", ".join(parts)


def _span(ends: tuple[float, float], *, smallest: int, largest: int) -> str:
    return " to ".join(_words(end, smallest=smallest, largest=largest) for end in ends)


def _words(value: float, *, smallest: int, largest: int) -> str:
    if value == NEVER:
        return f"< {smallest}"
    return f"> {largest}" if math.isinf(value) else f"{value:.3g}"
