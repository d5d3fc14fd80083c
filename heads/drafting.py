"""Chain drafting: what the server's drafter does, offline.

`draft_from_slots` drafts k tokens from many slots of a document at once. It is what held-out tau, the parity check
against vLLM and the tests use. `draft_one_chain` is the reference: one slot, an explicit key-value cache, a token at a
time.

`simulate_chains` walks a greedy answer the way the server does: draft at the current slot, accept the longest correct
prefix, jump by accepted + 1. On text that the target wrote greedily this predicts the served acceptance exactly, up
to rounding.

Slot t holds the target's feature of token t; the first drafted token is compared with token t+2, because token t+1
(sampled by the target from the feature at t) is already known when drafting starts.

Shapes: T slots, S drafting slots, K drafted tokens, X width of the target's features, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.heads.chain import Chains
from eyas.heads.head import DraftHead, later_input, whole_input
from eyas.heads.layers import DraftLayer

SLOTS_AT_A_TIME = 256


@torch.inference_mode()
def draft_from_slots(
    head: DraftHead,
    *,
    embedding_VH: Tensor | None,
    target_readout_DH: Tensor | None,
    token_ids_T: Tensor,
    states_TX: Tensor,
    slots_S: Tensor,
    num_tokens: int,
) -> Tensor:
    """Greedy drafts [S, K] (target ids) of chains that start at `slots_S`; each slot needs its next token, t+1 < T.

    Args:
        embedding_VH: the target's token embedding, on any device; not read by a head with its own.
        target_readout_DH: the target's readout rows of the draft vocabulary; not read by a head with its own readout.
        states_TX: the target's states of the document that the head reads.
    """
    assert int(slots_S.max()) + 1 < token_ids_T.shape[0]
    chains = Chains(
        head,
        states_TX=states_TX[:-1],
        embedding_TH=head.embed(token_ids_T[1:], embedding_VH=embedding_VH),
        slots_S=slots_S.cpu(),
        lengths=[token_ids_T.shape[0] - 1],
    )
    drafts: list[Tensor] = []
    for step in range(num_tokens):
        if step > 0:
            chains.advance(head.embed(drafts[-1], embedding_VH=embedding_VH))
        drafts.append(head.target_ids(_best(head, chains.outputs_SH, target_readout_DH=target_readout_DH)))
    return torch.stack(drafts, dim=1)


def _best(head: DraftHead, outputs_SH: Tensor, *, target_readout_DH: Tensor | None) -> Tensor:
    """Likeliest draft ids [S], some slots at a time: logits of a whole document over a whole vocabulary are large."""
    chunks = [
        head.logits(chunk_SH, target_readout_DH=target_readout_DH).argmax(dim=-1)
        for chunk_SH in outputs_SH.split(SLOTS_AT_A_TIME)
    ]
    return torch.cat(chunks)


@torch.inference_mode()
def draft_one_chain(
    head: DraftHead,
    *,
    embedding_VH: Tensor | None,
    target_readout_DH: Tensor | None,
    token_ids_T: Tensor,
    states_TX: Tensor,
    slot: int,
    num_tokens: int,
) -> list[int]:
    """Reference for one slot: the cache is filled token by token, and every step attends to all of it."""
    caches: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in head.layers]
    drafts: list[int] = []
    output_1H = states_TX.new_empty(0)
    for position in range(slot + num_tokens):
        token = int(token_ids_T[position + 1]) if position <= slot else drafts[-1]
        if position <= slot:
            feature_1H = head.features(states_TX[position : position + 1])
        else:
            feature_1H = head.feed_back(output_1H)
        embedding_1H = head.embed(torch.tensor([token], device=states_TX.device), embedding_VH=embedding_VH)
        token_1H = head.token_side(embedding_1H)
        input_1X, output_1H = head.enter(token_1H, feature_TH=feature_1H)
        input_1X = whole_input(head, token_1H, input_TH=input_1X)
        for index, layer in enumerate(head.layers):
            assert isinstance(layer, DraftLayer)
            if index > 0:
                input_1X, output_1H = later_input(layer, hidden_TH=output_1H)
            output_1H = _cached_layer(head, layer, input_1X, output_1H, position, *caches[index])
        if position >= slot:
            logits_1D = head.logits(output_1H, target_readout_DH=target_readout_DH)
            drafts.append(int(head.target_ids(logits_1D.argmax(dim=-1))))
    return drafts


def _cached_layer(
    head: DraftHead,
    layer: DraftLayer,
    input_1X: Tensor,
    residual_1H: Tensor,
    position: int,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    rotations = head.rotations(torch.tensor([position], device=input_1X.device))
    key, value = layer.self_attn.keys_values(input_1X, rotations=rotations)
    keys.append(key)
    values.append(value)
    groups = head.config.num_attention_heads // head.config.num_key_value_heads
    begin = 0 if head.config.window is None else max(0, position + 1 - head.config.window)
    keys_LNE = torch.cat(keys[begin:]).repeat_interleave(groups, dim=1)
    values_LNE = torch.cat(values[begin:]).repeat_interleave(groups, dim=1)
    query_1NE = layer.self_attn.queries(input_1X, rotations=rotations)
    scores_NL = torch.einsum("ne,lne->nl", query_1NE[0], keys_LNE) / head.config.head_dim**0.5
    attended_NE = torch.einsum("nl,lne->ne", torch.softmax(scores_NL, dim=-1), values_LNE)
    return layer.finish(attended_NE[None], residual_TH=residual_1H)


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
