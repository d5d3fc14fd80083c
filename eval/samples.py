"""One metric of one cell in one arm as arrays, from the records: what the statistics resample.

Every metric is a ratio of two sums over prompts, so that its value under any weights of the prompts is one division:

    throughput  in flight * sum(output tokens) / sum(total latency)
    tpot        sum(TPOT) / number of answers with two tokens or more
    e2e, ttft   sum(latency) / number of answers

A closed loop's makespan cannot be resampled prompt by prompt, but it equals the summed total latency of the requests
over the mean number in flight, so the first line is exact for the sample itself. The turns of one conversation count as
one prompt: they share a history, and so they are no independent witnesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eyas.eval.latency import time_per_output_token, time_to_first_token, total_latency
from eyas.eval.records import Blocks, CellRecord, RequestRecord

Metric = Literal["throughput", "tpot", "e2e", "ttft"]
METRICS: tuple[Metric, ...] = get_args(Metric)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One metric of one cell in all starts of an arm, one row per block of a start.

    Attributes:
        prompts: the P prompts (or conversations), sorted.
        start_of_row: [R] which start a row belongs to, 0, 1, ... without gaps.
        numerator, denominator: [R, P] what each prompt adds to the two sums.
        offset: [R] log of the factor before the sums (log of the mean number in flight, or 0).
    """

    prompts: tuple[str, ...]
    start_of_row: NDArray[np.int64]
    numerator: Floats
    denominator: Floats
    offset: Floats

    @property
    def starts(self) -> int:
        return int(self.start_of_row[-1]) + 1

    @property
    def blocks_of_start(self) -> Floats:
        """[S] number of blocks."""
        return np.bincount(self.start_of_row).astype(float)

    @property
    def measurable(self) -> bool:
        """False where the metric does not exist, such as TPOT of answers of one token."""
        return bool((self.numerator.sum(axis=1) > 0).all() and (self.denominator.sum(axis=1) > 0).all())

    def log_values(self) -> Floats:
        """[R] log of the metric in each block."""
        return self.offset + np.log(self.numerator.sum(axis=1)) - np.log(self.denominator.sum(axis=1))

    def start_means(self) -> Floats:
        """[S] mean over blocks of the log of the metric."""
        return np.bincount(self.start_of_row, self.log_values()) / self.blocks_of_start

    def influence(self) -> Floats:
        """[S, P] by how much a start's mean moves per unit of weight on a prompt; each row sums to 0."""
        rows = self.numerator / self.numerator.sum(axis=1, keepdims=True)
        rows = rows - self.denominator / self.denominator.sum(axis=1, keepdims=True)
        return self._block_weights() @ rows

    def weighted(self, weights: Floats) -> Floats:
        """[D] mean over starts of the log of the metric, for each of D weightings [D, P] of the prompts."""
        logs = self.offset + np.log(weights @ self.numerator.T) - np.log(weights @ self.denominator.T)
        return logs @ self._block_weights().mean(axis=0)

    def select(self, starts: Sequence[int]) -> Sample:
        """The same with these starts only, in this order (a start may come twice)."""
        rows = [np.flatnonzero(self.start_of_row == start) for start in starts]
        chosen = np.concatenate(rows)
        numbers = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        return Sample(self.prompts, numbers, self.numerator[chosen], self.denominator[chosen], self.offset[chosen])

    def exchanged(self, other: Sample, starts: Mapping[int, int]) -> Sample:
        """The same with some starts (by number) in the place of which a start of `other` (its number there) is put."""
        rows = [
            other.select([starts[start]]) if start in starts else self.select([start]) for start in range(self.starts)
        ]
        return Sample(
            self.prompts,
            np.repeat(np.arange(len(rows)), [len(each.start_of_row) for each in rows]),
            np.concatenate([each.numerator for each in rows]),
            np.concatenate([each.denominator for each in rows]),
            np.concatenate([each.offset for each in rows]),
        )

    def slowed(self, log_factor: float) -> Sample:
        """The same with every log value moved by `log_factor`: a known difference, to see whether it is found."""
        return Sample(self.prompts, self.start_of_row, self.numerator, self.denominator, self.offset + log_factor)

    def _block_weights(self) -> Floats:
        """[S, R] the matrix that takes the mean over the blocks of each start."""
        own = self.start_of_row == np.arange(self.starts)[:, None]
        return own / self.blocks_of_start[:, None]


def take_sample(starts: Sequence[Blocks], *, metric: Metric) -> Sample:
    """Arrays of one metric.

    Args:
        starts: the blocks of one cell in every start of one arm.
        metric: which.
    """
    assert starts and all(starts), "an arm in a cell has a start, and a start has a block"
    blocks = [block for start in starts for block in start]
    prompts = tuple(sorted({request.unit for request in blocks[0].requests}))
    sums = [_sums(block, prompts, metric=metric) for block in blocks]
    return Sample(
        prompts=prompts,
        start_of_row=np.repeat(np.arange(len(starts)), [len(start) for start in starts]),
        numerator=np.array([above for above, _ in sums]),
        denominator=np.array([below for _, below in sums]),
        offset=np.array([_offset(block, metric=metric) for block in blocks]),
    )


def _sums(block: CellRecord, prompts: Sequence[str], *, metric: Metric) -> tuple[list[float], list[float]]:
    above, below = dict.fromkeys(prompts, 0.0), dict.fromkeys(prompts, 0.0)
    units = {request.unit for request in block.requests}
    assert units == set(prompts), "all starts and blocks of a cell serve the same prompts"
    for request in block.requests:
        numerator, denominator = _share(request, metric=metric)
        above[request.unit] += numerator
        below[request.unit] += denominator
    return list(above.values()), list(below.values())


def _share(request: RequestRecord, *, metric: Metric) -> tuple[float, float]:
    if metric == "throughput":
        return float(request.n_out), total_latency(request)
    if metric == "tpot":
        seconds = time_per_output_token(request)
        return (0.0, 0.0) if seconds is None else (seconds, 1.0)
    return (total_latency(request) if metric == "e2e" else time_to_first_token(request)), 1.0


def _offset(block: CellRecord, *, metric: Metric) -> float:
    if metric != "throughput":
        return 0.0
    return math.log(sum(total_latency(request) for request in block.requests) / block.makespan)
