"""What an arm drafted in the answers of a level. Where it drafted nothing, plain decoding was compared with plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.eval.lossless.words import combined, outcome_word
from eyas.eval.records import CellRecord

NOTHING_DRAFTED = "the arm drafted nothing in these answers, so they say nothing about drafting"


def with_drafting(level: dict[str, Any], cells: Mapping[str, CellRecord]) -> dict[str, Any]:
    """`level` with what each arm drafted there; an arm that passed without drafting is undecided.

    Args:
        level: of L1 to L4, with one row per arm.
        cells: arm -> its cell of the level.
    """
    rows = [_with_drafting(row, cells[row["arm"]]) for row in level["arms"]]
    return level | {"arms": rows, "passed": combined([row["passed"] for row in rows])}


def _with_drafting(row: dict[str, Any], cell: CellRecord) -> dict[str, Any]:
    drafted = [sum(request.per_step_drafted or []) for request in cell.requests]
    shown = {
        "batch_size": cell.batch_size,
        "answers": len(drafted),
        "answers_drafted": sum(tokens > 0 for tokens in drafted),
        "drafted_tokens": sum(drafted),
    }
    if sum(drafted) or row["passed"] is False:
        return row | shown
    return row | shown | {"passed": None, "outcome": outcome_word(None), "why": NOTHING_DRAFTED}
