"""Acceptance of drafted tokens, from the counts the engine reports for every verification step of every request.

tau is the mean number of tokens per verification step, the target's own (bonus) token included. Two estimators are
in use and can differ by a quarter, because long answers are often the badly accepted ones; both are computed.
*marginal* rate of position i: share of steps that accept at least i drafted tokens. *conditional* rate: the
same among steps that accepted i - 1 and drafted an i-th token. The engine counts a step's accepted tokens before it
cuts the answer at its end or at max_tokens, so the last step of a request may over-count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eyas.eval.records import RequestRecord

LOOP_NGRAM = 8
LOOP_SHARE = 0.3
"""An answer is flagged as looping when more than this share of its 8-grams repeats an earlier one."""


def tau_step_weighted(accepted: Sequence[Sequence[int]]) -> float | None:
    """1 + accepted tokens / steps over all steps of all requests; None without steps."""
    steps = sum(len(request) for request in accepted)
    return 1 + sum(sum(request) for request in accepted) / steps if steps else None


def tau_request_mean(accepted: Sequence[Sequence[int]]) -> float | None:
    """Mean over requests of each request's own tau; None without steps."""
    taus = [1 + sum(request) / len(request) for request in accepted if request]
    return float(np.mean(taus)) if taus else None


def marginal_rates(accepted: Sequence[Sequence[int]], *, draft_length: int) -> list[float]:
    """Share of steps that accept at least 1, 2, ... `draft_length` tokens."""
    steps = np.array([count for request in accepted for count in request], dtype=int)
    if not steps.size:
        return []
    return [float(np.mean(steps >= position)) for position in range(1, draft_length + 1)]


def conditional_rates(
    accepted: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]], *, draft_length: int
) -> list[float | None]:
    """Acceptance of position i among steps that accepted i - 1 tokens and drafted i; None where no step did."""
    taken = np.array([count for request in accepted for count in request], dtype=int)
    offered = np.array([count for request in drafted for count in request], dtype=int)
    rates: list[float | None] = []
    for position in range(1, draft_length + 1):
        tried = (taken >= position - 1) & (offered >= position)
        rates.append(float(np.mean(taken[tried] >= position)) if tried.any() else None)
    return rates


def repeated_ngram_share(token_ids: Sequence[int], *, length: int = LOOP_NGRAM) -> float:
    """Share of the n-grams of `token_ids` that occurred before in it; 0 when it is shorter than one n-gram."""
    ngrams = [tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def is_loop(request: RequestRecord) -> bool:
    return repeated_ngram_share(request.token_ids) > LOOP_SHARE


def reconcile(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Do the drafting counts explain the tokens that came out?

    Each request brings one token from its prefill, each step one token plus the accepted ones. What is left over is
    tokens cut at the end of an answer (negative) and steps without drafts (positive).
    """
    output = sum(request.n_out for request in requests)
    steps = sum(len(request.per_step_accepted or []) for request in requests)
    accepted = sum(sum(request.per_step_accepted or []) for request in requests)
    residual = output - (len(requests) + steps + accepted)
    return {
        "output_tokens": output,
        "requests": len(requests),
        "steps": steps,
        "accepted": accepted,
        "residual": residual,
        "residual_share": residual / output if output else 0.0,
    }


def acceptance_summary(requests: Sequence[RequestRecord], *, draft_length: int) -> dict[str, Any]:
    """Everything about acceptance over `requests`, all served with chains of `draft_length` drafted tokens."""
    accepted = [request.per_step_accepted or [] for request in requests]
    drafted = [request.per_step_drafted or [] for request in requests]
    marginal = marginal_rates(accepted, draft_length=draft_length)
    steps = [count for request in accepted for count in request]
    per_request = [1 + sum(request) / len(request) for request in accepted if request]
    sober = [request.per_step_accepted or [] for request in requests if not is_loop(request)]
    drafted_tokens = sum(sum(request) for request in drafted)
    return {
        "requests": len(requests),
        "steps": len(steps),
        "tau_step_weighted": tau_step_weighted(accepted),
        "tau_request_mean": tau_request_mean(accepted),
        "tau_without_loops": tau_step_weighted(sober),
        "tau_request_percentiles": None
        if not per_request
        else [float(q) for q in np.percentile(per_request, [10, 50, 90])],
        "draft_acceptance_rate": sum(steps) / drafted_tokens if drafted_tokens else None,
        "marginal": marginal,
        "conditional": conditional_rates(accepted, drafted, draft_length=draft_length),
        "histogram": [steps.count(count) for count in range(draft_length + 1)],
        "tau_at_shorter_chains": [1 + sum(marginal[:length]) for length in range(1, len(marginal) + 1)],
        "reconciliation": reconcile(requests),
    }
