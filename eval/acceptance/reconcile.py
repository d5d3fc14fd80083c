"""Do the drafting counts explain the tokens that came out? A figure about acceptance is worth what this leaves unexplained.

Each request brings one token from its prefill, each drafted step one token plus the accepted ones, each step without a
draft one token; the last step's tokens behind the end of the answer were accepted but never given out. What remains is
unexplained: counts of another run, lost chunks, a counter that means something else in this version of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.eval.acceptance.steps import accepted_counts, cut_at_end, drafted_counts, undrafted_steps
from eyas.eval.records import RequestRecord

TOLERANCE = 0.01
"""Largest unexplained share of the output tokens, and of an engine counter, that passes."""

SHOWN = 5


def reconcile(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Account for the output tokens of `requests`.

    Returns:
        residual: output tokens that prefills, drafted steps and accepted tokens do not explain (negative: fewer came
        out than were counted), and its named parts: undrafted_steps - cut_at_end + unexplained.
        worst: the requests with the largest unexplained counts.
    """
    output = sum(request.n_out for request in requests)
    steps = sum(len(accepted_counts(request)) for request in requests)
    accepted = sum(sum(accepted_counts(request)) for request in requests)
    residual = output - (len(requests) + steps + accepted)
    unexplained = {index: left for index, request in enumerate(requests) if (left := unexplained_tokens(request))}
    worst = sorted(unexplained, key=lambda index: -abs(unexplained[index]))[:SHOWN]
    total = sum(unexplained.values())
    return {
        "output_tokens": output,
        "requests": len(requests),
        "steps": steps,
        "accepted": accepted,
        "residual": residual,
        "residual_share": residual / output if output else 0.0,
        "undrafted_steps": sum(undrafted_steps(request) for request in requests),
        "cut_at_end": sum(cut_at_end(request) for request in requests),
        "unexplained": total,
        "unexplained_share": sum(map(abs, unexplained.values())) / output if output else 0.0,
        "unexplained_requests": len(unexplained),
        "worst": [{"prompt_id": requests[index].prompt_id, "unexplained": unexplained[index]} for index in worst],
    }


def unexplained_tokens(request: RequestRecord) -> int:
    """Output tokens of one request minus those that its counts and chunks account for."""
    accepted = accepted_counts(request)
    explained = 1 + len(accepted) + sum(accepted) + undrafted_steps(request) - cut_at_end(request)
    return request.n_out - explained if request.n_out else 0


def reconcile_counters(requests: Sequence[RequestRecord], counters: Mapping[str, int]) -> list[dict[str, Any]]:
    """The engine's own counters beside the sums over requests. `counters`: their growth while `requests` were served."""
    sums = {
        "num_drafts": sum(len(accepted_counts(request)) for request in requests),
        "num_draft_tokens": sum(sum(drafted_counts(request)) for request in requests),
        "num_accepted_tokens": sum(sum(accepted_counts(request)) for request in requests),
    }
    rows = []
    for name, total in sums.items():
        difference = counters[name] - total
        larger = max(counters[name], total)
        share = abs(difference) / larger if larger else 0.0
        rows.append(
            {"counter": name, "engine": counters[name], "requests": total, "difference": difference, "share": share}
        )
    return rows


def passes(tally: Mapping[str, Any], counters: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no more than `TOLERANCE` of the tokens and of each counter is unexplained."""
    return tally["unexplained_share"] <= TOLERANCE and all(row["share"] <= TOLERANCE for row in counters)
