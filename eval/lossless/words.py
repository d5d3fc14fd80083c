"""The words of the ladder. It never says that speculative decoding was proved lossless: tests only fail to find."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NOT_DETECTED = "no difference detected"
DETECTED = "difference detected"
UNDECIDED = "undecided"
NULL_FAILED = "plain decoding differs from itself, so nothing can be said about an arm"


def not_run(why: str) -> dict[str, Any]:
    """A level that was not run, and why: it neither passed nor failed."""
    return {"status": "not run", "why": why, "passed": None}


def outcome_word(passed: bool | None) -> str:
    if passed is None:
        return UNDECIDED
    return NOT_DETECTED if passed else DETECTED


def judgement(*, differs: bool, weak: str | None, decidable: bool) -> dict[str, Any]:
    """An arm in a statistical level: passed, the outcome in words, and why nothing can be said, if so.

    Args:
        differs: a test rejected. weak: why the tests would have missed a difference, if they would.
        decidable: plain decoding does not differ from itself.
    """
    if not decidable:
        passed, why = None, NULL_FAILED
    elif differs:
        passed, why = False, None  # weakness never excuses a difference that was found
    else:
        passed, why = (None, weak) if weak else (True, None)
    return {"passed": passed, "outcome": outcome_word(passed), "why": why}


def combined(outcomes: Sequence[bool | None]) -> bool | None:
    """False where one failed, else None where one is undecided or was not run (or there is none)."""
    if False in outcomes:
        return False
    return None if None in outcomes or not outcomes else True


def permutations_for(level: float, *, at_least: int) -> int:
    """Permutations with which a p-value can fall well below `level`: the smallest one is 1 / (permutations + 1)."""
    return max(at_least, math.ceil(4 / level))
