"""The draft vocabulary: which target tokens a head can propose.

A smaller readout is faster to draft with and to train, but a token outside it can never be accepted. The choice here
counts answer tokens of the training data only (prompts are never drafted), keeps end-of-turn tokens always, breaks
ties by the lower id, and fills unused places with the lowest unseen ids: byte-pair encodings number their merges by
frequency, so a low id is the best guess for an unseen token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SIZE_MULTIPLE = 128
"""Matrix products of this width run at full speed on every accelerator."""


def choose_draft_vocabulary(counts_V: Tensor, *, size: int, always: Sequence[int]) -> Tensor:
    """Ascending target ids [D] of the draft vocabulary.

    Args:
        counts_V: how often each target token occurs in the training answers.
        size: D, at most V.
        always: ids that are in whatever their count, such as end-of-turn tokens.

    Raises:
        ValueError: `size` exceeds the target's vocabulary or cannot hold `always`.
    """
    vocab_size = counts_V.shape[0]
    if not len(set(always)) <= size <= vocab_size:
        raise ValueError(
            f"head.draft_vocab_size={size} must lie between {len(set(always))} (the stop tokens) and {vocab_size} (the target's)"
        )
    return torch.sort(_by_priority(counts_V, always=always)[:size]).values


def size_for_coverage(counts_V: Tensor, *, heldout_counts_V: Tensor, share: float, always: Sequence[int]) -> int:
    """Smallest multiple of 128 (or V) whose draft vocabulary covers `share` of the held-out answer tokens.

    Args:
        counts_V: counts of the training answers, which choose the tokens. heldout_counts_V: those of held-out answers,
            which judge the choice: coverage of the text that was counted would always look better.
    """
    vocab_size = counts_V.shape[0]
    reached_V = heldout_counts_V[_by_priority(counts_V, always=always)].double().cumsum(0)
    needed = share * float(heldout_counts_V.sum())
    size = 1 + int((reached_V < needed - 1e-9).sum())
    rounded = SIZE_MULTIPLE * math.ceil(max(size, len(set(always))) / SIZE_MULTIPLE)
    return min(rounded, vocab_size)


def _by_priority(counts_V: Tensor, *, always: Sequence[int]) -> Tensor:
    """Token ids [V], the first to take first."""
    priority_V = counts_V.double()
    priority_V[list(always)] = float("inf")
    # A stable descending sort leaves equal counts, zeros among them, in order of id.
    return torch.sort(priority_V, descending=True, stable=True).indices


def coverage(counts_V: Tensor, *, draft_to_target_D: Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary can propose; 1.0 when nothing was counted."""
    total = counts_V.sum().item()
    return float(counts_V[draft_to_target_D].sum().item() / total) if total else 1.0
