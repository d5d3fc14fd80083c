"""Plain decoding against itself: how far apart two groups of AR starts of the same session come to lie by chance.

A ratio inside the *null band* is no difference, whatever its interval says. The band is the 95 % band of the ratio
(mean of n other starts) / (mean of the AR starts) under no difference. Its scale is the standard deviation of starts of
AR alone, which equals the root mean square of all splits of the AR starts into two groups, scaled to the groups that
are compared; or that of all arms pooled, whichever is larger. The reasoning for few starts: three AR starts show their
own scatter with two degrees of freedom, and are often close together by luck, so they may widen the band but never
narrow it below what all arms show; and the t quantile is that of the pooled degrees of freedom, since with 2 (t = 4.3)
no session of three starts could ever decide anything. The ratio of fastest to slowest start, and each start against the
others, are printed beside it.

Where two engines run side by side a start is common to both, and what they differ by is the scatter of pairs. Every
session then has pairs of AR with its twin, plain decoding once more; they tell by how much two equal engines differ, one
loaded first or second, which no pair of AR and a head can show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from eyas.eval.distributions import student_quantile
from eyas.eval.records import AR, AR_TWIN, Blocks, Cells
from eyas.eval.samples import Floats, Sample, take_sample
from eyas.eval.stats import LEVEL, Partners, Pool, RatioInterval, compare, pool_of, sides

Band = tuple[float, float]


def null_band(ar: Sample, *, pool: Pool, treated_starts: int) -> Band | None:
    """Ratios that AR against itself gives by chance, comparing all its starts with `treated_starts` others.

    None with a single AR start: nothing is known about its scatter.
    """
    if ar.starts < 2:
        return None
    sd = max(float(ar.start_means().std(ddof=1)), pool.sd)
    return _band(sd * math.sqrt(1 / ar.starts + 1 / treated_starts), degrees=pool.degrees)


def null_band_of_pairs(twins: Floats, *, pool: Pool, pairs: int) -> Band | None:
    """Ratios that AR against its twin gives by chance over `pairs` pairs; None below two pairs of twins.

    Their true ratio is 1, so they scatter about 1 and not about their mean: that one of two equal engines is always the
    faster belongs to the band. As above they may widen it and never narrow it.

    Args:
        twins: log ratios of the pairs of AR and its twin.
        pool: of the pairs of all arms.
        pairs: of the arm that is judged.
    """
    if len(twins) < 2:
        return None
    sd = max(math.sqrt(float(np.mean(twins**2))), pool.sd)
    return _band(sd / math.sqrt(pairs), degrees=pool.degrees)


def band_beside(samples: Mapping[str, Sample], arm: str, *, pool: Pool, partners: Partners | None) -> Band | None:
    """The null band of one arm of a cell, from the samples of all its arms."""
    baseline, treated = sides(samples, arm, partners=partners)
    if partners is None:
        return null_band(baseline, pool=pool, treated_starts=treated.starts)
    return null_band_of_pairs(_twin_ratios(samples, partners=partners), pool=pool, pairs=treated.starts)


def _twin_ratios(samples: Mapping[str, Sample], *, partners: Partners) -> Floats:
    if AR_TWIN not in samples or AR_TWIN not in partners:
        return np.zeros(0)
    baseline, twin = sides(samples, AR_TWIN, partners=partners)
    return twin.start_means() - baseline.start_means()


def _band(error: float, *, degrees: int) -> Band:
    half = student_quantile(1 - LEVEL, degrees) * error
    return math.exp(-half), math.exp(half)


def null_rows(cells: Cells, *, partners: Partners | None = None, seed: int) -> list[dict[str, Any]]:
    """Per cell: AR against AR.

    `ratio`, `interval` and `p_value` compare the odd AR starts with the even ones as if they were two arms, side by side
    AR's twin with AR; `spread` is fastest over slowest; `leave_one_out` each start over the mean of the others; `band`
    that of two groups as large as AR's, side by side of as many pairs as the twin has. What is not known is None.
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
    interval, band = _against_itself(samples, partners=partners, seed=seed)
    return row | {
        "spread": math.exp(means.max() - means.min()),
        "start_sd": float(means.std(ddof=1)),
        "leave_one_out": leave_one_out(means),
        "band": None if band is None else list(band),
        "ratio": None if interval is None else interval.ratio,
        "interval": None if interval is None else [interval.low, interval.high],
        "p_value": None if interval is None else interval.p_value,
    }


def _against_itself(
    samples: Mapping[str, Sample], *, partners: Partners | None, seed: int
) -> tuple[RatioInterval | None, Band | None]:
    """AR against AR as if it were two arms, and the band that such a ratio is held against."""
    ar, pool = samples[AR], pool_of(samples, partners=partners)
    if partners is None:
        odd, even = ar.select(range(0, ar.starts, 2)), ar.select(range(1, ar.starts, 2))
        return compare(odd, even, pool=pool, seed=seed), null_band(ar, pool=pool, treated_starts=ar.starts)
    if AR_TWIN not in samples or AR_TWIN not in partners:
        return None, None
    baseline, twin = sides(samples, AR_TWIN, partners=partners)
    return (
        compare(baseline, twin, pool=pool, paired=True, seed=seed),
        band_beside(samples, AR_TWIN, pool=pool, partners=partners),
    )


def leave_one_out(means: Floats) -> list[float]:
    """Each start over the geometric mean of the others."""
    others = (means.sum() - means) / (len(means) - 1)
    return [float(ratio) for ratio in np.exp(means - others)]
