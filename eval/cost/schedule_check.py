"""Does the measured schedule keep its promise? Not slower than plain decoding, and hardly slower than the best fixed k.

The schedule and the arms it is held against must have run in the same phase, alternating: a machine drifts by more in an
hour than the 3 % that are asked about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eyas.eval.comparison import compare_samples
from eyas.eval.cost.schedule import is_slower
from eyas.eval.records import AR, ArmFacts, CellKey, Cells
from eyas.eval.samples import Sample, take_sample
from eyas.eval.stats import DRAWS, Partners, RatioInterval, compare, pool_of

Outcome = Literal["yes", "no", "not resolved"]

ALLOWED_LOSS = 0.03
RULES = (
    "not slower than plain decoding: the schedule's interval over AR does not lie below 1, or its ratio is inside the "
    "AR-against-AR null band",
    f"not slower than the best fixed draft length by more than {ALLOWED_LOSS:.0%}: its ratio to the fastest arm (plain "
    f"decoding included) is at least {1 - ALLOWED_LOSS:.2f}; 'no' when the whole interval lies below that, 'not resolved' "
    "when only the ratio does. The fastest arm is the best of several noisy ones, so the ratio is a little too small",
)


def schedule_rows(
    cells: Cells,
    arms: Mapping[str, ArmFacts],
    *,
    partners: Partners | None = None,
    seed: int,
    draws: int = DRAWS,
) -> list[dict[str, Any]]:
    """Per cell with a schedule arm and AR: both rules, with ratios, intervals and the null band.

    Args:
        cells: of one phase, in which the schedule, AR and fixed draft lengths alternated.
        partners: of side-by-side starts; the schedule then stands beside AR starts of its own only.
    """
    schedules = [name for name, facts in arms.items() if facts.kind == "schedule"]
    rows = []
    for key, by_arm in cells.items():
        for name in schedules:
            if name in by_arm and AR in by_arm:
                fixed = [arm for arm in by_arm if arm == AR or arms[arm].kind == "head"]
                samples = {arm: take_sample(by_arm[arm], metric="throughput") for arm in [*fixed, name]}
                rows.append(_row(key, name, samples, partners=partners, seed=seed, draws=draws))
    return rows


def passed(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """True when every cell keeps both promises, False when one breaks one, None when one is not resolved or none is there."""
    outcomes = [row[rule] for row in rows for rule in ("not_slower_than_ar", "within_best_fixed")]
    if "no" in outcomes:
        return False
    return None if not outcomes or "not resolved" in outcomes else True


def _row(
    key: CellKey, name: str, samples: Mapping[str, Sample], *, partners: Partners | None, seed: int, draws: int
) -> dict[str, Any]:
    against_ar = compare_samples({"throughput": samples}, partners=partners, seed=seed, draws=draws)[name]
    interval = against_ar.intervals["throughput"]
    assert interval is not None, "every answer has a token, so throughput exists"
    best = max((arm for arm in samples if arm != name), key=lambda arm: (_rate(samples[arm]), arm == AR))
    loss = interval
    if best != AR:
        loss = compare(samples[best], samples[name], pool=pool_of(samples), seed=seed, draws=draws)
    return {
        **key._asdict(),
        "arm": name,
        "starts": against_ar.starts,
        "ar_tokens_per_second": against_ar.rates[0],
        "tokens_per_second": against_ar.rates[1],
        "ratio": interval.ratio,
        "interval": [interval.low, interval.high],
        "null_band": None if against_ar.null_band is None else list(against_ar.null_band),
        "not_slower_than_ar": _not_slower(interval, slower=is_slower(against_ar)),
        "best_fixed_arm": best,
        "ratio_to_best_fixed": loss.ratio,
        "ratio_to_best_fixed_interval": [loss.low, loss.high],
        "within_best_fixed": _within(loss),
    }


def _rate(sample: Sample) -> float:
    return float(sample.start_means().mean())


def _not_slower(interval: RatioInterval, *, slower: bool) -> Outcome:
    if interval.indicative and interval.ratio < 1:
        return "not resolved"
    return "no" if slower else "yes"


def _within(loss: RatioInterval) -> Outcome:
    limit = 1 - ALLOWED_LOSS
    if loss.ratio >= limit:
        return "yes"
    return "no" if loss.high < limit and not loss.indicative else "not resolved"
