"""Is the head accepted as often as training predicted?

Acceptance predicted outside the engine, by drafting along the answers that were served, beside the acceptance that the engine
counted on the same answers. They agree when the head drafts in vLLM what it drafted in training: the prompts, the
positions, the states and the vocabulary are then the same on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.eval.acceptance import accepted_in_answer, marginal_rates, tau_step_weighted
from eyas.eval.records import RequestRecord

PARITY_TOLERANCE = 0.03
"""Largest relative difference between predicted and served tau that counts as parity."""


def check_parity(
    drafted: Sequence[RequestRecord], *, offline: Mapping[str, Sequence[int]], draft_length: int
) -> dict[str, Any]:
    """Compare the acceptance computed offline with what the engine served on the same answers.

    Tokens that the engine accepted behind the end of an answer are left out: no walk over the answer knows of them.

    Args:
        drafted: greedy answers of a head arm. offline: prompt id -> accepted tokens of each step, predicted.
        draft_length: tokens drafted in each step, on both sides.
    """
    served = [accepted_in_answer(request) for request in drafted]
    predicted = [list(offline[request.prompt_id]) for request in drafted]
    tau_served, tau_offline = tau_step_weighted(served), tau_step_weighted(predicted)
    difference = None if tau_served is None or tau_offline is None else tau_offline / tau_served - 1
    return {
        "requests": len(drafted),
        "draft_length": draft_length,
        "served": _acceptance(served, draft_length=draft_length),
        "offline": _acceptance(predicted, draft_length=draft_length),
        "relative_difference": difference,
        "tolerance": PARITY_TOLERANCE,
        "passed": difference is not None and abs(difference) <= PARITY_TOLERANCE,
    }


def _acceptance(accepted: list[list[int]], *, draft_length: int) -> dict[str, Any]:
    return {
        "drafts": sum(len(request) for request in accepted),
        "tau_step_weighted": tau_step_weighted(accepted),
        "marginal": marginal_rates(accepted, draft_length=draft_length),
    }
