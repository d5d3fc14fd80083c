"""The verdict of a cell, by written rules.

The rules (docs/evaluation.md): a speed-up is claimed only where nothing speaks against it, a cell that is slower
is called so, and everything else says what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.eval.comparison import Comparison, compare_arms, judge_quality
from eyas.eval.holm import holm
from eyas.eval.null import Band
from eyas.eval.records import AR, AR_TWIN, ArmFacts, CellKey, Cells, Phase
from eyas.eval.stats import DRAWS, LEVEL, Partners, RatioInterval

Word = Literal["SUPPORTED", "SLOWER", "INCONCLUSIVE", "NOT SUPPORTED"]
Direction = Literal["faster", "slower"]
LosslessPassed = bool | None | Callable[[str, float], bool | None]

MIN_STARTS = 3
MIN_PROMPTS = 12
"""Independent prompts of a cell: fewer speak for no set of prompts, however sharp the ratio over them is."""
ALPHA = round(1 - LEVEL, 6)
MAX_LOOP_SHARE = 0.1
MAX_RECONCILIATION = 0.01
RULES = (
    "NOT SUPPORTED, whatever was measured: the resolved configurations of the arms differ beyond what the speculative "
    "configuration forces, or acceptance was synthetic.",
    f"INCONCLUSIVE: either arm has fewer than {MIN_STARTS} starts (one pair of processes decides nothing), or the cell "
    f"has fewer independent prompts than it needs: {MIN_PROMPTS}, or more where the recipe asks for more. The turns of one "
    "conversation are one prompt.",
    "SLOWER: the ratio is below 1 beyond chance. Beyond chance means all of: the 95 % interval excludes 1, the p-value "
    "after Holm's correction over all cells and arms of the session, the schedule's among them, is at most "
    f"{ALPHA:.2g}, and the ratio lies outside the AR-against-AR null band.",
    "NOT SUPPORTED: the lossless check failed.",
    "SUPPORTED: the ratio is above 1 beyond chance, the lossless check passed, at most "
    f"{MAX_LOOP_SHARE:.0%} of the answers of either arm loop, and counters and token counts of the engine agree within "
    f"{MAX_RECONCILIATION:.0%}.",
    "INCONCLUSIVE: everything else, with the reason.",
)


@dataclass(frozen=True)
class Evidence:
    """What the rules look at in one cell of one arm.

    Attributes:
        interval: throughput of the arm over AR.
        p_holm: its p-value after Holm's correction.
        null_band: of AR against AR; None with a single AR start, or side by side without two pairs of AR and its twin.
        starts: the fewer of both arms.
        prompts, needed_prompts: independent prompts (conversations count once) of the cell, and how many it needs.
        loop_share: share of looping answers, the larger of both arms.
        reconciliation: relative gap between counters and token counts, the larger of both arms.
        lossless_passed: of the session; None when the check has not run or is undecided.
        synthetic: the engine made acceptance up.
        void: why the arms are not comparable; None when they are.
    """

    interval: RatioInterval
    p_holm: float
    null_band: Band | None
    starts: int
    prompts: int
    needed_prompts: int
    loop_share: float
    reconciliation: float
    lossless_passed: bool | None
    synthetic: bool
    void: str | None


@dataclass(frozen=True)
class Verdict:
    word: Word
    reason: str


def judge(evidence: Evidence) -> Verdict:
    """Apply `RULES` to one cell."""
    if evidence.void is not None:
        return Verdict("NOT SUPPORTED", f"the comparison is void: {evidence.void}")
    if evidence.synthetic:
        return Verdict("NOT SUPPORTED", "acceptance is synthetic; its speed says nothing about a head")
    too_few = _too_few(evidence)
    if too_few:
        return Verdict("INCONCLUSIVE", "; ".join(too_few))
    found = direction(evidence.interval, p_holm=evidence.p_holm, null_band=evidence.null_band)
    if found == "slower":
        return Verdict("SLOWER", f"slower beyond chance, over {evidence.starts} starts per arm")
    if evidence.lossless_passed is False:
        return Verdict("NOT SUPPORTED", "outputs differ from plain decoding: the lossless check failed")
    if found is None:
        return Verdict("INCONCLUSIVE", _why_undecided(evidence))
    missing = _missing(evidence)
    if missing:
        return Verdict("INCONCLUSIVE", "measured faster, but " + "; ".join(missing))
    return Verdict("SUPPORTED", f"faster beyond chance, over {evidence.starts} starts per arm")


def direction(interval: RatioInterval, *, p_holm: float, null_band: Band | None) -> Direction | None:
    """What the numbers alone say: "faster" or "slower" beyond chance, or None. The alarm that `calibration` counts."""
    if interval.indicative or null_band is None or p_holm > ALPHA:
        return None
    if interval.low > 1 and interval.ratio > null_band[1]:
        return "faster"
    if interval.high < 1 and interval.ratio < null_band[0]:
        return "slower"
    return None


def _too_few(evidence: Evidence) -> list[str]:
    reasons = []
    if evidence.starts < MIN_STARTS:
        plural = "" if evidence.starts == 1 else "s"
        reasons.append(f"indicative only: {evidence.starts} start{plural} per arm; a verdict needs {MIN_STARTS}")
    if evidence.prompts < evidence.needed_prompts:
        plural = "" if evidence.prompts == 1 else "s"
        reasons.append(
            f"{evidence.prompts} independent prompt{plural} of the {evidence.needed_prompts} this cell needs"
        )
    if evidence.interval.indicative and not reasons:
        reasons.append("indicative only: nothing shows how far starts or prompts scatter")
    return reasons


def _why_undecided(evidence: Evidence) -> str:
    interval, band = evidence.interval, evidence.null_band
    if interval.low <= 1 <= interval.high:
        return "the interval includes 1"
    if band is None:
        return "nothing shows how far AR differs from itself here, so there is no null band"
    if band[0] <= interval.ratio <= band[1]:
        return f"inside the null band: AR against AR gives {band[0]:.3f} to {band[1]:.3f} by chance"
    return f"not beyond chance among all cells of the session (p = {evidence.p_holm:.3f} after Holm's correction)"


def _missing(evidence: Evidence) -> list[str]:
    """What a faster cell lacks to be SUPPORTED."""
    reasons = []
    if evidence.lossless_passed is None:
        reasons.append("the lossless check did not run or is undecided")
    if evidence.loop_share > MAX_LOOP_SHARE:
        reasons.append(f"{evidence.loop_share:.0%} of the answers loop, which flatters acceptance")
    if evidence.reconciliation > MAX_RECONCILIATION:
        reasons.append(f"counters and token counts differ by {evidence.reconciliation:.1%}")
    return reasons


def best_arm(rates: Mapping[str, float]) -> str:
    """The arm with the highest throughput; plain decoding wins a tie, since it needs no head."""
    return max(rates, key=lambda arm: (rates[arm], arm == AR))


def session_verdicts(
    phases: Mapping[Phase, tuple[Cells, Partners | None]],
    *,
    arms: Mapping[str, ArmFacts],
    lossless_passed: LosslessPassed,
    configs_void: Mapping[str, str],
    min_requests: Mapping[CellKey, int],
    seed: int,
    draws: int = DRAWS,
) -> list[dict[str, Any]]:
    """Every arm against AR in every cell that both have, cell by cell, arms in the order of `arms`.

    An arm is compared with the AR starts that alternated with it: the schedule within its phase, every other arm within
    the grid. All rows together are one family of tests. AR's twin has no row; its pairs are the null band.

    Args:
        phases: the records of each phase, and `partners_of` its starts (None where engines ran one at a time).
        arms: what each arm is.
        lossless_passed: outcome of the lossless check, one for all or by arm and temperature; None when it has not run.
        configs_void: arm -> why its comparison with AR is void.
        min_requests: independent prompts that the recipe asks of a cell; it needs `MIN_PROMPTS` at least.
        seed, draws: of the bootstrap.
    """
    places: list[tuple[Phase, CellKey, str, Comparison]] = [
        (phase, key, arm, comparison)
        for phase, (cells, partners) in phases.items()
        for key, arm, comparison in _judged(phase, cells, arms=arms, partners=partners, seed=seed, draws=draws)
    ]
    corrected = holm([_throughput(comparison).p_value for _, _, _, comparison in places])
    rows = []
    for (phase, key, arm, comparison), p_holm in zip(places, corrected, strict=True):
        group = phases[phase][0][key]
        own, baseline = judge_quality(group[arm]), judge_quality(group[AR])
        evidence = Evidence(
            interval=_throughput(comparison),
            p_holm=p_holm,
            null_band=comparison.null_band,
            starts=comparison.starts,
            prompts=comparison.prompts,
            needed_prompts=max(MIN_PROMPTS, min_requests.get(key, 0)),
            loop_share=max(own.loop_share, baseline.loop_share),
            reconciliation=max(own.reconciliation, baseline.reconciliation),
            lossless_passed=lossless_passed(arm, key.temperature) if callable(lossless_passed) else lossless_passed,
            synthetic=arms[arm].synthetic,
            void=configs_void.get(arm),
        )
        place = {**key._asdict(), "phase": phase, "arm": arm}
        rows.append(_row(place, facts=arms[arm], comparison=comparison, evidence=evidence, requests=own.requests))
    return rows


def _judged(
    phase: Phase, cells: Cells, *, arms: Mapping[str, ArmFacts], partners: Partners | None, seed: int, draws: int
) -> Iterator[tuple[CellKey, str, Comparison]]:
    """The comparisons of a phase that have a row."""
    for key, group in cells.items():
        if AR not in group:
            continue
        compared = compare_arms(group, partners=partners, seed=seed, draws=draws)
        for arm, facts in arms.items():
            if arm in compared and arm != AR_TWIN and (facts.kind == "schedule") == (phase == "schedule"):
                yield key, arm, compared[arm]


def _throughput(comparison: Comparison) -> RatioInterval:
    interval = comparison.intervals["throughput"]
    assert interval is not None, "every answer has a token, so throughput exists"
    return interval


def _row(
    place: Mapping[str, Any], *, facts: ArmFacts, comparison: Comparison, evidence: Evidence, requests: int
) -> dict[str, Any]:
    verdict, interval, band = judge(evidence), evidence.interval, evidence.null_band
    return {
        **place,
        "kind": facts.kind,
        "draft_length": facts.draft_length,
        "requests": requests,
        "prompts": evidence.prompts,
        "needed_prompts": evidence.needed_prompts,
        "starts": evidence.starts,
        "ar_tokens_per_second": comparison.rates[0],
        "tokens_per_second": comparison.rates[1],
        "ratio": interval.ratio,
        "interval": [interval.low, interval.high],
        "p_value": interval.p_value,
        "p_holm": evidence.p_holm,
        "standard_error": interval.standard_error,
        "degrees_of_freedom": interval.degrees_of_freedom,
        "indicative": interval.indicative,
        "null_band": None if band is None else list(band),
        "tpot_ratio": _ratio(comparison.intervals["tpot"]),
        "e2e_ratio": _ratio(comparison.intervals["e2e"]),
        "ttft_ratio": _ratio(comparison.intervals["ttft"]),
        "loop_share": evidence.loop_share,
        "reconciliation": evidence.reconciliation,
        "direction": direction(interval, p_holm=evidence.p_holm, null_band=band),
        "verdict": verdict.word,
        "reason": verdict.reason,
    }


def _ratio(interval: RatioInterval | None) -> dict[str, Any] | None:
    """A latency ratio: below 1 is faster. It is described and not tested."""
    return None if interval is None else {"ratio": interval.ratio, "interval": [interval.low, interval.high]}
