"""Chain attention on CUDA: flex attention over the step-0 keys, merged with the chain's own keys by log-sum-exp.

A query sees the step-0 slots from `low` to its own, so the tiles of keys that a tile of queries needs follow from the
first and last of each; tiles that all its queries see whole need no mask. Flex attention gives the log of the sum of
exponentials with a gradient, and PyTorch differentiates the rest.

Shapes: S queries, T slots, N query heads, M key-value heads, G = N/M, E head size, I own steps, Q and L tiles of queries
and of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

TILE = 128
"""Queries and keys of a tile of the kernel's mask."""


def flex_chain_attention(
    query_SNE: Tensor,
    *,
    key_TME: Tensor,
    value_TME: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    slots_S: Tensor,
    low_S: Tensor | None,
) -> Tensor:
    """Attended values [S, N, E] in the queries' dtype; softmax statistics are float32 or wider.

    Args:
        own_keys, own_values: [S, M, E] of each own step.
        slots_S, low_S: last and first slot that each query sees; `low_S` None where none sees any.
    """
    wide = torch.promote_types(query_SNE.dtype, torch.float32)
    if query_SNE.shape[0] == 0:
        return query_SNE
    if low_S is None:
        attended_SNE = torch.zeros_like(query_SNE)
        lse_SN = query_SNE.new_full(query_SNE.shape[:2], float("-inf"), dtype=wide)
    else:
        mask = block_mask(slots_S, low_S, num_slots=key_TME.shape[0])
        attend = _compiled() if query_SNE.device.type == "cuda" else flex_attention
        query_BNSE, key_BMTE, value_BMTE = (rows.transpose(0, 1)[None] for rows in (query_SNE, key_TME, value_TME))
        attended_BNSE, aux = attend(
            query_BNSE,
            key_BMTE,
            value_BMTE,
            block_mask=mask,
            enable_gqa=query_SNE.shape[1] != key_TME.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        assert aux.lse is not None
        attended_SNE, lse_SN = attended_BNSE[0].transpose(0, 1), aux.lse[0].T.to(wide)
    if not own_keys:
        return attended_SNE
    return _merge_own(query_SNE, attended_SNE, lse_SN, own_keys=own_keys, own_values=own_values)


def block_mask(slots_S: Tensor, low_S: Tensor, *, num_slots: int) -> BlockMask:
    """The mask of queries that see the slots from `low_S` to `slots_S`, both ascending, tile by tile."""
    num_queries = slots_S.shape[0]
    padding = -num_queries % TILE
    slots_P, low_P = (torch.cat((rows, rows[-1:].expand(padding))) for rows in (slots_S, low_S))
    begins_L = torch.arange(0, num_slots, TILE, device=slots_S.device)
    ends_L = (begins_L + TILE).clamp_max(num_slots)
    seen_QL = (begins_L <= slots_P[TILE - 1 :: TILE, None]) & (ends_L > low_P[::TILE, None])
    whole_QL = (ends_L <= slots_P[::TILE, None] + 1) & (begins_L >= low_P[TILE - 1 :: TILE, None])
    return BlockMask.from_kv_blocks(
        *_listed(seen_QL & ~whole_QL),
        *_listed(seen_QL & whole_QL),
        BLOCK_SIZE=TILE,
        mask_mod=_sees(slots_P, low_P),
        seq_lengths=(num_queries, num_slots),
    )


def _listed(tiles_QL: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of keys each tile of queries has, and their numbers first, in the form that flex attention reads."""
    order_QL = torch.argsort(tiles_QL.int(), dim=-1, descending=True, stable=True)
    return tiles_QL.sum(dim=-1).int()[None, None], order_QL.int()[None, None]


def _sees(slots_P: Tensor, low_P: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= slots_P[query]) & (key >= low_P[query])

    return sees


@cache
def _compiled() -> Any:
    # Queries and keys differ in number from pack to pack and from step to step.
    return torch.compile(flex_attention, dynamic=True)


def _merge_own(
    query_SNE: Tensor, attended_SNE: Tensor, lse_SN: Tensor, *, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
) -> Tensor:
    """Join the chain's own keys, one of each step."""
    num_queries, num_kv_heads, head_size = own_keys[0].shape
    key_SM1IE, value_SM1IE = (torch.stack(tuple(own), dim=2).unsqueeze(2) for own in (own_keys, own_values))
    query_SMGE = query_SNE.view(num_queries, num_kv_heads, -1, head_size)
    scores_SMGI = (query_SMGE.unsqueeze(-2) * key_SM1IE).sum(dim=-1, dtype=lse_SN.dtype) / math.sqrt(head_size)
    scores_SNI = scores_SMGI.flatten(1, 2)
    joint_SN = torch.logsumexp(torch.cat((lse_SN.unsqueeze(-1), scores_SNI), dim=-1), dim=-1)
    weights_SMGI = (scores_SNI - joint_SN.unsqueeze(-1)).exp().view(scores_SMGI.shape)
    own_SMGE = (weights_SMGI.unsqueeze(-1) * value_SM1IE).sum(dim=-2)
    merged_SNE = attended_SNE * (lse_SN - joint_SN).exp().unsqueeze(-1) + own_SMGE.view(query_SNE.shape)
    return merged_SNE.to(query_SNE.dtype)
