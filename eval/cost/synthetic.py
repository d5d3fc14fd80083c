"""Synthetic acceptance: the engine accepts drafts by chance at a given mean length, so that steps can be timed before any
head is trained. What an arm with it earns is no result of a head, and every record of it says so (`records.is_synthetic`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def synthetic_config(base: Mapping[str, Any], *, acceptance_length: float) -> dict[str, Any]:
    """`base` with acceptance made up by vLLM (0.32: `rejection_sample_method`).

    Args:
        acceptance_length: mean tokens per step, bonus token included, between 1 and k + 1.
    """
    longest = base["num_speculative_tokens"] + 1
    assert 1 <= acceptance_length <= longest, "a step brings at least one token and at most k + 1"
    return dict(base) | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": acceptance_length}
