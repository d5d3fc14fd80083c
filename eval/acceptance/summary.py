"""Everything about acceptance over one set of requests, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eyas.eval.acceptance.intervals import tau_intervals
from eyas.eval.acceptance.loops import is_loop
from eyas.eval.acceptance.rates import (
    by_drafted_length,
    conditional_rates,
    marginal_rates,
    product_limit_rates,
    request_taus,
    tau_at_shorter_chains,
    tau_request_mean,
    tau_step_weighted,
    wasted_tokens,
)
from eyas.eval.acceptance.reconcile import reconcile
from eyas.eval.acceptance.steps import accepted_counts, decode_steps, drafted_counts, received_counts
from eyas.eval.records import RequestRecord


def acceptance_summary(requests: Sequence[RequestRecord], *, draft_length: int) -> dict[str, Any]:
    """Acceptance over `requests`, all served by one arm that drafts at most `draft_length` tokens a step.

    Returns:
        Counts and rates by name; what needs a step is None (or empty) when nothing was drafted. Every tau counts
        received tokens, but for `tau_engine`; rates by position and the histogram count what the engine accepted.
        tau: step-weighted. tau_request_mean: of each request's own.
        tau_engine: tau with the tokens accepted behind the end of an answer, as the engine counts; 1 + sum of `marginal`.
        tau_all_steps: tokens per decode step, steps without a draft included; it is what speed depends on.
        tau_request_percentiles: p10, p50, p90 over requests.
        marginal_product_limit: see rates.py; equals `marginal` where every step drafts the same number.
    """
    accepted = [accepted_counts(request) for request in requests]
    received = [received_counts(request) for request in requests]
    drafted = [drafted_counts(request) for request in requests]
    conditional = conditional_rates(accepted, drafted, draft_length=draft_length)
    steps = [count for request in accepted for count in request]
    drafted_tokens = sum(sum(request) for request in drafted)
    intervals = tau_intervals(requests)
    return {
        "requests": len(requests),
        "steps": len(steps),
        "tau": tau_step_weighted(received),
        "tau_interval": intervals["step_weighted"],
        "tau_request_mean": tau_request_mean(received),
        "tau_request_mean_interval": intervals["request_mean"],
        "tau_engine": tau_step_weighted(accepted),
        "tau_all_steps": tokens_per_decode_step(requests),
        "tau_request_percentiles": _percentiles(request_taus(received)),
        **_without_loops(requests),
        "draft_acceptance_rate": sum(steps) / drafted_tokens if drafted_tokens else None,
        "marginal": marginal_rates(accepted, draft_length=draft_length),
        "conditional": conditional,
        "marginal_product_limit": product_limit_rates(conditional) if steps else [],
        "histogram": [steps.count(count) for count in range(draft_length + 1)],
        "tau_at_shorter_chains": tau_at_shorter_chains(received, draft_length=draft_length),
        "by_drafted": by_drafted_length(received, drafted),
        "wasted": wasted_tokens(received, drafted),
        "reconciliation": reconcile(requests),
    }


def tokens_per_decode_step(requests: Sequence[RequestRecord]) -> float | None:
    """Output tokens behind the prefill's per decode step, whether it drafted or not; None without decode steps."""
    steps = sum(decode_steps(request) for request in requests)
    tokens = sum(sum(request.chunk_sizes[1:]) for request in requests)
    return tokens / steps if steps else None


def _without_loops(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    looping, sober = [], []
    for request in requests:
        (looping if is_loop(request) else sober).append(request)
    return {
        "tau_without_loops": tau_step_weighted([received_counts(request) for request in sober]),
        "tau_without_loops_interval": tau_intervals(sober)["step_weighted"],
        "tau_of_loops": tau_step_weighted([received_counts(request) for request in looping]),
        "loop_requests": len(looping),
    }


def _percentiles(values: Sequence[float]) -> list[float] | None:
    return [float(q) for q in np.percentile(values, [10, 50, 90])] if values else None
