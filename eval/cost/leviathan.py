"""Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192): tokens per step and
speedup from one acceptance rate.

It assumes that every drafted token is accepted with the same probability alpha independently, and that verifying k + 1
tokens costs one plain step, which is true only while decoding waits for memory. So it does not know the batch size, and
stands in the report beside the measured speedup to show what that assumption is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

ALPHA = (
    "pooled conditional acceptance: accepted drafts / drafts that were compared (a step's first rejected draft ends "
    "its comparisons)"
)
COST_RATIO = (
    "c = (T_SD - T_AR) / (k T_AR) at the smallest measured batch size, so all that a step costs beyond a plain one counts "
    "as drafting"
)


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Tokens per target run, bonus token included: (1 - alpha^(k+1)) / (1 - alpha) (Eq. 1)."""
    if alpha == 1:
        return draft_length + 1.0
    return (1 - alpha ** (draft_length + 1)) / (1 - alpha)


def speedup(alpha: float, draft_length: int, cost_ratio: float) -> float:
    """Walltime factor over plain decoding: E[tokens] / (k c + 1) (Theorem 3.8)."""
    return expected_tokens(alpha, draft_length) / (draft_length * cost_ratio + 1)


def pooled_alpha(accepted: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> float | None:
    """Accepted drafts over compared drafts, over all steps of all requests; None without drafts.

    The maximum-likelihood alpha of the model: a step with `a` accepted of `d` drafted compared a + 1 drafts, or d if all
    were accepted.
    """
    pairs = [
        (taken, offered)
        for steps, offers in zip(accepted, drafted, strict=True)
        for taken, offered in zip(steps, offers, strict=True)
    ]
    compared = sum(min(taken + 1, offered) for taken, offered in pairs)
    return sum(taken for taken, _ in pairs) / compared if compared else None
