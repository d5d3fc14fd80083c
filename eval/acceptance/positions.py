"""Acceptance along the answer: is a head as good at the 200th token as at the first?

A step belongs to the bucket of the output position at which it began. Later buckets hold only longer answers, so that a
fall from bucket to bucket may be one of texts and not of positions; therefore each row also gives tau over the requests that
reach the last bucket, which is the same set of texts in every bucket.

Counts are those that the engine accepted, behind the end of the answer too: there a step can receive one token only, and
tau of received ones would fall to 1 whatever the head does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.eval.acceptance.intervals import tau_interval
from eyas.eval.acceptance.steps import accepted_counts, drafted_counts, step_positions
from eyas.eval.records import RequestRecord

EDGES = ((64, (0, 8, 16, 32)), (128, (0, 16, 32, 64)), (None, (0, 32, 128, 512)))
"""(longest answer at most, first positions of the buckets)."""


@dataclass(frozen=True)
class PlacedStep:
    """One drafted step of one request: output tokens before it, drafted and accepted."""

    position: int
    drafted: int
    accepted: int


def bucket_edges(longest: int) -> list[int]:
    """First positions of the buckets for answers of at most `longest` tokens."""
    edges = next(edges for limit, edges in EDGES if limit is None or longest <= limit)
    return [edge for edge in edges if edge < max(longest, 1)]


def placed_steps(request: RequestRecord) -> list[PlacedStep]:
    """The drafted steps of a request where its counts and chunks agree, otherwise none (reconcile.py counts such requests)."""
    positions = step_positions(request)
    if positions is None:
        return []
    counts = zip(positions, drafted_counts(request), accepted_counts(request), strict=True)
    return [PlacedStep(*counts_of_step) for counts_of_step in counts]


def position_rows(requests: Sequence[RequestRecord], *, edges: Sequence[int]) -> list[dict[str, Any]]:
    """One row per bucket that has steps.

    Args:
        requests: served by one arm. edges: first positions of the buckets, ascending from 0.
    """
    placed = [(request.unit, placed_steps(request)) for request in requests]
    rows = []
    for begin, end in zip(edges, [*edges[1:], None], strict=True):
        inside = [(owner, _between(steps, begin, end)) for owner, steps in placed]
        inside = [(owner, steps) for owner, steps in inside if steps]
        if inside:
            rows.append({"from": begin, "to": end, **_bucket_facts(inside)})
    return _with_common_requests(rows, placed)


def _bucket_facts(inside: list[tuple[str, list[PlacedStep]]]) -> dict[str, Any]:
    steps = [step for _, own in inside for step in own]
    interval = tau_interval(
        [sum(step.accepted for step in own) for _, own in inside],
        [len(own) for _, own in inside],
        units=[owner for owner, _ in inside],
        longest=max(step.drafted for step in steps),
    )
    drafted = sum(step.drafted for step in steps)
    return {
        "requests": len(inside),
        "steps": len(steps),
        "tau": _tau(steps),
        "interval": interval,
        "draft_acceptance_rate": sum(step.accepted for step in steps) / drafted if drafted else None,
        "first_position_rate": float(np.mean([step.accepted >= 1 for step in steps])),
    }


def _with_common_requests(
    rows: list[dict[str, Any]], placed: list[tuple[str, list[PlacedStep]]]
) -> list[dict[str, Any]]:
    """Add tau over the requests that have steps in the last bucket."""
    if not rows:
        return []
    last = rows[-1]["from"]
    long_ones = [steps for _, steps in placed if any(step.position >= last for step in steps)]
    for row in rows:
        steps = [step for own in long_ones for step in _between(own, row["from"], row["to"])]
        row |= {"tau_of_longest": _tau(steps) if steps else None, "longest_requests": len(long_ones)}
    return rows


def _between(steps: list[PlacedStep], begin: int, end: int | None) -> list[PlacedStep]:
    return [step for step in steps if step.position >= begin and (end is None or step.position < end)]


def _tau(steps: list[PlacedStep]) -> float:
    return 1 + sum(step.accepted for step in steps) / len(steps)
