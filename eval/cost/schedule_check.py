"""Does the measured schedule keep its promise? Not slower than plain decoding, and hardly slower than the best fixed k.

The schedule and the arms it is held against must have run in the same phase, alternating: a machine drifts by more in an
hour than the 3 % that are asked about. A draft length that is missing there (it was the fastest nowhere in the grid, or its
starts failed) is known from the grid alone: where it could have been the better choice, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eyas.eval.comparison import Comparison, compare_samples
from eyas.eval.cost.fixed_lengths import Ratios
from eyas.eval.cost.schedule import is_slower
from eyas.eval.records import AR, AR_TWIN, ArmFacts, CellKey, Cells
from eyas.eval.samples import Sample, take_sample
from eyas.eval.stats import DRAWS, Partners, RatioInterval, compare, pool_of
from eyas.eval.verdict import MIN_STARTS

Outcome = Literal["yes", "no", "not resolved"]

ALLOWED_LOSS = 0.03
RULES = (
    "not slower than plain decoding: 'no' when the schedule's interval over AR lies below 1 and its ratio below the "
    "AR-against-AR null band, 'not resolved' when only its ratio lies below the band, when there is no band, or with fewer "
    f"than {MIN_STARTS} starts of either; else 'yes'",
    f"not slower than the best fixed draft length by more than {ALLOWED_LOSS:.0%}: its ratio to the fastest arm that alternated "
    "with it (plain decoding, every k that the schedule chose, every k that was the fastest of some cell in the grid) is at "
    f"least {1 - ALLOWED_LOSS:.2f}; 'no' when the whole interval lies below that; 'not resolved' when only the ratio does, with "
    f"fewer than {MIN_STARTS} starts of either, and when a draft length that did not run beside it would exceed the limit at "
    "its ratio in the grid. The fastest arm is the best of several noisy ones, so the ratio is a little too small",
)


def schedule_rows(
    cells: Cells,
    arms: Mapping[str, ArmFacts],
    *,
    grid: Ratios,
    partners: Partners | None = None,
    seed: int,
    draws: int = DRAWS,
) -> list[dict[str, Any]]:
    """Per cell with a schedule arm and AR: both rules, with ratios, intervals and the null band.

    Args:
        cells: of one phase, in which the schedule, AR and fixed draft lengths alternated.
        arms: what the arms are.
        grid: ratios to plain decoding of the head's fixed draft lengths in the grid.
        partners: of side-by-side starts; the schedule then stands beside AR starts of its own only.
        seed, draws: of the intervals.
    """
    schedules = [name for name, facts in arms.items() if facts.kind == "schedule"]
    rows = []
    for key, by_arm in cells.items():
        for name in schedules:
            if name in by_arm and AR in by_arm and (partners is None or name in partners):
                # The twin is plain decoding beside plain decoding: the null band comes from it, but nobody serves it.
                fixed = [arm for arm in by_arm if arm in (AR, AR_TWIN) or arms[arm].kind == "head"]
                samples = {arm: take_sample(by_arm[arm], metric="throughput") for arm in [*fixed, name]}
                absent = {arm: ratio for arm, ratio in grid.get(key, {}).items() if arm not in by_arm}
                rows.append(_row(key, name, samples, absent=absent, partners=partners, seed=seed, draws=draws))
    return rows


def passed(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """True when every cell keeps both promises, False when one breaks one, None when one is not resolved or none is there."""
    outcomes = [row[rule] for row in rows for rule in ("not_slower_than_ar", "within_best_fixed")]
    if "no" in outcomes:
        return False
    return None if not outcomes or "not resolved" in outcomes else True


def _row(
    key: CellKey,
    name: str,
    samples: Mapping[str, Sample],
    *,
    absent: Mapping[str, float],
    partners: Partners | None,
    seed: int,
    draws: int,
) -> dict[str, Any]:
    against_ar = compare_samples({"throughput": samples}, partners=partners, seed=seed, draws=draws)[name]
    interval = against_ar.intervals["throughput"]
    assert interval is not None, "every answer has a token, so throughput exists"
    best = max((arm for arm in samples if arm not in (name, AR_TWIN)), key=lambda arm: (_rate(samples[arm]), arm == AR))
    loss = interval
    if best != AR:
        loss = compare(samples[best], samples[name], pool=pool_of(samples), seed=seed, draws=draws)
    better = sorted(arm for arm, ratio in absent.items() if interval.ratio / ratio < 1 - ALLOWED_LOSS)
    starts = min(samples[best].starts, samples[name].starts)
    return {
        **key._asdict(),
        "arm": name,
        "starts": against_ar.starts,
        "ar_tokens_per_second": against_ar.rates[0],
        "tokens_per_second": against_ar.rates[1],
        "ratio": interval.ratio,
        "interval": [interval.low, interval.high],
        "null_band": None if against_ar.null_band is None else list(against_ar.null_band),
        "not_slower_than_ar": _not_slower(against_ar, interval),
        "best_fixed_arm": best,
        "ratio_to_best_fixed": loss.ratio,
        "ratio_to_best_fixed_interval": [loss.low, loss.high],
        "absent_and_better": better,
        "within_best_fixed": _within(loss, starts=starts, resolved=not better),
    }


def _rate(sample: Sample) -> float:
    return float(sample.start_means().mean())


def _not_slower(compared: Comparison, interval: RatioInterval) -> Outcome:
    if compared.starts < MIN_STARTS or compared.null_band is None:
        return "not resolved"
    if is_slower(compared):
        return "no"
    return "not resolved" if interval.ratio < compared.null_band[0] and interval.high >= 1 else "yes"


def _within(loss: RatioInterval, *, starts: int, resolved: bool) -> Outcome:
    """`resolved`: no arm that did not run beside the schedule could be the better one."""
    limit = 1 - ALLOWED_LOSS
    if starts < MIN_STARTS or loss.indicative:
        return "not resolved"
    if loss.high < limit:
        return "no"
    return "yes" if resolved and loss.ratio >= limit else "not resolved"
