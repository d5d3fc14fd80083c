"""Step times of the measured runs: pure decode steps at the nominal running batch, per cell and arm.

A step in which some request reads its prompt, or in which the batch has thinned out at the end of a cell, is another
amount of work; it stays in throughput and latency and is left out here. The schedule is left out too: it ran in a phase of
its own, and its seconds do not compare with those of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eyas.eval.records import ArmFacts, Blocks, CellKey, CellRecord, Cells, StepRecord

MIN_STEPS = 5
"""Fewer steps than this give no median worth printing."""


def step_time_rows(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """Seconds of pure decode steps with the nominal number of requests running, over all blocks and starts.

    Returns:
        One row per cell and arm: running, starts, steps, share_of_steps (of all steps of the cell), mean, p10, p50, p90,
        p99 and p50_by_start in seconds (None with fewer than `MIN_STEPS` such steps, and `why` says so),
        tokens_per_request (mean tokens a running request got from such a step).
    """
    return [
        _place(key, arm, facts) | _times(by_arm[arm])
        for key, by_arm in cells.items()
        for arm, facts in arms.items()
        if arm in by_arm and facts.kind != "schedule"
    ]


def nominal_running(block: CellRecord) -> int:
    """How many requests run while the cell is full."""
    return min(block.batch_size, len(block.requests))


def pure_decode_steps(steps: Sequence[StepRecord], *, running: int) -> list[StepRecord]:
    """Steps with `running` requests that brought tokens, none of them a request's first.

    With asynchronous scheduling a call of `step()` now and then only submits work and brings nothing.
    """
    return [step for step in steps if step.running == running and step.prefills == 0 and step.tokens > 0]


def _times(starts: list[Blocks]) -> dict[str, Any]:
    blocks = [block for start in starts for block in start]
    running = nominal_running(blocks[0])
    by_start = [
        [step for block in start for step in pure_decode_steps(block.steps, running=running)] for start in starts
    ]
    chosen = [step for steps in by_start for step in steps]
    everything = sum(len(block.steps) for block in blocks)
    facts: dict[str, Any] = {
        "running": running,
        "starts": len(starts),
        "steps": len(chosen),
        "share_of_steps": len(chosen) / everything if everything else 0.0,
    }
    if len(chosen) < MIN_STEPS:
        why = f"{len(chosen)} pure decode steps with {running} requests running; a median needs {MIN_STEPS}"
        nothing = dict.fromkeys(("mean", "p10", "p50", "p90", "p99", "tokens_per_request"))
        return facts | nothing | {"p50_by_start": [], "why": why}
    seconds = np.array([step.seconds for step in chosen])
    p10, p50, p90, p99 = (float(value) for value in np.percentile(seconds, [10, 50, 90, 99]))
    return facts | {
        "mean": math.fsum(seconds) / len(seconds),
        "p10": p10,
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "tokens_per_request": sum(step.tokens for step in chosen) / (running * len(chosen)),
        "p50_by_start": [float(np.median([step.seconds for step in steps])) if steps else None for steps in by_start],
        "why": None,
    }


def _place(key: CellKey, arm: str, facts: ArmFacts) -> dict[str, Any]:
    return {**key._asdict(), "arm": arm, "kind": facts.kind, "draft_length": facts.draft_length}
