"""Latency and throughput: definitions, and percentiles over requests.

Total latency (E2E), time to first token (TTFT), per-token latency (TPOT) and throughput are four different
quantities and are kept apart. The gap between streamed chunks is not per-token latency under speculative decoding,
where a chunk holds several tokens, so it is reported as what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eyas.eval.records import CellRecord, RequestRecord

TPOT_FORMULA = "TPOT = (E2E - TTFT) / (n_out - 1), per request with n_out > 1"
E2E_FORMULA = "E2E = t_finish - t_submit, per request"
TTFT_FORMULA = "TTFT = t_first - t_submit, per request"
MIN_FOR_P99 = 100
"""Independent requests (prompts; the turns of a conversation are one) below which no p99 is told."""
THROUGHPUT_FORMULA = "throughput = output tokens of all requests of the cell / makespan of the cell"


def total_latency(request: RequestRecord) -> float:
    """Seconds from submission to the last token."""
    return request.t_finish - request.t_submit


def time_to_first_token(request: RequestRecord) -> float:
    """Seconds from submission to the first token."""
    return request.t_first - request.t_submit


def time_per_output_token(request: RequestRecord) -> float | None:
    """Mean seconds per token after the first; None for an answer of one token."""
    if request.n_out < 2:
        return None
    return (request.t_finish - request.t_first) / (request.n_out - 1)


def chunk_gaps(request: RequestRecord) -> list[float]:
    """Seconds between successive chunks of tokens."""
    return [later - earlier for earlier, later in zip(request.chunk_times, request.chunk_times[1:], strict=False)]


def throughput(cell: CellRecord) -> float:
    """Output tokens per second over the whole cell, its prefills and its thinning tail included."""
    return sum(request.n_out for request in cell.requests) / cell.makespan


def summarise(values: Sequence[float]) -> dict[str, Any] | None:
    """How many, mean, p50, p90 and p99 (linear interpolation); None when there are no values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"n": len(values), "mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def summarise_requests(values: Sequence[float], *, independent: int) -> dict[str, Any] | None:
    """`summarise`, with no p99 where fewer than `MIN_FOR_P99` independent requests stand behind the values.

    The p99 of a dozen prompts is their slowest, however often each was served.
    """
    summary = summarise(values)
    if summary is None or independent >= MIN_FOR_P99:
        return summary
    return summary | {"p99": None}


def latency_summary(cells: Sequence[CellRecord]) -> dict[str, dict[str, Any] | None]:
    """E2E, TTFT, TPOT and chunk gap in seconds over all requests of the same cell in all starts of an arm."""
    requests = [request for cell in cells for request in cell.requests]
    independent = len({request.unit for request in requests})
    values = {
        "e2e": [total_latency(request) for request in requests],
        "ttft": [time_to_first_token(request) for request in requests],
        "tpot": [value for request in requests if (value := time_per_output_token(request)) is not None],
        "chunk_gap": [gap for request in requests for gap in chunk_gaps(request)],
    }
    return {name: summarise_requests(each, independent=independent) for name, each in values.items()}
