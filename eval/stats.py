"""Intervals for a ratio of throughputs: a bootstrap that resamples process starts and prompts.

The start of a process is a random effect (memory placement, threads): on two cores it alone made one of four
AR-against-AR pairs look "10 % faster". So starts are resampled, each arm's on its own; and prompts are resampled,
jointly in both arms, because both arms answer the same prompts and the difference between prompts is not noise of the
ratio.

With 2 starts per arm the interval is indicative only: two values cannot show the spread of starts, and a percentile
bootstrap over so few is too narrow. Verdicts therefore ask for 3 or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eyas.eval.latency import throughput, total_latency
from eyas.eval.records import CellRecord

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class RatioInterval:
    """A ratio and its percentile interval at `LEVEL`."""

    ratio: float
    low: float
    high: float


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def null_spread(cells: Sequence[CellRecord]) -> float | None:
    """AR against AR: fastest start over slowest start of the same cell (>= 1); None with fewer than two starts.

    A head whose ratio lies within [1 / spread, spread] differs no more from AR than AR differs from itself.
    """
    if len(cells) < 2:
        return None
    rates = [throughput(cell) for cell in cells]
    return max(rates) / min(rates)


def bootstrap_ratio(
    baseline: Sequence[CellRecord], treated: Sequence[CellRecord], *, seed: int, draws: int = DRAWS
) -> RatioInterval:
    """Throughput of `treated` over `baseline`: ratio of geometric means over starts, with a bootstrap interval.

    A closed loop's makespan cannot be resampled request by request, but the makespan equals the summed total latency of
    the requests over the mean number in flight. So the throughput of a resampled start is (resampled tokens) *
    (mean in flight) / (resampled latencies), which is exact for the sample itself.

    Args:
        baseline: one cell in every start of the baseline arm.
        treated: the same cell, with the same prompts, in every start of the other arm.
        seed: of the resampling.
        draws: number of resamples.
    """
    prompts = _common_prompts([*baseline, *treated])
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(prompts), [1 / len(prompts)] * len(prompts), size=draws).astype(float)
    difference = _resampled_log_rate(treated, prompts, weights, generator) - _resampled_log_rate(
        baseline, prompts, weights, generator
    )
    low, high = np.exp(np.percentile(difference, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]))
    ratio = geometric_mean([throughput(cell) for cell in treated]) / geometric_mean(
        [throughput(cell) for cell in baseline]
    )
    return RatioInterval(ratio, float(low), float(high))


def _common_prompts(cells: Sequence[CellRecord]) -> list[str]:
    names = [[request.prompt_id for request in cell.requests] for cell in cells]
    assert all(sorted(other) == sorted(names[0]) for other in names), "the starts of a cell serve the same prompts"
    return names[0]


def _resampled_log_rate(
    cells: Sequence[CellRecord], prompts: list[str], weights: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Log throughput of each draw: mean over resampled starts, each with the draw's prompt weights [draws, prompts]."""
    log_rates = []
    for cell in cells:
        by_prompt = {request.prompt_id: request for request in cell.requests}
        tokens = np.array([by_prompt[name].n_out for name in prompts], dtype=float)
        seconds = np.array([total_latency(by_prompt[name]) for name in prompts])
        in_flight = seconds.sum() / cell.makespan
        log_rates.append(np.log(in_flight * (weights @ tokens) / (weights @ seconds)))
    per_start = np.stack(log_rates)
    draws = weights.shape[0]
    chosen = generator.integers(len(cells), size=(len(cells), draws))
    return per_start[chosen, np.arange(draws)].mean(axis=0)
