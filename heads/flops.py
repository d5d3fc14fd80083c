"""Floating-point operations of one training step, as heads/chain.py needs them.

A multiplication and an addition are two operations. A product with a trained weight runs three times: forward, and
backward for its input and its weight; twice where the input is frozen or the weight is. A pair of query and key costs a
score and a weighted value forward and twice that backward; what kernels compute again is not counted, nor is anything
that is no product.

Shapes: T slots, S_i rows of step i, P teacher rows, K steps, H hidden, D draft vocabulary.
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
    """Operations of the forward and backward pass over a pack or a batch.

    Args:
        num_slots: T, trained or not.
        rows_K: trained rows of each TTT step.
        attended_K: pairs of query and key of each step's rows in one layer; causal pairs count once, own keys included.
            In a head of several layers all slots attend in all layers but the last at step 0; the pairs of slots that
            are not trained are left out.
        num_teacher_rows: rows whose distribution is made from the target's last states; 0 where it was stored.
        train_readout: whether the head trains a readout of its own.
    """
    first, later, hidden = rows_K[0], sum(rows_K[1:]), config.hidden_size
    query = config.num_attention_heads * config.head_dim
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    # Per row: what every chosen row pays in a layer besides keys and values, and these.
    chosen = hidden * query + query * hidden + 3 * hidden * config.intermediate_size
    cached = hidden * keys_values
    deeper = config.num_layers - 1
    # At step 0 all but the last layer handle every slot, and the last one makes keys and values of every slot.
    step_0 = num_slots * deeper * (chosen + cached) + num_slots * cached + first * chosen
    trained = 6.0 * (step_0 + later * config.num_layers * (chosen + cached))
    readout = (
        ((6.0 if train_readout else 4.0) * sum(rows_K) + 2.0 * num_teacher_rows) * hidden * config.draft_vocab_size
    )
    attention = 12.0 * config.num_layers * query * sum(attended_K)
    return trained + readout + attention + _entrance(config, num_slots=num_slots, first=first, later=later)


def _entrance(config: HeadConfig, *, num_slots: int, first: int, later: int) -> float:
    """Products of `fc` and with the next token's side of the first layer, each once per token."""
    hidden = config.hidden_size
    if config.kind == "eagle":
        # fc has the token's half, and the feature's, which is frozen at step 0 only.
        return 4.0 * num_slots * 2 * hidden * hidden + 6.0 * later * hidden * hidden
    normed = config.norm_before_fc or config.fc_norm  # a trained norm before fc wants the gradient of fc's input
    features = (6.0 if normed else 4.0) * num_slots * config.num_captured * config.target_hidden_size * hidden
    query_slots = first if config.num_layers == 1 else num_slots
    query = config.num_attention_heads * config.head_dim
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    return features + 6.0 * hidden * (query_slots * query + num_slots * keys_values)
