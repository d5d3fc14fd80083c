"""Bootstrap intervals of acceptance over requests: steps of one request are not independent, and neither are its repeats.

What is resampled is the prompt, or the conversation where several turns of one were served: all blocks and starts in
which it was served go with it. Acceptance does not depend on the speed of a process, so starts are not a level of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eyas.eval.acceptance.steps import accepted_counts
from eyas.eval.records import RequestRecord

DRAWS = 2000
LEVEL = 0.95
SEED = 20260102


def tau_intervals(requests: Sequence[RequestRecord]) -> dict[str, list[float] | None]:
    """95 % percentile intervals of tau, step-weighted and as a mean over requests; None for fewer than two prompts."""
    drafted = [request for request in requests if accepted_counts(request)]
    owners = [cluster_of(request) for request in drafted]
    steps = np.array([len(accepted_counts(request)) for request in drafted], dtype=float)
    taken = np.array([sum(accepted_counts(request)) for request in drafted], dtype=float)
    weighted = ratio_interval(taken, steps, clusters=owners)
    mean = ratio_interval(taken / np.maximum(steps, 1), np.ones_like(steps), clusters=owners)
    return {"step_weighted": _plus_one(weighted), "request_mean": _plus_one(mean)}


def cluster_of(request: RequestRecord) -> str:
    """What a request is resampled with: its conversation, or else its prompt."""
    return request.prompt_id if request.conversation is None else f"conversation {request.conversation}"


def ratio_interval(
    numerators: NDArray[np.float64],
    denominators: NDArray[np.float64],
    *,
    clusters: Sequence[str],
    seed: int = SEED,
    draws: int = DRAWS,
) -> list[float] | None:
    """Percentile interval at `LEVEL` of sum(numerators) / sum(denominators), resampling clusters.

    Args:
        numerators, denominators: [requests]; a cluster's denominators must not sum to 0.
        clusters: name of each request's cluster.

    Returns:
        [low, high], or None with fewer than two clusters, which cannot show how clusters differ.
    """
    names, owner = np.unique(np.array(clusters, dtype=str), return_inverse=True)
    if len(names) < 2:
        return None
    above = np.bincount(owner, weights=numerators, minlength=len(names))
    below = np.bincount(owner, weights=denominators, minlength=len(names))
    assert (below > 0).all(), "every resample has a denominator"
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    ratios = (weights @ above) / (weights @ below)
    return [float(bound) for bound in np.percentile(ratios, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])]


def _plus_one(interval: list[float] | None) -> list[float] | None:
    return None if interval is None else [1 + bound for bound in interval]
