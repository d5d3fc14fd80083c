"""Plain decoding against itself: how far apart two groups of AR starts of the same session come to lie by chance.

A ratio inside the *null band* is no difference, whatever its interval says. The band is the 95 % band of the ratio
(mean of n other starts) / (mean of the AR starts) under no difference. Its scale is the standard deviation of starts of
AR alone, which equals the root mean square of all splits of the AR starts into two groups, scaled to the groups that
are compared; or that of all arms pooled, whichever is larger. The reasoning for few starts: three AR starts show their
own scatter with two degrees of freedom, and are often close together by luck, so they may widen the band but never
narrow it below what all arms show; and the t quantile is that of the pooled degrees of freedom, since with 2 (t = 4.3)
no session of three starts could ever decide anything. The ratio of fastest to slowest start, and each start against the
others, are printed beside it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from eyas.eval.distributions import student_quantile
from eyas.eval.records import AR, Blocks, Cells
from eyas.eval.samples import Floats, Sample, take_sample
from eyas.eval.stats import LEVEL, Partners, Pool, compare, pool_of

Band = tuple[float, float]


def null_band(ar: Sample, *, pool: Pool, treated_starts: int) -> Band | None:
    """Ratios that AR against itself gives by chance, comparing all its starts with `treated_starts` others.

    None with a single AR start: nothing is known about its scatter.
    """
    if ar.starts < 2:
        return None
    sd = max(float(ar.start_means().std(ddof=1)), pool.sd)
    return _band(sd * math.sqrt(1 / ar.starts + 1 / treated_starts), degrees=pool.degrees)


def null_band_of_pairs(pool: Pool, *, pairs: int) -> Band | None:
    """Side by side, what starts differ by from pair to pair is common to both arms; the scatter of pairs is the noise."""
    return _band(pool.sd / math.sqrt(pairs), degrees=pool.degrees) if pool.degrees else None


def _band(error: float, *, degrees: int) -> Band:
    half = student_quantile(1 - LEVEL, degrees) * error
    return math.exp(-half), math.exp(half)


def null_rows(cells: Cells, *, partners: Partners | None = None, seed: int) -> list[dict[str, Any]]:
    """Per cell: AR against AR.

    `ratio`, `interval` and `p_value` compare the odd AR starts with the even ones, as if they were two arms; `spread` is
    fastest over slowest; `leave_one_out` each start over the mean of the others; `band` that of two groups as large as
    AR's. With one AR start all but the rates are None.
    """
    return [
        {
            "dataset": key.dataset,
            "temperature": key.temperature,
            "batch_size": key.batch_size,
            "starts": len(arms[AR]),
            **_null_row(arms, partners=partners, seed=seed),
        }
        for key, arms in cells.items()
        if AR in arms
    ]


def _null_row(arms: dict[str, list[Blocks]], *, partners: Partners | None, seed: int) -> dict[str, Any]:
    samples = {arm: take_sample(starts, metric="throughput") for arm, starts in arms.items()}
    ar, means = samples[AR], samples[AR].start_means()
    row: dict[str, Any] = {"tokens_per_second": [float(rate) for rate in np.exp(means)]}
    if ar.starts < 2:
        empty = ("spread", "start_sd", "leave_one_out", "band", "ratio", "interval", "p_value")
        return row | dict.fromkeys(empty)
    pool = pool_of(samples)
    if partners is None:
        band = null_band(ar, pool=pool, treated_starts=ar.starts)
    else:
        pairs = pool_of(samples, partners=partners)
        band = null_band_of_pairs(pairs, pairs=min((len(own) for own in partners.values()), default=1))
    halves = compare(
        ar.select(range(0, ar.starts, 2)), ar.select(range(1, ar.starts, 2)), pool=pool, paired=False, seed=seed
    )
    return row | {
        "spread": math.exp(means.max() - means.min()),
        "start_sd": float(means.std(ddof=1)),
        "leave_one_out": leave_one_out(means),
        "band": None if band is None else list(band),
        "ratio": halves.ratio,
        "interval": [halves.low, halves.high],
        "p_value": halves.p_value,
    }


def leave_one_out(means: Floats) -> list[float]:
    """Each start over the geometric mean of the others."""
    others = (means.sum() - means) / (len(means) - 1)
    return [float(ratio) for ratio in np.exp(means - others)]
