"""Ratios of an arm to plain decoding at one rate, with intervals over starts.

The bootstrap of `eyas.eval.stats` resamples prompts one by one. Requests of an open loop share a queue, so that one long
answer delays its neighbours and no prompt is a unit of its own. The unit here is the start: each gives one value, and the
difference of the arms' mean log values has a pooled variance and Student's t. An interval holds for this timetable of
arrivals; another draw of it is not in the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eyas.eval.distributions import student_quantile
from eyas.eval.openloop.latency import answered, time_per_output_token, time_to_first_token, total_latency
from eyas.eval.openloop.rates import steady_window
from eyas.eval.openloop.records import LoadCell
from eyas.eval.records import AR

LEVEL = 0.95


def tokens_per_second(cell: LoadCell) -> float:
    """Output tokens that came within the steady window, by its length. Tokens of answers that failed later count too."""
    begin, end = steady_window(cell)
    tokens = sum(
        size
        for request in cell.requests
        for t, size in zip(request.chunk_times, request.chunk_sizes, strict=True)
        if begin < t <= end
    )
    return tokens / (end - begin) if end > begin else 0.0


def _mean_ttft(cell: LoadCell) -> float:
    return _mean([time_to_first_token(request) for request in answered(cell.requests)])


def _mean_tpot(cell: LoadCell) -> float:
    return _mean([value for r in answered(cell.requests) if (value := time_per_output_token(r)) is not None])


def _mean_e2e(cell: LoadCell) -> float:
    return _mean([total_latency(request) for request in answered(cell.requests)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


METRICS: dict[str, Callable[[LoadCell], float]] = {
    "ttft": _mean_ttft,
    "tpot": _mean_tpot,
    "e2e": _mean_e2e,
    "throughput": tokens_per_second,
}


def compare_with(baseline: Sequence[LoadCell], cells: Sequence[LoadCell], *, void: str | None) -> dict[str, Any]:
    """Ratios of an arm to plain decoding at one rate (`ratio_to_ar`), or why there are none (`no_ratio`).

    Plain decoding itself has neither. Failed requests have no latency, and they are the slow ones: a mean over the others
    would flatter whichever arm lost them.

    Args:
        void: why the arm's engines are not comparable with those of plain decoding; None when they are.
    """
    if cells[0].arm == AR:
        return {"ratio_to_ar": None, "no_ratio": None}
    lost = [words for each in (baseline, cells) if (words := _lost(each))]
    if void is not None:
        why = void
    elif not baseline:
        why = "plain decoding has no result at this rate"
    elif lost:
        why = " and ".join(lost)
    else:
        return {"ratio_to_ar": ratios_to(baseline, cells), "no_ratio": None}
    return {"ratio_to_ar": None, "no_ratio": why}


def _lost(cells: Sequence[LoadCell]) -> str | None:
    requests = [request for cell in cells for request in cell.requests]
    failed = len(requests) - len(answered(requests))
    return f"{failed} of {len(requests)} requests of {cells[0].arm} failed" if failed else None


def ratios_to(baseline: Sequence[LoadCell], treated: Sequence[LoadCell]) -> dict[str, dict[str, Any] | None]:
    """Per metric: ratio of the geometric means over starts of each start's mean, and its interval.

    None where a start has no value. The interval is None with one start per arm: nothing shows how starts scatter.
    """
    return {
        name: _ratio([metric(c) for c in baseline], [metric(c) for c in treated]) for name, metric in METRICS.items()
    }


def _ratio(baseline: Sequence[float], treated: Sequence[float]) -> dict[str, Any] | None:
    if not baseline or not treated or min(*baseline, *treated) <= 0:
        return None
    below, above = np.log(baseline), np.log(treated)
    point = float(above.mean() - below.mean())
    degrees = len(below) + len(above) - 2
    if degrees == 0:
        return {"ratio": math.exp(point), "interval": None}
    squares = float(np.sum((below - below.mean()) ** 2) + np.sum((above - above.mean()) ** 2))
    error = math.sqrt(squares / degrees * (1 / len(below) + 1 / len(above)))
    half = student_quantile(1 - LEVEL, degrees) * error
    return {"ratio": math.exp(point), "interval": [math.exp(point - half), math.exp(point + half)]}
