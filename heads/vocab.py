"""The draft vocabulary: which target tokens a head can propose.

A smaller readout is faster to draft with and to train, but a token outside it can never be accepted. The choice here
counts answer tokens of the training data only (prompts are never drafted), keeps end-of-turn tokens always, breaks
ties by the lower id, and fills unused places with the lowest unseen ids: byte-pair encodings number their merges by
frequency, so a low id is the best guess for an unseen token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    priority_V = counts_V.double()
    priority_V[list(always)] = float("inf")
    # A stable descending sort leaves equal counts, zeros among them, in order of id.
    order_V = torch.sort(priority_V, descending=True, stable=True).indices
    return torch.sort(order_V[:size]).values


def coverage(counts_V: Tensor, *, draft_to_target_D: Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary can propose; 1.0 when nothing was counted."""
    total = counts_V.sum().item()
    return float(counts_V[draft_to_target_D].sum().item() / total) if total else 1.0
