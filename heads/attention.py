"""Attention of a draft chain: causal over the true features, plus the chain's own keys.

A chain started at slot t attends, at its step i, to the step-0 keys of slots 0..t (made from the target's features) and
to the keys it made itself at its steps 1..i: exactly what the server's KV cache holds (EAGLE-3, section 3, "training-time
test"). One softmax runs over both. Queries may be a subset of the slots, so slots without loss cost nothing here.

`chain_attention` is the fast path: memory S x (T + i) per step. `dense_chain_attention` is the reference: one
[T, T + i*T] mask over explicitly concatenated keys, as the first published implementations did it.

Shapes: S queried slots, T slots, N query heads, M key-value heads, G = N/M, E head size, I own steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chain_attention(
    query_SNE: Tensor,
    *,
    key_TME: Tensor,
    value_TME: Tensor,
    own_key_SIME: Tensor,
    own_value_SIME: Tensor,
    slots_S: Tensor,
    window: int | None = None,
) -> Tensor:
    """Attended values [S, N, E] of chains at slots `slots_S`, which have `I` own steps behind them (0 at step 0).

    Args:
        query_SNE: rotated queries of the current step.
        key_TME, value_TME: step-0 keys (rotated) and values of every slot of the document.
        own_key_SIME, own_value_SIME: keys (rotated) and values of steps 1..I at the queried slots.
        slots_S: slot index of each query, 0 <= slot < T.
        window: positions that a query reaches back, its own included; the query of slot t stands at position t + I.
    """
    num_slots, num_heads, head_size = query_SNE.shape
    num_kv_heads = key_TME.shape[1]
    groups = num_heads // num_kv_heads
    query_MGSE = query_SNE.view(num_slots, num_kv_heads, groups, head_size).permute(1, 2, 0, 3)
    query_MGSE = query_MGSE * (1.0 / math.sqrt(head_size))
    scores_MGST = torch.matmul(query_MGSE, key_TME.permute(1, 2, 0).unsqueeze(1))
    num_own = own_key_SIME.shape[1]
    hidden_ST = _hidden_slots(slots_S, num_slots=key_TME.shape[0], num_own=num_own, window=window)
    scores_MGST = scores_MGST.masked_fill(hidden_ST, float("-inf"))
    if window is not None and num_own > window:
        own_key_SIME, own_value_SIME = own_key_SIME[:, -window:], own_value_SIME[:, -window:]
    if num_own == 0:
        weights_MGST = _softmax(scores_MGST).to(value_TME.dtype)
        return _merge_heads(torch.matmul(weights_MGST, value_TME.permute(1, 0, 2).unsqueeze(1)))
    # One product per chain, not per pair of chains: elementwise beats a batch of one-row matrix products.
    own_key_MGSIE, own_value_MGSIE = (own.permute(2, 0, 1, 3).unsqueeze(1) for own in (own_key_SIME, own_value_SIME))
    own_scores_MGSI = (query_MGSE.unsqueeze(-2) * own_key_MGSIE).sum(dim=-1)
    joint = torch.cat((scores_MGST, own_scores_MGSI), dim=-1)
    weights = _softmax(joint).to(value_TME.dtype)
    weights_MGST, own_weights_MGSI = weights.split((key_TME.shape[0], own_key_SIME.shape[1]), dim=-1)
    attended_MGSE = torch.matmul(weights_MGST, value_TME.permute(1, 0, 2).unsqueeze(1))
    own_attended_MGSE = (own_weights_MGSI.unsqueeze(-1) * own_value_MGSIE).sum(dim=-2)
    return _merge_heads(attended_MGSE + own_attended_MGSE)


def _hidden_slots(slots_S: Tensor, *, num_slots: int, num_own: int, window: int | None) -> Tensor:
    """True [S, T] where a slot lies behind the query or out of its window."""
    all_slots_T = torch.arange(num_slots, device=slots_S.device)
    hidden_ST = all_slots_T > slots_S[:, None]
    if window is None:
        return hidden_ST
    return hidden_ST | (all_slots_T <= slots_S[:, None] + num_own - window)


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _merge_heads(attended_MGSE: Tensor) -> Tensor:
    num_kv_heads, groups, num_slots, head_size = attended_MGSE.shape
    return attended_MGSE.permute(2, 0, 1, 3).reshape(num_slots, num_kv_heads * groups, head_size)


def dense_chain_attention(
    query_TNE: Tensor,
    *,
    step_keys: list[Tensor],
    step_values: list[Tensor],
    window: int | None = None,
) -> Tensor:
    """Reference: attended values [T, N, E] of step I = len(step_keys) - 1, for every slot at once.

    `step_keys[j]` and `step_values[j]` are [T, M, E] of step j. A query at slot t sees step 0 up to slot t, and of each
    later step only slot t itself; step j of slot s stands at position s + j, and a window counts positions.
    """
    num_slots, num_heads, head_size = query_TNE.shape
    groups = num_heads // step_keys[0].shape[1]
    keys = torch.cat(step_keys, dim=0).repeat_interleave(groups, dim=1)
    values = torch.cat(step_values, dim=0).repeat_interleave(groups, dim=1)
    scores = torch.einsum("tne,lne->ntl", query_TNE, keys) / math.sqrt(head_size)
    causal = torch.ones(num_slots, num_slots, dtype=torch.bool, device=scores.device).tril()
    diagonal = torch.eye(num_slots, dtype=torch.bool, device=scores.device)
    allowed = torch.cat([causal, *[diagonal] * (len(step_keys) - 1)], dim=1)
    if window is not None:
        slots_T = torch.arange(num_slots, device=scores.device)
        key_positions = torch.cat([slots_T + step for step in range(len(step_keys))])
        allowed = allowed & (key_positions > slots_T[:, None] + len(step_keys) - 1 - window)
    weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1)
    return torch.einsum("ntl,lne->tne", weights, values)
