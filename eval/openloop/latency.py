"""Latencies of open-loop requests, counted from their scheduled arrival, and what they must meet.

Counting from when a request was *sent* would leave out the time for which a slow server or client kept it from being sent,
which is the time that users complain about ("coordinated omission"). Only complete answers have latencies; failures are
counted beside them, and miss every objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.eval.latency import summarise_requests
from eyas.eval.openloop.records import LoadRequest

FORMULAS = {
    "ttft": "TTFT = time of the first chunk - scheduled arrival",
    "tpot": "TPOT = (E2E - TTFT) / (n_out - 1), per request with n_out > 1",
    "e2e": "E2E = time of the last chunk with tokens - scheduled arrival",
    "chunk_gap": "chunk gap = time between successive chunks of one answer; a chunk holds one token or several",
    "client_lag": "client lag = when the client got round to a request - scheduled arrival",
    "connection_wait": "connection wait = when a connection was free for a request - when the client got round to it",
    "server_queue": "server queue = from the engine's queue to the first step with the request, as the engine says",
    "goodput": "goodput = answers that meet both objectives / seconds from the first arrival to the end of the last request",
    "throughput": (
        "throughput = output tokens that came in the steady window / its length; the window is from the first quarter's "
        "end to the last arrival, so that neither filling up nor running empty counts"
    ),
}


def answered(requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """Those with a complete answer."""
    return [request for request in requests if request.failure is None]


def time_to_first_token(request: LoadRequest) -> float:
    """Seconds from the scheduled arrival to the first chunk."""
    return request.chunk_times[0] - request.t_scheduled


def total_latency(request: LoadRequest) -> float:
    """Seconds from the scheduled arrival to the last chunk."""
    assert request.t_finish is not None, "a complete answer has an end"
    return request.t_finish - request.t_scheduled


def time_per_output_token(request: LoadRequest) -> float | None:
    """Mean seconds per token after the first; None for an answer of one token."""
    if request.n_out < 2:
        return None
    return (total_latency(request) - time_to_first_token(request)) / (request.n_out - 1)


def chunk_gaps(request: LoadRequest) -> list[float]:
    """Seconds between successive chunks."""
    return [later - earlier for earlier, later in zip(request.chunk_times, request.chunk_times[1:], strict=False)]


def latency_summary(requests: Sequence[LoadRequest]) -> dict[str, dict[str, Any] | None]:
    """How many, mean, p50, p90 and p99 in seconds of every latency, over the complete answers."""
    complete = answered(requests)
    independent = len({request.unit for request in complete})
    values = {
        "ttft": [time_to_first_token(request) for request in complete],
        "tpot": [value for request in complete if (value := time_per_output_token(request)) is not None],
        "e2e": [total_latency(request) for request in complete],
        "chunk_gap": [gap for request in complete for gap in chunk_gaps(request)],
    }
    return {name: summarise_requests(each, independent=independent) for name, each in values.items()}


def meets(request: LoadRequest, *, slo_ttft_ms: float, slo_tpot_ms: float) -> bool:
    """Whether a request was answered within both objectives; an answer of one token has only the first to meet."""
    if request.failure is not None:
        return False
    per_token = time_per_output_token(request)
    in_time = 1000 * time_to_first_token(request) <= slo_ttft_ms
    return in_time and (per_token is None or 1000 * per_token <= slo_tpot_ms)
