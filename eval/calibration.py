"""Does chance alone make verdicts? Plain decoding against plain decoding, judged as a head would be.

Two ways, both printed:

- the records of a real session: the AR starts of every cell are split into two groups, one plays another arm, and the
  session is judged by the same intervals, null bands and Holm correction. Nothing true can be called, so each split is a
  session without a difference, and the share of sessions that call one is what the rules state a rate for. The same
  groups with one slowed by a known factor must be found, and the intervals must hold 1. Controls (plain decoding as an
  arm of its own, as it is or slowed by a known share in the engine) are compared with AR as they stand. Side by side, AR
  and its twin trade places in some of their pairs;
- sessions made up with the noise that was measured, where the truth is known (`made_up`).

`python -m eyas.eval.calibration SCORE_DIR` prints both; `python -m eyas.eval.calibration --table` prints the table of
coverage of docs/evaluation.md.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.eval.calibration_outcome import outcome
from eyas.eval.distributions import rate_interval
from eyas.eval.holm import holm
from eyas.eval.made_up import TESTS, simulate_like
from eyas.eval.null import Band, band_beside, null_band
from eyas.eval.records import AR, AR_TWIN, ArmFacts, CellKey, Cells
from eyas.eval.samples import Sample, take_sample
from eyas.eval.stats import DRAWS, LEVEL, Partners, RatioInterval, compare, geometric_mean, moved, pool_of, sides
from eyas.eval.verdict import ALPHA, Direction, direction

MIN_SPLIT_STARTS = 4
MAX_SPLITS = 10
SLOW_DOWNS = (1.05, 1.1, 1.2, 1.5)

Samples = Mapping[str, Sample]


@dataclass(frozen=True)
class _Test:
    """One AR-against-AR comparison of one cell."""

    interval: RatioInterval
    band: Band | None


def calibrate(
    cells: Cells,
    *,
    arms: Mapping[str, ArmFacts],
    partners: Partners | None = None,
    slow: Collection[str] = (),
    seed: int,
    draws: int = DRAWS,
    simulated_tests: int = TESTS,
) -> dict[str, Any] | None:
    """The calibration of one session; None when nothing can be said (no cell with two starts of an arm).

    Args:
        cells: the records.
        arms: what each arm is.
        partners: which AR start ran beside which start; None where engines ran one at a time.
        slow: arms that are known to be slow beside those that were slowed in the engine.
        seed, draws: of the bootstrap and of what is made up.
        simulated_tests: comparisons in each of the two made-up series.

    Returns:
        stated_rate: share of sessions without a difference that may call one.
        records: from the AR starts of this session, or None with fewer than four of them and no control.
        slowed: the controls that are known to be slow, and whether they were found.
        simulated: made-up sessions with this session's design and noise, or None.
        passed, failed, lacking: see `outcome`.
    """
    samples = {
        key: {arm: take_sample(starts, metric="throughput") for arm, starts in group.items()}
        for key, group in cells.items()
        if AR in group
    }
    sessions = [
        tests for tests in _null_sessions(samples, arms=arms, partners=partners, seed=seed, draws=draws) if tests
    ]
    records = _summarise(sessions, cells=len(samples)) if sessions else None
    simulated = simulate_like(samples, partners=partners, seed=seed, tests=simulated_tests)
    if records is None and simulated is None:
        return None
    slowed = [
        known_slow(samples, arm, partners=partners, seed=seed, draws=draws) | {"slowed_by": facts.slowed_by}
        for arm, facts in arms.items()
        if facts.slowed_by or arm in slow
    ]
    found = {"level": LEVEL, "stated_rate": ALPHA, "records": records, "slowed": slowed, "simulated": simulated}
    return found | outcome(records, slowed=slowed, simulated=simulated)


def _null_sessions(
    samples: Mapping[CellKey, Samples],
    *,
    arms: Mapping[str, ArmFacts],
    partners: Partners | None,
    seed: int,
    draws: int,
) -> Iterator[list[_Test]]:
    """Sessions in which no difference is true: one per twin of AR, and one per split of the AR starts or of the pairs."""
    twins = [arm for arm, facts in arms.items() if _is_plain(arm, facts) and not facts.slowed_by]
    for twin in twins:
        yield _control_tests(samples, twin, partners=partners, seed=seed, draws=draws)
    if partners is not None:
        for swapped in swaps(len(partners.get(AR_TWIN, ())), seed=seed):
            yield [
                _swap_test(own, swapped, partners=partners, seed=seed, draws=draws)
                for own in samples.values()
                if AR_TWIN in own
            ]
        return
    fewest = min((own[AR].starts for own in samples.values()), default=0)
    for group in splits(fewest, seed=seed):
        yield [_split_test(own, group, seed=seed, draws=draws) for own in samples.values()]


def _is_plain(arm: str, facts: ArmFacts) -> bool:
    """A control: plain decoding under another name than AR."""
    return arm != AR and facts.speculative_config is None


def splits(starts: int, *, seed: int) -> list[tuple[int, ...]]:
    """Ways to put half of the AR starts aside, at most `MAX_SPLITS`, each pair of groups once; none below four starts."""
    if starts < MIN_SPLIT_STARTS:
        return []
    ways = list(itertools.combinations(range(starts), starts // 2))
    if starts % 2 == 0:
        ways = [way for way in ways if 0 in way]
    return _some(ways, seed=seed)


def swaps(pairs: int, *, seed: int) -> list[tuple[int, ...]]:
    """Ways to let two equal engines trade places in some of their pairs; the first pair stays, and not all others do."""
    if pairs < MIN_SPLIT_STARTS:
        return []
    others = range(1, pairs)
    return _some([way for size in others for way in itertools.combinations(others, size)], seed=seed)


def _some(ways: list[tuple[int, ...]], *, seed: int) -> list[tuple[int, ...]]:
    if len(ways) <= MAX_SPLITS:
        return ways
    chosen = np.random.default_rng(seed).choice(len(ways), MAX_SPLITS, replace=False)
    return [ways[index] for index in sorted(chosen)]


def _split_test(samples: Samples, group: Sequence[int], *, seed: int, draws: int) -> _Test:
    """One half of the AR starts against the other; the arms that were measured beside them widen the pool as ever."""
    ar = samples[AR]
    rest = [start for start in range(ar.starts) if start not in group]
    baseline, treated = ar.select(rest), ar.select(group)
    others = {arm: sample for arm, sample in samples.items() if arm != AR}
    pool = pool_of({**others, AR: baseline, "the other half": treated})
    interval = compare(baseline, treated, pool=pool, seed=seed, draws=draws)
    return _Test(interval, null_band(baseline, pool=pool, treated_starts=treated.starts))


def _swap_test(samples: Samples, swapped: Sequence[int], *, partners: Partners, seed: int, draws: int) -> _Test:
    """AR and its twin, with their names exchanged in the pairs `swapped`."""
    pairs = [partners[AR_TWIN][index] for index in swapped]
    ar, twin = samples[AR], samples[AR_TWIN]
    traded = {
        **samples,
        AR: ar.exchanged(twin, dict(pairs)),
        AR_TWIN: twin.exchanged(ar, {other: own for own, other in pairs}),
    }
    return _control_test(traded, AR_TWIN, partners=partners, seed=seed, draws=draws)


def _control_tests(
    samples: Mapping[CellKey, Samples], control: str, *, partners: Partners | None, seed: int, draws: int
) -> list[_Test]:
    """An arm of its own against AR, in every cell that has both."""
    if partners is not None and control not in partners:
        return []
    return [
        _control_test(own, control, partners=partners, seed=seed, draws=draws)
        for own in samples.values()
        if control in own
    ]


def _control_test(samples: Samples, control: str, *, partners: Partners | None, seed: int, draws: int) -> _Test:
    pool = pool_of(samples, partners=partners)
    baseline, treated = sides(samples, control, partners=partners)
    interval = compare(baseline, treated, pool=pool, paired=partners is not None, seed=seed, draws=draws)
    return _Test(interval, band_beside(samples, control, pool=pool, partners=partners))


def _calls(session: Sequence[_Test], *, log_factor: float = 0.0) -> list[Direction | None]:
    """What a session calls its tests, after Holm's correction, when the treated arm moves by `log_factor`."""
    intervals = [moved(test.interval, log_factor=log_factor) for test in session]
    corrected = holm([interval.p_value for interval in intervals])
    return [
        direction(interval, p_holm=p_holm, null_band=test.band)
        for test, interval, p_holm in zip(session, intervals, corrected, strict=True)
    ]


def _summarise(sessions: Sequence[Sequence[_Test]], *, cells: int) -> dict[str, Any]:
    """Rates over all sessions.

    `alarms` is the number of sessions that call anything, and `session_rate` their share. Splits share their starts, so
    the interval of the rate is a little too narrow. Tests of one session are no independent ones either: `called` and
    `coverage` are shares of tests, their intervals count cells.
    """
    tests = [test for session in sessions for test in session]
    calls = [_calls(session) for session in sessions]
    alarms = sum(any(session) for session in calls)
    called = sum(call is not None for session in calls for call in session) / len(tests)
    covered = sum(test.interval.low <= 1 <= test.interval.high for test in tests) / len(tests)
    return {
        "cells": cells,
        "sessions": len(sessions),
        "tests": len(tests),
        "alarms": alarms,
        "session_rate": alarms / len(sessions),
        "session_rate_interval": list(rate_interval(alarms, len(sessions), level=LEVEL)),
        "called": called,
        "called_interval": list(rate_interval(called * cells, cells, level=LEVEL)),
        "coverage": covered,
        "coverage_interval": list(rate_interval(covered * cells, cells, level=LEVEL)),
        "detection": [_detection(sessions, factor=factor) for factor in SLOW_DOWNS],
    }


def _detection(sessions: Sequence[Sequence[_Test]], *, factor: float) -> dict[str, float]:
    calls = [call for session in sessions for call in _calls(session, log_factor=-math.log(factor))]
    return {"slow_down": factor, "found": sum(call == "slower" for call in calls) / len(calls)}


def known_slow(
    samples: Mapping[CellKey, Samples], arm: str, *, partners: Partners | None = None, seed: int, draws: int = DRAWS
) -> dict[str, Any]:
    """How an arm that is known to be slow (synthetic acceptance, an engine slowed on purpose) is judged.

    Returns:
        arm; cells: that have it; found: share of them that are called slower; ratio: geometric mean over them.
    """
    tests = _control_tests(samples, arm, partners=partners, seed=seed, draws=draws)
    calls = _calls(tests)
    return {
        "arm": arm,
        "cells": len(tests),
        "found": sum(call == "slower" for call in calls) / len(calls) if calls else None,
        "ratio": geometric_mean([test.interval.ratio for test in tests]) if tests else None,
    }


if __name__ == "__main__":
    from eyas.eval.calibration_command import main

    sys.exit(main(sys.argv[1:]))
