"""When requests arrive: a seeded Poisson process, the same in every arm.

A closed loop waits for the server before it sends more, so a slow server is asked less; real users do not wait. An
open loop keeps its timetable, and a server that is too slow shows it by a backlog.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def poisson_arrivals(count: int, *, rate: float, seed: int) -> list[float]:
    """`count` arrival times in seconds from 0, in order, with independent exponential gaps of mean 1 / `rate`.

    The gaps at two rates are the same up to their scale, so that a difference between rates is not one of luck.

    Args:
        rate: requests per second.
        seed: of the gaps; the same seed gives the same arrivals on every machine.

    Raises:
        ValueError: a rate that is not positive and finite, or no request.
    """
    require_rates([rate])
    if count < 1:
        raise ValueError(f"an open loop needs at least one request, not {count}; raise score.open_loop.requests")
    gaps = np.random.default_rng(seed).exponential(size=count)
    return (np.cumsum(gaps) / rate).tolist()


def require_rates(rates: Sequence[float]) -> None:
    """Refuse rates that no clock can keep.

    Raises:
        ValueError: names the rate.
    """
    for rate in rates:
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"score.open_loop.rates: {rate} is no rate; write requests per second, such as 0.5")
    if len(set(rates)) < len(rates):
        raise ValueError(f"score.open_loop.rates: {list(rates)} names a rate twice; write each once")
