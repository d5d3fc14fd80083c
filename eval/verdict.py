"""The verdict of a cell, by written rules, and the best draft length per batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.eval.records import AR
from eyas.eval.stats import RatioInterval

Word = Literal["SUPPORTED", "SLOWER", "INCONCLUSIVE", "NOT SUPPORTED"]
Lossless = Literal["passed", "failed", "not run"]

MIN_STARTS = 3
RULES = (
    "SLOWER: the whole interval of the ratio lies below 1.",
    "SUPPORTED: the whole interval lies above 1, the ratio exceeds the AR-vs-AR spread of the cell, each arm has at "
    "least "
    f"{MIN_STARTS} starts, and the lossless check passed.",
    "NOT SUPPORTED: the whole interval lies above 1, but the lossless check failed.",
    "INCONCLUSIVE: everything else, with the reason.",
)


@dataclass(frozen=True)
class Verdict:
    word: Word
    reason: str


def judge(
    interval: RatioInterval, *, spread: float | None, ar_starts: int, head_starts: int, lossless: Lossless
) -> Verdict:
    """Apply `RULES` to one cell.

    Args:
        interval: head over AR throughput.
        spread: AR-vs-AR spread of the cell (`stats.null_spread`); None when AR started once.
        ar_starts, head_starts: finished starts of each arm.
        lossless: outcome of the losslessness check of the session.
    """
    if interval.high < 1:
        return Verdict("SLOWER", "the interval lies below 1")
    if interval.low <= 1:
        return Verdict("INCONCLUSIVE", "the interval includes 1")
    if lossless == "failed":
        return Verdict("NOT SUPPORTED", "measured faster, but outputs differ from plain decoding")
    missing = _missing(interval.ratio, spread=spread, starts=min(ar_starts, head_starts), lossless=lossless)
    if missing:
        return Verdict("INCONCLUSIVE", "measured faster, but " + "; ".join(missing))
    return Verdict("SUPPORTED", f"the interval lies above 1, over {min(ar_starts, head_starts)} starts per arm")


def _missing(ratio: float, *, spread: float | None, starts: int, lossless: Lossless) -> list[str]:
    """What a faster cell lacks to be SUPPORTED."""
    reasons = []
    if starts < MIN_STARTS:
        plural = "" if starts == 1 else "s"
        reasons.append(f"only {starts} start{plural} per arm; SUPPORTED needs {MIN_STARTS}")
    if spread is not None and ratio <= spread:
        reasons.append(f"two AR starts differ as much ({spread:.2f}x)")
    if lossless != "passed":
        reasons.append("the lossless check did not run")
    return reasons


def best_arm(rates: Mapping[str, float]) -> str:
    """The arm with the highest throughput; plain decoding wins a tie, since it needs no head."""
    return max(rates, key=lambda arm: (rates[arm], arm == AR))
