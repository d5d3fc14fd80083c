"""Quantiles of latency per cell and arm: what the distribution figures draw, and what a reader can draw again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eyas.eval.latency import time_per_output_token, total_latency
from eyas.eval.records import Cells

LEVELS = (0.0, 0.01, *(round(0.05 * step, 2) for step in range(1, 20)), 0.99, 1.0)
"""Shares of requests whose latency is at or below the quantile."""


def latency_curves(cells: Cells) -> list[dict[str, Any]]:
    """Per cell and arm: seconds at each of `LEVELS`, over all requests of all starts of the arm.

    `tpot` is None when every answer is one token long.
    """
    rows = []
    for key, arms in cells.items():
        for arm, starts in arms.items():
            requests = [request for blocks in starts for cell in blocks for request in cell.requests]
            per_token = [value for request in requests if (value := time_per_output_token(request)) is not None]
            row = {"dataset": key.dataset, "temperature": key.temperature, "batch_size": key.batch_size, "arm": arm}
            row |= {"requests": len(requests), "levels": list(LEVELS)}
            rows.append(row | {"e2e": _quantiles([total_latency(r) for r in requests]), "tpot": _quantiles(per_token)})
    return rows


def _quantiles(values: Sequence[float]) -> list[float] | None:
    return [float(value) for value in np.quantile(values, LEVELS)] if values else None
