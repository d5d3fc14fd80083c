"""Chain drafting: what the server's drafter does, offline.

`draft_from_slots` drafts k tokens from many slots of a document at once. It is what held-out tau, the parity check
against vLLM and the tests use. `draft_one_chain` is the reference: one slot, an explicit key-value cache, a token at a
time.

`simulate_chains` walks a greedy answer the way the server does: draft at the current slot, accept the longest correct
prefix, jump by accepted + 1. On text that the target wrote greedily this predicts the served acceptance exactly, up
to rounding.

Slot t holds the target's feature of token t; the first drafted token is compared with token t+2, because token t+1
(sampled by the target from the feature at t) is already known when drafting starts.

Shapes: T slots, S drafting slots, K drafted tokens, X = A*H captured width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.heads.attention import chain_attention
from eyas.heads.eagle3 import Eagle3Head


@torch.inference_mode()
def draft_from_slots(
    head: Eagle3Head,
    *,
    embedding_VH: Tensor,
    token_ids_T: Tensor,
    captured_TX: Tensor,
    slots_S: Tensor,
    num_tokens: int,
) -> Tensor:
    """Greedy drafts [S, K] (target ids) of chains that start at `slots_S`; each slot needs its next token, t+1 < T.

    Args:
        embedding_VH: the target's token embedding, in the head's dtype.
        captured_TX: captured layers of the document, in the head's dtype.
    """
    assert int(slots_S.max()) + 1 < token_ids_T.shape[0]
    feature_TH = head.fuse(captured_TX[:-1])
    positions_T = torch.arange(feature_TH.shape[0], device=feature_TH.device)
    rotations = head.rotations(positions_T)
    input_TX = head.layer_input(embedding_VH[token_ids_T[1:]], feature_TH=feature_TH)
    key_TME, value_TME = head.keys_values(input_TX, rotations=rotations)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    drafts: list[Tensor] = []
    input_SX, feature_SH = input_TX[slots_S], feature_TH[slots_S]
    for step in range(num_tokens):
        rotations_S = head.rotations(slots_S + step)
        if step > 0:
            input_SX = head.layer_input(embedding_VH[drafts[-1]], feature_TH=feature_SH)
            own_key_SME, own_value_SME = head.keys_values(input_SX, rotations=rotations_S)
            own_keys.append(own_key_SME)
            own_values.append(own_value_SME)
        attended_SNE = chain_attention(
            head.queries(input_SX, rotations=rotations_S),
            key_TME=key_TME,
            value_TME=value_TME,
            own_key_SIME=stack_steps(own_keys, like=key_TME, num_slots=slots_S.shape[0]),
            own_value_SIME=stack_steps(own_values, like=value_TME, num_slots=slots_S.shape[0]),
            slots_S=slots_S,
        )
        feature_SH = head.finish(attended_SNE, feature_TH=feature_SH)
        drafts.append(head.target_ids(head.logits(feature_SH).argmax(dim=-1)))
    return torch.stack(drafts, dim=1)


def stack_steps(steps: list[Tensor], *, like: Tensor, num_slots: int) -> Tensor:
    """[S, M, E] of each own step -> [S, I, M, E]; I = 0 gives an empty tensor of the right kind."""
    if steps:
        return torch.stack(steps, dim=1)
    return like.new_empty((num_slots, 0, *like.shape[1:]))


@torch.inference_mode()
def draft_one_chain(
    head: Eagle3Head,
    *,
    embedding_VH: Tensor,
    token_ids_T: Tensor,
    captured_TX: Tensor,
    slot: int,
    num_tokens: int,
) -> list[int]:
    """Reference for one slot: the cache is filled token by token, and every step attends to all of it."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    drafts: list[int] = []
    feature_1H = captured_TX.new_empty(0)
    for position in range(slot + num_tokens):
        token = int(token_ids_T[position + 1]) if position <= slot else drafts[-1]
        if position <= slot:
            feature_1H = head.fuse(captured_TX[position : position + 1])
        feature_1H = _cached_step(head, embedding_VH[token][None], feature_1H, position, keys, values)
        if position >= slot:
            drafts.append(int(head.target_ids(head.logits(feature_1H).argmax(dim=-1))))
    return drafts


def _cached_step(
    head: Eagle3Head, embedding_1H: Tensor, feature_1H: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    rotations = head.rotations(torch.tensor([position], device=feature_1H.device))
    input_1X = head.layer_input(embedding_1H, feature_TH=feature_1H)
    key, value = head.keys_values(input_1X, rotations=rotations)
    keys.append(key)
    values.append(value)
    groups = head.config.num_attention_heads // head.config.num_key_value_heads
    keys_LNE = torch.cat(keys).repeat_interleave(groups, dim=1)
    values_LNE = torch.cat(values).repeat_interleave(groups, dim=1)
    query_1NE = head.queries(input_1X, rotations=rotations)
    scores_NL = torch.einsum("ne,lne->nl", query_1NE[0], keys_LNE) / head.config.head_dim**0.5
    attended_NE = torch.einsum("nl,lne->ne", torch.softmax(scores_NL, dim=-1), values_LNE)
    return head.finish(attended_NE[None], feature_TH=feature_1H)


@dataclass(frozen=True)
class ChainStatistics:
    """Acceptance of drafted chains, summed over draft steps. `hits[i]` counts chains whose first i+1 tokens were right."""

    num_drafts: int
    hits: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Mean tokens per target forward, step-weighted, bonus token included; 1.0 without any draft."""
        return 1.0 + sum(self.hits) / self.num_drafts if self.num_drafts else 1.0

    @property
    def marginal(self) -> tuple[float, ...]:
        """P(the first i+1 drafted tokens are all accepted), per position."""
        return tuple(hit / max(self.num_drafts, 1) for hit in self.hits)


def simulate_chains(draft_SK: Tensor, *, truth_T: Tensor, slots_S: Tensor) -> list[int]:
    """Accepted counts of the draft steps that a server makes along a greedy answer.

    Args:
        draft_SK: drafts from every slot the server could draft from.
        truth_T: the document's tokens; a draft past its end is compared with what exists and misses beyond.
        slots_S: consecutive ascending slots, the first being the last prompt token.
    """
    truth = truth_T.tolist()
    first = int(slots_S[0])
    accepted: list[int] = []
    slot = first
    while slot - first < slots_S.shape[0]:
        count = leading_hits(draft_SK[slot - first].tolist(), truth[slot + 2 :])
        accepted.append(count)
        slot += count + 1
    return accepted


def leading_hits(draft: Sequence[int], truth: Sequence[int]) -> int:
    """How many of the first drafted tokens are right before the first miss."""
    count = 0
    for drafted, true in zip(draft, truth, strict=False):
        if drafted != true:
            break
        count += 1
    return count


def chain_statistics(accepted: Sequence[int], *, num_tokens: int) -> ChainStatistics:
    """Sums over draft steps of chains of `num_tokens` drafted tokens."""
    hits = tuple(sum(count > position for count in accepted) for position in range(num_tokens))
    return ChainStatistics(num_drafts=len(accepted), hits=hits)
