"""Floating-point operations that a training step needs, by arithmetic from the head's shape.

Counted are matrix products and attention over the pairs of query and key that exist, a multiply-add as two. A backward
pass has two products for each of the forward's, or one where the input or the weight needs no gradient. What an
implementation computes besides, such as scores anew in the backward pass, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.heads.config import HeadConfig


def training_flops(
    config: HeadConfig,
    *,
    num_slots: int,
    rows_K: Sequence[int],
    attended_K: Sequence[int],
    num_teacher_rows: int,
    train_readout: bool,
) -> float:
    """Operations of a forward and backward pass over some slots.

    Args:
        num_slots: slots of all documents, trained or not. rows_K: trained slots of each step.
        attended_K: pairs of query and key of the trained slots at each step, in one layer.
        num_teacher_rows: positions whose target distribution is computed from a hidden state.
        train_readout: whether lm_head is trained; a frozen one needs no gradient of its own.
    """
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    key_value = 2 * config.num_key_value_heads * config.head_dim
    first = (2 if config.kind == "eagle3" else 1) * hidden
    inner = width * hidden + 3 * hidden * config.intermediate_size
    queries = [first * width] + [hidden * width] * (config.num_layers - 1)
    keys = [first * key_value] + [hidden * key_value] * (config.num_layers - 1)
    rows = sum(rows_K)
    total = 0.0
    for layer in range(config.num_layers):
        # Layers below the last run at every slot in step 0: those above attend to what they give.
        attending = rows if layer == config.num_layers - 1 else num_slots + rows - rows_K[0]
        total += 6.0 * attending * (queries[layer] + inner)
        total += 6.0 * (num_slots + rows - rows_K[0]) * keys[layer]
    total += 12.0 * sum(attended_K) * width * config.num_layers
    total += _feature_flops(config, num_slots=num_slots, rows=rows - rows_K[0])
    readout = config.draft_vocab_size * hidden
    return total + (6.0 if train_readout else 4.0) * rows * readout + 2.0 * num_teacher_rows * config.draft_vocab_size * (
        config.target_hidden_size
    )


def _feature_flops(config: HeadConfig, *, num_slots: int, rows: int) -> float:
    """Of fc: an EAGLE-3 head applies it to frozen states once, an EAGLE head to embedding and feature at every step."""
    if config.kind == "eagle3":
        return 4.0 * num_slots * config.num_captured * config.target_hidden_size * config.hidden_size
    size = 2 * config.hidden_size * config.hidden_size
    return 4.0 * num_slots * size + 6.0 * rows * size
