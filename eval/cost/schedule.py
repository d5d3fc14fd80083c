"""The best draft length per range of batch sizes, in the form that vLLM serves: `num_speculative_tokens_per_batch_size`.

vLLM (0.32, v1/spec_decode/dynamic/utils.py) takes a list of [first, last, k]: inclusive ranges of the number of requests in a
step, the first from 1, not overlapping. A gap and everything beyond the last range carry on the k before them, and no k
exceeds `num_speculative_tokens`. So what is written here has no gaps, and its last range reaches to `max_num_seqs`. At
k = 0 a head still reads every token once, to keep its cache in step: plain decoding inside a schedule is not quite free,
which is why the schedule is measured as an arm of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.eval.comparison import Comparison, compare_samples
from eyas.eval.records import AR, AR_TWIN, ArmFacts, CellKey, Cells
from eyas.eval.samples import take_sample
from eyas.eval.stats import DRAWS, Partners

TIE = 0.01
"""Speedups this close are equal, and the shorter chain is taken."""

RULE = (
    "At each measured batch size: of the head's draft lengths that are faster than plain decoding beyond chance (the 95 % "
    "interval lies above 1 and the ratio above the AR-against-AR null band, each as a geometric mean over the datasets and "
    "temperatures measured there) and slower beyond chance in none of them, the fastest; of those within "
    f"{TIE:.0%} of it the shortest; k = 0 when there is none. Batch sizes between two measured ones get the smaller k of the "
    "two, those that nothing was measured for k = 0."
)


@dataclass(frozen=True)
class Candidate:
    """One draft length at one batch size: speedup over plain decoding and its interval over all cells measured there."""

    arm: str
    draft_length: int
    ratio: float
    low: float
    high: float
    pays: bool
    why: str


@dataclass(frozen=True)
class Choice:
    """The draft length chosen for one measured batch size; `arm` is AR's name for k = 0."""

    batch_size: int
    draft_length: int
    arm: str
    candidates: list[Candidate]


@dataclass(frozen=True)
class Schedule:
    """Ranges [first, last, k] of running requests, without gaps from 1 to `max_num_seqs`, and the choices behind them."""

    ranges: list[tuple[int, int, int]]
    choices: list[Choice]
    max_num_seqs: int

    @property
    def pays(self) -> bool:
        """Whether anything is drafted anywhere; else plain decoding without a head is what to serve."""
        return any(length for _, _, length in self.ranges)

    def draft_length_at(self, batch_size: int) -> int:
        """k for this many requests, as vLLM reads the ranges."""
        return next((length for first, last, length in self.ranges if first <= batch_size <= last), self.ranges[-1][2])

    def speculative_config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's `speculative_config` of this schedule.

        Args:
            base: that of any fixed draft length of the same head. Its `num_speculative_tokens` becomes the longest of the
                schedule, which vLLM sizes its buffers by (at least 1, also where nothing is drafted).
        """
        longest = max(length for _, _, length in self.ranges)
        return dict(base) | {
            "num_speculative_tokens": max(1, longest),
            "num_speculative_tokens_per_batch_size": [list(each) for each in self.ranges],
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": RULE,
            "pays": self.pays,
            "max_num_seqs": self.max_num_seqs,
            "ranges": [list(each) for each in self.ranges],
            "choices": [
                {
                    "batch_size": choice.batch_size,
                    "draft_length": choice.draft_length,
                    "arm": choice.arm,
                    "candidates": [dict(vars(candidate)) for candidate in choice.candidates],
                }
                for choice in self.choices
            ],
        }


def choose_schedule(
    cells: Cells,
    arms: Mapping[str, ArmFacts],
    *,
    partners: Partners | None = None,
    max_num_seqs: int | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> Schedule:
    """Choose by `RULE` from measured cells.

    Args:
        cells: records of plain decoding and of the head at fixed draft lengths; other arms are ignored.
        arms: what the arms are. Arms with synthetic acceptance are ignored: their speed is no head's.
        partners: of side-by-side starts.
        max_num_seqs: of the server; None = the largest measured batch size.
        seed, draws: of the intervals.

    Raises:
        ValueError: there is no cell with plain decoding and a fixed draft length of a head.
    """
    heads = {name: facts for name, facts in arms.items() if facts.kind == "head" and not facts.synthetic}
    compared = _compare(cells, heads, partners=partners, seed=seed, draws=draws)
    if not compared:
        raise ValueError(
            "a schedule is chosen from plain decoding and a head's fixed draft lengths measured at the same batch sizes, and "
            "there are none; set score.draft_lengths, or score.schedule to false"
        )
    choices = [_choose(size, compared[size], heads=heads) for size in sorted(compared)]
    limit = max(choices[-1].batch_size, max_num_seqs or 0)
    lengths = {choice.batch_size: choice.draft_length for choice in choices}
    return Schedule(ranges_of(lengths, max_num_seqs=limit), choices, limit)


def ranges_of(lengths: Mapping[int, int], *, max_num_seqs: int) -> list[tuple[int, int, int]]:
    """[first, last, k] without gaps from 1 to `max_num_seqs`, from k at some batch sizes.

    A size between two known ones gets the smaller k of the two, one outside of them 0; neighbours of equal k are one
    range.
    """
    sizes = sorted(lengths)
    spans = [(1, sizes[0] - 1, 0)]
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        spans.append((size, size, lengths[size]))
        if following is not None:
            spans.append((size + 1, following - 1, min(lengths[size], lengths[following])))
    spans.append((sizes[-1] + 1, max_num_seqs, 0))
    merged: list[tuple[int, int, int]] = []
    for first, last, length in spans:
        if first > last:
            continue
        if merged and merged[-1][2] == length:
            merged[-1] = (merged[-1][0], last, length)
        else:
            merged.append((first, last, length))
    return merged


def _compare(
    cells: Cells, heads: Mapping[str, ArmFacts], *, partners: Partners | None, seed: int, draws: int
) -> dict[int, dict[CellKey, dict[str, Comparison]]]:
    """Batch size -> cell -> head arm -> its comparison with AR."""
    compared: dict[int, dict[CellKey, dict[str, Comparison]]] = {}
    for key, by_arm in cells.items():
        if AR not in by_arm or not any(arm in heads for arm in by_arm):
            continue
        group = {arm: starts for arm, starts in by_arm.items() if arm in (AR, AR_TWIN) or arm in heads}
        samples = {arm: take_sample(starts, metric="throughput") for arm, starts in group.items()}
        found = compare_samples({"throughput": samples}, partners=partners, seed=seed, draws=draws)
        compared.setdefault(key.batch_size, {})[key] = found
    return compared


def _choose(
    batch_size: int, compared: Mapping[CellKey, Mapping[str, Comparison]], *, heads: Mapping[str, ArmFacts]
) -> Choice:
    candidates = [
        _candidate(arm, facts.draft_length, {key: found[arm] for key, found in compared.items() if arm in found})
        for arm, facts in heads.items()
        if any(arm in found for found in compared.values())
    ]
    paying = [candidate for candidate in candidates if candidate.pays]
    best = max((candidate.ratio for candidate in paying), default=1.0)
    close = [candidate for candidate in paying if candidate.ratio * (1 + TIE) >= best]
    if not close:
        return Choice(batch_size, 0, AR, candidates)
    chosen = min(close, key=lambda candidate: candidate.draft_length)
    return Choice(batch_size, chosen.draft_length, chosen.arm, candidates)


def _candidate(arm: str, draft_length: int, compared: Mapping[CellKey, Comparison]) -> Candidate:
    intervals = [_throughput(each) for each in compared.values()]
    ratio = _mean([each.ratio for each in intervals])
    # Cells share their starts, so their errors go together: the mean of the ends, not an interval of the mean, is safe.
    low, high = _mean([each.low for each in intervals]), _mean([each.high for each in intervals])
    why = _why_not(ratio, low, compared)
    return Candidate(arm, draft_length, ratio, low, high, pays=why is None, why=why or "faster beyond chance")


def _why_not(ratio: float, low: float, compared: Mapping[CellKey, Comparison]) -> str | None:
    """Why a draft length is not chosen at a batch size; None when it pays."""
    bands = [each.null_band for each in compared.values()]
    if any(band is None for band in bands) or any(_throughput(each).indicative for each in compared.values()):
        return "nothing shows chance: one start per arm, or side by side no two pairs of AR and its twin"
    for key, each in compared.items():
        if is_slower(each):
            return f"slower on {key.dataset} at temperature {key.temperature:g}"
    if low <= 1:
        return "not faster beyond chance: the interval includes 1" if ratio >= 1 else "slower, or no difference"
    if ratio <= _mean([band[1] for band in bands if band is not None]):
        return "not faster beyond chance: inside the null band"
    return None


def is_slower(compared: Comparison) -> bool:
    """Whether an arm is slower than plain decoding beyond chance: interval below 1 and outside the null band."""
    interval, band = _throughput(compared), compared.null_band
    if interval.indicative or band is None:
        return False
    return interval.high < 1 and interval.ratio < band[0]


def _throughput(compared: Comparison) -> Any:
    interval = compared.intervals["throughput"]
    assert interval is not None, "every answer has a token, so throughput exists"
    return interval


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
