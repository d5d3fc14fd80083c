"""A bound from acceptance traces: an oracle that drafts exactly the tokens that will be accepted. Simulated, never served.

The steps stay the same (each ends where the head's first rejected draft ended it), so tau does; but a step in which `a`
drafts were accepted drafts and verifies `a` tokens instead of k. The time of such a step is read off the measured step
times of plain decoding and of the head's chains, linear in the number of drafted tokens between them, at the mean of `a`.
What is left between the oracle and the best measured chain is what a perfect choice of the length of every draft could win;
the oracle knows no longer chain than the one that was traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

LABEL = "simulated from acceptance traces and measured step times; no engine served it"


def mean_accepted(accepted: Sequence[Sequence[int]]) -> float | None:
    """Accepted drafts per step, over all steps of all requests."""
    counts = [count for steps in accepted for count in steps]
    return float(np.mean(counts)) if counts else None


def oracle_speedup(seconds_by_length: Mapping[int, float], *, drafts: float, tau: float) -> float:
    """Speedup over plain decoding of an oracle that drafts `drafts` tokens a step on average.

    Args:
        seconds_by_length: measured step time by draft length, 0 (plain decoding) included.
        drafts: accepted tokens per step.
        tau: tokens per step that requests receive.
    """
    lengths = sorted(seconds_by_length)
    assert lengths[0] == 0, "plain decoding is among the step times"
    seconds = float(np.interp(drafts, lengths, [seconds_by_length[length] for length in lengths]))
    return tau * seconds_by_length[0] / seconds
