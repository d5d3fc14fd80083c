"""Sessions with known truth, made up: does a 95 % interval cover 95 %, and does chance alone make verdicts?

The model of a session is that of docs/evaluation.md: on the log scale a start has an effect on all it does, a block has
one on all its answers, a prompt has one of its own in every arm (interaction), and every answer has one. Prompts differ
in length and cost as well, alike in all arms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.eval.comparison import Comparison, compare_samples
from eyas.eval.distributions import rate_interval
from eyas.eval.holm import holm
from eyas.eval.records import AR, AR_TWIN
from eyas.eval.samples import Floats, Sample
from eyas.eval.stats import LEVEL, Partners, RatioInterval
from eyas.eval.verdict import direction

DRAWS = 400
LENGTH_SD = 0.6
COST_SD = 0.2
WEIGHT_SPREAD = math.exp((LENGTH_SD**2 + COST_SD**2) / 2)
"""Answers of unequal length scatter a mean as this many times the sd of equal ones."""


@dataclass(frozen=True)
class Design:
    """One kind of session. All sd are of logs.

    Attributes:
        arms: AR among them, side by side its twin as well.
        starts, blocks, prompts: of each arm (side by side pairs), of each start, of each block.
        start_sd, block_sd, prompt_sd, answer_sd: of the effects of starts, blocks, (prompt, arm) and single answers.
        log_ratio: true effect of every arm against AR.
        cells: of one session; they share nothing but their design.
        start_sd_ratio: scatter of AR's starts over that of the other arms; 1 is what the intervals assume.
        tails: "normal" starts, or "rare": one start in eight is off by 2.8 sd, and the others hardly at all.
        paired: two engines run side by side; start_sd is then that of the log ratio of a pair.
    """

    arms: int
    starts: int
    prompts: int
    start_sd: float
    block_sd: float
    prompt_sd: float
    answer_sd: float = 0.05
    blocks: int = 1
    log_ratio: float = 0.0
    cells: int = 1
    start_sd_ratio: float = 1.0
    tails: str = "normal"
    paired: bool = False

    @property
    def names(self) -> list[str]:
        """Of the arms; AR first, its twin next."""
        return [AR, AR_TWIN if self.paired else "arm1", *(f"arm{arm}" for arm in range(2, self.arms))]

    @property
    def partners(self) -> Partners | None:
        """Every other arm has AR starts of its own."""
        if not self.paired:
            return None
        own = range(self.starts)
        return {
            arm: [(number * self.starts + start, start) for start in own] for number, arm in enumerate(self.names[1:])
        }

    @property
    def tests(self) -> int:
        """Comparisons of a session."""
        return self.cells * (self.arms - (2 if self.paired else 1))


@dataclass(frozen=True)
class Simulated:
    """What came out over `tests` arms against AR in `sessions` sessions.

    Attributes:
        coverage: share of intervals that hold the true ratio.
        faster, slower: share of tests called so (after Holm's correction within the session).
        alarms: share of sessions with any such call; with no true difference at most 1 - LEVEL.
        mean_width: mean of log(high / low).
    """

    sessions: int
    tests: int
    coverage: float
    faster: float
    slower: float
    alarms: float
    mean_width: float

    def to_json(self) -> dict[str, Any]:
        """With the exact interval of the coverage, of the calls, and of the alarms."""
        called = self.faster + self.slower
        return {
            **vars(self),
            "coverage_interval": list(rate_interval(self.coverage * self.tests, self.tests, level=LEVEL)),
            "called": called,
            "called_interval": list(rate_interval(called * self.tests, self.tests, level=LEVEL)),
            "alarms_interval": list(rate_interval(self.alarms * self.sessions, self.sessions, level=LEVEL)),
        }


def simulate(design: Design, *, sessions: int, seed: int) -> Simulated:
    """Make `sessions` sessions up and judge them as real ones are judged."""
    generator = np.random.default_rng(seed)
    covered, faster, slower, widths, alarms = [], [], [], [], 0
    for number in range(sessions):
        compared = [
            comparison
            for _ in range(design.cells)
            for arm, comparison in compare_samples(
                {"throughput": make_cell(design, generator=generator)},
                partners=design.partners,
                seed=number,
                draws=DRAWS,
            ).items()
            if arm != AR_TWIN
        ]
        intervals = [_throughput(comparison) for comparison in compared]
        calls = _directions(compared, intervals)
        truth = np.exp(design.log_ratio)
        covered += [interval.low <= truth <= interval.high for interval in intervals]
        widths += [float(np.log(interval.high / interval.low)) for interval in intervals]
        faster += [call == "faster" for call in calls]
        slower += [call == "slower" for call in calls]
        alarms += any(call is not None for call in calls)
    return Simulated(
        sessions=sessions,
        tests=len(covered),
        coverage=float(np.mean(covered)),
        faster=float(np.mean(faster)),
        slower=float(np.mean(slower)),
        alarms=alarms / sessions,
        mean_width=float(np.mean(widths)),
    )


def _throughput(comparison: Comparison) -> RatioInterval:
    interval = comparison.intervals["throughput"]
    assert interval is not None, "throughput always exists"
    return interval


def _directions(compared: list[Comparison], intervals: list[RatioInterval]) -> list[str | None]:
    corrected = holm([interval.p_value for interval in intervals])
    return [
        direction(interval, p_holm=p_holm, null_band=comparison.null_band)
        for comparison, interval, p_holm in zip(compared, intervals, corrected, strict=True)
    ]


def make_cell(design: Design, *, generator: np.random.Generator) -> dict[str, Sample]:
    """The arms of one cell; AR first."""
    prompts = tuple(str(index) for index in range(design.prompts))
    tokens = np.exp(4 + LENGTH_SD * generator.standard_normal(design.prompts))
    cost = COST_SD * generator.standard_normal(design.prompts)
    samples: dict[str, Sample] = {}
    for arm, name in enumerate(design.names):
        starts = design.starts * (design.arms - 1) if design.paired and arm == 0 else design.starts
        rows, start_of_row = starts * design.blocks, np.repeat(np.arange(starts), design.blocks)
        own = cost + design.prompt_sd / np.sqrt(2) * generator.standard_normal(design.prompts)
        noise = design.block_sd * generator.standard_normal(rows)
        noise += _start_effects(design, starts, arm=arm, generator=generator)[start_of_row]
        answers = design.answer_sd * generator.standard_normal((rows, design.prompts))
        seconds = tokens * np.exp(own + noise[:, None] + answers)
        offset = np.full(rows, 0.0 if name in (AR, AR_TWIN) else design.log_ratio)
        samples[name] = Sample(prompts, start_of_row, np.tile(tokens, (rows, 1)), seconds, offset)
    return samples


def _start_effects(design: Design, starts: int, *, arm: int, generator: np.random.Generator) -> Floats:
    if design.paired and arm == 0:
        return np.zeros(starts)  # what a pair shares is in no ratio, and what it differs by is put on the other arm
    sd = design.start_sd if arm else design.start_sd * design.start_sd_ratio
    if design.tails == "rare":
        return sd * np.sqrt(8) * (generator.random(starts) < 1 / 8)
    return sd * generator.standard_normal(starts)
