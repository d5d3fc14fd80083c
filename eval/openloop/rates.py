"""Whether a server keeps up with a rate: a written rule on its backlog.

The *backlog* at a moment is the number of requests that have arrived and are not answered. A server that keeps up has a
backlog that goes up and down around a level; one that does not has a backlog that grows as long as requests come. At
finite length the two can look alike, so the rule has a third answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eyas.eval.openloop.records import LoadCell

Load = Literal["sustained", "saturated", "undecided"]

FILL_SHARE = 0.25
"""First part of the arrival window, in which the backlog rises from nothing at any rate; it is left out."""

BLOCKS = 8
SATURATED_RISE, SUSTAINED_RISE = 0.05, 0.10
NOISE_FACTOR = 2.5

SATURATION_RULE = (
    "Backlog: requests that have arrived and are not answered; a failed request stays in it. Window: from the first "
    "quarter's end to the last arrival. A straight line is fitted to the backlog's means over 8 equal blocks of the window "
    "(averaged over starts, which share their arrivals); its rise is compared with the noise of a steady backlog, 2.5 times the "
    "square root of its mean. Saturated: the rise is above the noise and above 5 % of the requests that arrived in the "
    "window. Sustained: the rise with the noise added is below 10 % of them. Otherwise undecided: too few requests to tell."
)


@dataclass(frozen=True)
class Backlog:
    """How the backlog moved. `rise`, `noise` and `mean` are requests; `arrivals` came in the window."""

    load: Load
    rise: float
    noise: float
    arrivals: int
    mean: float


def judge_backlog(cells: Sequence[LoadCell]) -> Backlog:
    """Apply `SATURATION_RULE` to one rate of one arm, over its starts."""
    begin, end = steady_window(cells[0])
    arrivals = sum(begin < request.t_scheduled <= end for request in cells[0].requests)
    if end <= begin or arrivals == 0:
        return Backlog("undecided", 0.0, 0.0, arrivals, 0.0)
    edges = np.linspace(begin, end, BLOCKS + 1)
    means = np.mean([mean_backlog(cell, edges) for cell in cells], axis=0)
    slope = np.polyfit((edges[:-1] + edges[1:]) / 2, means, deg=1)[0]
    rise, mean = float(slope) * (end - begin), float(means.mean())
    noise = NOISE_FACTOR * math.sqrt(mean)
    return Backlog(_load(rise, noise, arrivals), rise, noise, arrivals, mean)


def _load(rise: float, noise: float, arrivals: int) -> Load:
    if rise > noise and rise > SATURATED_RISE * arrivals:
        return "saturated"
    if rise + noise < SUSTAINED_RISE * arrivals:
        return "sustained"
    return "undecided"


def steady_window(cell: LoadCell) -> tuple[float, float]:
    """The part of a cell in which its load is what the rate says: after the backlog has filled, before arrivals end."""
    last = max((request.t_scheduled for request in cell.requests), default=0.0)
    return FILL_SHARE * last, last


def mean_backlog(cell: LoadCell, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Time average of the backlog between successive `edges` [blocks + 1], in seconds since the cell began."""
    begins = np.array([request.t_scheduled for request in cell.requests])
    ends = np.array(
        [
            np.inf if request.failure is not None or request.t_finish is None else request.t_finish
            for request in cell.requests
        ]
    )
    left, right = edges[:-1, None], edges[1:, None]
    overlaps = np.clip(np.minimum(ends, right) - np.maximum(begins, left), 0.0, None)
    return overlaps.sum(axis=1) / np.diff(edges)
