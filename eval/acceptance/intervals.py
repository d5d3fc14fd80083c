"""Intervals of tau over prompts: steps of one request are not independent, and neither are its repeats.

The independent witness is the prompt, or the conversation where several turns of one were served: all blocks and starts in
which it was served go with it. Acceptance does not depend on the speed of a process, so starts are not a level of their own.

tau is a ratio of sums over witnesses, so its variance follows from how far each lies from the ratio, by its weight. With
few witnesses, of which long answers weigh more, that is too small and badly known: it is widened, and Student's t has the
degrees of freedom of Bell and McCaffrey (2002), as in eval/stats.py. Percentiles of a bootstrap cover 88 % with 8 prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eyas.eval.acceptance.steps import drafted_counts, received_counts
from eyas.eval.distributions import student_quantile
from eyas.eval.records import RequestRecord
from eyas.eval.stats import small_sample

LEVEL = 0.95

Interval = list[float] | None
"""[low, high] at `LEVEL`; None where fewer than two prompts cannot show how prompts differ."""


def tau_intervals(requests: Sequence[RequestRecord]) -> dict[str, Interval]:
    """Intervals of tau over the drafted steps, step-weighted and as a mean over requests."""
    drafted = [request for request in requests if drafted_counts(request)]
    units = [request.unit for request in drafted]
    steps = [len(drafted_counts(request)) for request in drafted]
    taken = [sum(received_counts(request)) for request in drafted]
    longest = max((max(drafted_counts(request)) for request in drafted), default=0)
    own = [received / count for received, count in zip(taken, steps, strict=True)]
    return {
        "step_weighted": tau_interval(taken, steps, units=units, longest=longest),
        "request_mean": tau_interval(own, [1] * len(own), units=units, longest=longest),
    }


def tau_interval(taken: Sequence[float], steps: Sequence[float], *, units: Sequence[str], longest: int) -> Interval:
    """Interval of tau = 1 + sum(taken) / sum(steps).

    Args:
        taken: per request, the drafted tokens that it received. steps: in how many steps, above 0.
        units: per request, the prompt or conversation that it belongs to.
        longest: most tokens that a step drafted; tau cannot pass 1 + longest.
    """
    names, owner = np.unique(np.array(units, dtype=str), return_inverse=True)
    if len(names) < 2:
        return None
    above = np.bincount(owner, weights=taken, minlength=len(names))
    below = np.bincount(owner, weights=steps, minlength=len(names))
    assert (below > 0).all(), "every prompt has a step"
    tau = 1 + above.sum() / below.sum()
    shares = below / below.sum()
    shrunk, degrees = small_sample(shares)
    variance = float(np.sum((shares * (1 + above / below - tau)) ** 2)) / shrunk
    # On the log scale: tau is positive, and prompts that accept much reach further up than others reach down.
    reach = math.exp(student_quantile(1 - LEVEL, max(degrees, 1.0)) * math.sqrt(variance) / tau)
    return [max(1.0, float(tau / reach)), min(1.0 + longest, float(tau * reach))]
