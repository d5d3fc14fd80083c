"""Every arm of a cell against AR: intervals of the four ratios, the null band, and what else the verdict looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eyas.eval.acceptance.loops import is_loop
from eyas.eval.acceptance.reconcile import reconcile, reconcile_counters
from eyas.eval.null import Band, band_beside
from eyas.eval.records import Blocks, CellRecord
from eyas.eval.samples import METRICS, Metric, Sample, take_sample
from eyas.eval.stats import DRAWS, Partners, Pool, RatioInterval, compare, compared_arms, pool_of, sides


@dataclass(frozen=True)
class Comparison:
    """One arm against AR in one cell.

    Attributes:
        intervals: per metric, arm over AR; None where the metric does not exist (TPOT of one-token answers).
        null_band: of the throughput of AR against AR.
        rates: throughput of AR and of the arm, tokens per second, geometric mean over starts.
        starts: the fewer of both arms.
        prompts: independent prompts (conversations count once).
    """

    intervals: Mapping[Metric, RatioInterval | None]
    null_band: Band | None
    rates: tuple[float, float]
    starts: int
    prompts: int


def compare_arms(
    arms: Mapping[str, Sequence[Blocks]], *, partners: Partners | None, seed: int, draws: int = DRAWS
) -> dict[str, Comparison]:
    """All arms of one cell against its AR arm.

    Args:
        arms: arm -> starts -> blocks of the cell; AR among them.
        partners: which AR start ran beside which start; None where engines ran one at a time. Arms without a pair are
            left out.
        seed: of the resampling.
        draws: resamples of each interval.
    """
    samples: dict[Metric, dict[str, Sample]] = {
        metric: {arm: take_sample(starts, metric=metric) for arm, starts in arms.items()} for metric in METRICS
    }
    return compare_samples(samples, partners=partners, seed=seed, draws=draws)


def compare_samples(
    samples: Mapping[Metric, Mapping[str, Sample]], *, partners: Partners | None, seed: int, draws: int = DRAWS
) -> dict[str, Comparison]:
    """`compare_arms` from arrays; metrics that are left out are left out of the answer."""
    pools = {metric: pool_of(own, partners=partners) for metric, own in samples.items() if _measurable(own)}
    compared: dict[str, Comparison] = {}
    for arm in compared_arms(samples["throughput"], partners=partners):
        baseline, treated = sides(samples["throughput"], arm, partners=partners)
        intervals: dict[Metric, RatioInterval | None] = {
            metric: _interval(own, arm, pool=pools.get(metric), partners=partners, seed=seed, draws=draws)
            for metric, own in samples.items()
        }
        compared[arm] = Comparison(
            intervals=intervals,
            null_band=band_beside(samples["throughput"], arm, pool=pools["throughput"], partners=partners),
            rates=(_mean_rate(baseline), _mean_rate(treated)),
            starts=min(baseline.starts, treated.starts),
            prompts=len(baseline.prompts),
        )
    return compared


def _measurable(samples: Mapping[str, Sample]) -> bool:
    return all(sample.measurable for sample in samples.values())


def _interval(
    samples: Mapping[str, Sample], arm: str, *, pool: Pool | None, partners: Partners | None, seed: int, draws: int
) -> RatioInterval | None:
    if pool is None:
        return None
    baseline, treated = sides(samples, arm, partners=partners)
    return compare(baseline, treated, pool=pool, paired=partners is not None, seed=seed, draws=draws)


def _mean_rate(sample: Sample) -> float:
    return float(np.exp(sample.start_means().mean()))


@dataclass(frozen=True)
class Quality:
    """Of one arm in one cell: answers of a block, share of looping ones, and how far counters and tokens disagree.

    `reconciliation` is the largest relative gap of any block: tokens that no step explains, or the engine's counters
    against the sums over its answers. An engine that counts drafts and tells no answer about them has a gap of 1.
    """

    requests: int
    loop_share: float
    reconciliation: float


def judge_quality(starts: Sequence[Blocks]) -> Quality:
    """What the verdict asks of the records besides speed."""
    blocks = [block for start in starts for block in start]
    flags = [is_loop(request) for block in blocks for request in block.requests]
    return Quality(
        requests=len(blocks[0].requests),
        loop_share=sum(flags) / len(flags),
        reconciliation=max(_gap(block) for block in blocks),
    )


def _gap(block: CellRecord) -> float:
    gap = max(row["share"] for row in reconcile_counters(block.requests, block.counters))
    if all(request.per_step_accepted is None for request in block.requests):
        return gap  # plain decoding, or a method that found nothing to draft: no step is counted that explains a token
    return max(gap, reconcile(block.requests)["unexplained_share"])
