"""Fabricated starts of `eyas ceiling` whose step times follow a known law."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.eval.cost.ceiling import ceiling_arms
from eyas.eval.cost.ceiling_rows import ceiling_results
from eyas.eval.records import read_starts
from tests.cost_cells import Law, serve
from tests.eval_records import write_start

SIZES = (1, 4, 16)
PATTERNS = {"low": [0, 1, 0, 2, 0, 0], "high": [3, 2, 3, 1, 3, 2]}
STEP, TOKEN, DRAFT = 0.030, 0.002, 0.003


def law(arm: str, running: int) -> float:
    length = int(arm[1]) if arm != "ar" else 0
    return STEP + TOKEN * (length + 1) * running + DRAFT * length


def starts_of(directory: Path, *, lengths: Sequence[int] = (1, 3), law: Law = law, repeats: int = 2) -> list:
    number = 0
    for repeat in range(repeats):
        for arm in ceiling_arms(Path("head"), method="eagle3", draft_lengths=lengths):
            accepts = [min(arm.draft_length, each) for each in PATTERNS.get(arm.name[3:], [0])]
            cells = [
                serve(arm.name, batch_size=size, law=law, draft_length=arm.draft_length, accepts=accepts)
                for size in SIZES
            ]
            write_start(
                directory,
                number,
                arm.name,
                cells,
                draft_length=arm.draft_length,
                kind=arm.kind,
                round=repeat,
                speculative_config=arm.speculative_config,
            )
            number += 1
    return read_starts(directory)


def results_of(directory: Path, **changes: Any) -> dict[str, Any]:
    return ceiling_results(starts_of(directory, **changes), context={"target": "a target"})
