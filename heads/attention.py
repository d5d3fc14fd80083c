"""Attention of a draft chain: causal over the true features, plus the chain's own keys.

A chain started at slot t attends, at its step i, to the step-0 keys of the slots 0..t of its document (made from the
target's features) and to the keys it made itself at its steps 1..i: exactly what the server's KV cache holds (EAGLE-3,
section 3, "training-time test"). One softmax runs over both. Queries may be a subset of the slots, so slots without loss
cost nothing here.

`chain_attention` is the fast path, with memory linear in the slots: flash kernels on blocks on the CPU
(attention_cpu.py), flex attention on CUDA (attention_flex.py). `dense_chain_attention` is the reference: one
[T, T + i*T] mask over explicitly concatenated keys, as the first published implementations did it.

Shapes: S queried slots, T slots of a pack of documents, N query heads, M key-value heads, G = N/M, E head size, B
documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.heads.attention_blocks import Group, plan_groups
from eyas.heads.attention_cpu import cpu_chain_attention
from eyas.heads.attention_flex import flex_chain_attention


class Places:
    """Where queries stand in a pack: their slots and the first slots of their documents, on the CPU and on the device."""

    def __init__(self, slots_S: Tensor, *, lengths: Sequence[int], device: torch.device) -> None:
        """
        Args:
            slots_S: pack-wide slots, ascending, on the CPU. lengths: slots of each document.
        """
        ends_B = torch.tensor(lengths).cumsum(0)
        documents_S = torch.searchsorted(ends_B, slots_S, right=True)
        self.slots_S = slots_S
        self.starts_S = (ends_B - torch.tensor(lengths))[documents_S]
        self.device_slots_S = slots_S.to(device, non_blocking=True)
        self.device_starts_S = self.starts_S.to(device, non_blocking=True)
        self._groups: dict[int | None, list[Group]] = {}

    def groups(self, reach: int | None) -> list[Group]:
        """Blocks of queries and keys where a query sees `reach` slots; planned once for all layers."""
        if reach not in self._groups:
            self._groups[reach] = plan_groups(self.slots_S, starts_S=self.starts_S, reach=reach)
        return self._groups[reach]

    @property
    def positions_S(self) -> Tensor:
        """Position of each slot in its document, on the device."""
        return self.device_slots_S - self.device_starts_S


def chain_attention(
    query_SNE: Tensor,
    *,
    key_TME: Tensor,
    value_TME: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    places: Places,
    window: int | None = None,
) -> Tensor:
    """Attended values [S, N, E] of chains at `places`, which have I = len(own_keys) own steps behind them.

    Args:
        query_SNE: rotated queries of the current step.
        key_TME, value_TME: step-0 keys (rotated) and values of every slot of the pack.
        own_keys, own_values: keys (rotated) and values [S, M, E] of each of the steps 1..I at the queried slots.
        window: positions that a query reaches back, its own included; the query of slot t stands at position t + I.
    """
    reach = None
    if window is not None:
        reach = window - len(own_keys)
        own_keys, own_values = own_keys[-window:], own_values[-window:]
    if query_SNE.device.type == "cpu":
        return cpu_chain_attention(
            query_SNE,
            key_TME=key_TME,
            value_TME=value_TME,
            own_keys=own_keys,
            own_values=own_values,
            groups=places.groups(reach),
        )
    return flex_chain_attention(
        query_SNE,
        key_TME=key_TME,
        value_TME=value_TME,
        own_keys=own_keys,
        own_values=own_values,
        slots_S=places.device_slots_S,
        low_S=_lowest_slots(places, reach=reach),
    )


def _lowest_slots(places: Places, *, reach: int | None) -> Tensor | None:
    """The first slot that each query sees [S], on the device; None where a window hides all of them."""
    if reach is None:
        return places.device_starts_S
    if reach < 1:
        return None
    return torch.maximum(places.device_starts_S, places.device_slots_S - reach + 1)


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
