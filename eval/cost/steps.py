"""Step times and tokens per step, read from the engine steps of raw records.

A step time belongs to a running batch: only pure decode steps count (no prefill in them), and for the time of a cell only
those in which exactly its nominal batch was running, so neither the prompts nor the thinning tail of a closed loop
enters. The median is taken because a step that the operating system interrupted says nothing about the engine.

*tau* here is what the requests received: output tokens per request and pure decode step. It is the same for every method
(1 for plain decoding), it counts steps in which a method drafted nothing, and tokens that an engine accepted behind an
answer's end, which nobody receives, are not in it. The acceptance section's tau counts those, so it may be a percent or
two higher.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eyas.eval.records import AR, ArmFacts, Blocks, CellRecord, Cells, StepRecord

MIN_STEPS = 5
"""Pure decode steps at the nominal batch that a start needs for a step time."""


BySize = dict[int, dict[str, list[Blocks]]]
"""Batch size -> arm -> the arm's starts."""


class Group(NamedTuple):
    """Cells that differ in batch size only."""

    dataset: str
    temperature: float


def pure_decode(cell: CellRecord) -> list[StepRecord]:
    """Steps in which every request decoded: none was reading its prompt, whole or in part."""
    return [step for step in cell.steps if step.prefills == 0 and step.tokens >= step.running > 0]


def step_seconds(blocks: Blocks) -> float | None:
    """Median seconds of a pure decode step at the cell's nominal batch; None with fewer than `MIN_STEPS` of them."""
    seconds = [step.seconds for cell in blocks for step in pure_decode(cell) if step.running == cell.batch_size]
    return statistics.median(seconds) if len(seconds) >= MIN_STEPS else None


def tokens_per_step(blocks: Iterable[CellRecord]) -> float | None:
    """tau: tokens per request over all pure decode steps; None without such steps."""
    steps = [step for cell in blocks for step in pure_decode(cell)]
    running = sum(step.running for step in steps)
    return sum(step.tokens for step in steps) / running if running else None


def groups(cells: Cells) -> dict[Group, BySize]:
    """(dataset, temperature) -> batch size, ascending -> arm -> starts, where plain decoding was measured too."""
    found: dict[Group, BySize] = {}
    for key in sorted(cells, key=lambda key: key.batch_size):
        if AR in cells[key]:
            found.setdefault(Group(key.dataset, key.temperature), {})[key.batch_size] = cells[key]
    return found


def drafting_arms(arms: Mapping[str, ArmFacts]) -> list[str]:
    """Arms that draft at every batch size: not plain decoding under any name, and not the schedule."""
    return [
        name for name, facts in arms.items() if facts.kind in ("head", "other") and facts.speculative_config is not None
    ]


def all_blocks(starts: Sequence[Blocks]) -> list[CellRecord]:
    return [cell for blocks in starts for cell in blocks]
