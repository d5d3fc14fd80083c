"""Made-up sessions like a measured one: its design and its noise, with a truth that is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eyas.eval.power import POWER, Noise, measured_noise, resolved_ratio
from eyas.eval.records import AR, CellKey
from eyas.eval.samples import Sample
from eyas.eval.simulation import WEIGHT_SPREAD, Design, simulate
from eyas.eval.stats import Partners, compared_arms, sides

TESTS = 600
SESSIONS = 40
"""Sessions without a difference, at least: the share that calls one is counted by session."""


def simulate_like(
    samples: Mapping[CellKey, Mapping[str, Sample]], *, partners: Partners | None = None, seed: int, tests: int = TESTS
) -> dict[str, Any] | None:
    """Sessions of this design, with the median noise of its cells: no difference, and one that can be resolved.

    A session has as many cells as the measured one, all under one correction. None where a session like this has no noise
    that could be measured, or fewer than two starts.

    Args:
        samples: the cells that have AR.
        partners: which AR start ran beside which start; None where engines ran one at a time.
        seed: of what is made up.
        tests: comparisons in each of the two series, at least.
    """
    noises = [noise for own in samples.values() if (noise := measured_noise(own, partners=partners)) is not None]
    design = _design_like(samples, noises, partners=partners) if noises else None
    if design is None:
        return None
    noise = _median_noise(noises)
    resolved = resolved_ratio(
        noise,
        starts=design.starts,
        blocks=design.blocks,
        arms=design.arms,
        tests=design.tests,
        paired=design.paired,
    )
    sessions = -(-tests // design.tests)
    slower = simulate(replace(design, log_ratio=-math.log(resolved)), sessions=sessions, seed=seed)
    return {
        "design": vars(design) | {"tests": design.tests},
        "no_difference": simulate(design, sessions=max(sessions, SESSIONS), seed=seed).to_json(),
        "slow_down": {"ratio": 1 / resolved, "power": POWER, **slower.to_json()},
    }


def _design_like(
    samples: Mapping[CellKey, Mapping[str, Sample]], noises: Sequence[Noise], *, partners: Partners | None
) -> Design | None:
    """None below two starts of an arm, and side by side without an arm beside AR and its twin."""
    noise, widest = _median_noise(noises), max(samples.values(), key=len)
    others = compared_arms(widest, partners=partners)
    if partners is None:
        arms, starts = max(1 + len(others), 2), min(own[AR].starts for own in samples.values())
    else:
        arms, starts = 1 + len(others), min(sides(widest, arm, partners=partners)[1].starts for arm in others)
    if starts < 2 or arms < (2 if partners is None else 3):
        return None
    return Design(
        arms=arms,
        starts=starts,
        blocks=round(float(widest[AR].blocks_of_start.mean())),
        prompts=noise.prompts,
        start_sd=noise.start_sd,
        block_sd=noise.block_sd,
        prompt_sd=noise.prompt_sd / WEIGHT_SPREAD,
        answer_sd=0.0,  # the measured scatter of starts holds it
        cells=len(samples),
        paired=partners is not None,
    )


def _median_noise(noises: Sequence[Noise]) -> Noise:
    return Noise(
        start_sd=float(np.median([noise.start_sd for noise in noises])),
        block_sd=float(np.median([noise.block_sd for noise in noises])),
        prompt_sd=float(np.median([noise.prompt_sd for noise in noises])),
        prompts=int(np.median([noise.prompts for noise in noises])),
    )
