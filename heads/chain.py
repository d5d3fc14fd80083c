"""A head run as chains over a pack of documents: step 0 reads the target's features, later steps the head's own outputs.

Slot t holds the target's features of token t. Step i at slot t reads the embedding of token t+1+i and proposes token
t+2+i; it attends to the step-0 keys of its document up to slot t and to its own keys of steps 1..i, in every layer. That
is what the server's cache holds when it drafts: accepted tokens are run again with the target's features, so old keys
are always step-0 keys. Training-time test (EAGLE-3, section 3) and harmonised training of EAGLE (HASS, arXiv 2408.15766)
are this computation with the true tokens; drafting is the same with the drafted ones.

Slots that no chain starts from are needed only for their keys and values. So the last layer does nothing but keys and
values there, and later steps run at chosen slots alone. What the first layer makes of a true token is computed once and
read again by later steps (projection.py). `dense_outputs` is the reference: every slot of one document at every step,
with dense masks.

Shapes: T slots of a pack, S chosen slots, X width of the target's features, H hidden, N query and M key-value heads, E
head size, O = (N + 2M) E.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.heads.attention import Places, chain_attention, dense_chain_attention
from eyas.heads.fused import take_rows
from eyas.heads.head import DraftHead, later_input, whole_input
from eyas.heads.layers import DraftLayer, Rotations
from eyas.heads.projection import Projections


class Chains:
    """Chains that start at `slots_S` of a pack. `outputs_SH` are the last layer's outputs of the newest step."""

    def __init__(
        self, head: DraftHead, *, states_TX: Tensor, embedding_TH: Tensor, slots_S: Tensor, lengths: Sequence[int]
    ) -> None:
        """Step 0.

        Args:
            states_TX: the target's states that the head reads.
            embedding_TH: embedding of each slot's next token, as `head.embed` gives it.
            slots_S: slots that chains start from, ascending, on the CPU.
            lengths: slots of each document; documents lie end to end.
        """
        self.head, self.lengths, self.step = head, lengths, 0
        self.device = states_TX.device
        self.slots_S = self.first_slots_S = slots_S
        self.layers = _layers(head)
        widths = [head.token_width, *[0] * (len(self.layers) - 1)]
        self.projections = [
            Projections(layer.self_attn, token_width=width) for layer, width in zip(self.layers, widths, strict=True)
        ]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.own_keys: list[list[Tensor]] = [[] for _ in self.layers]
        self.own_values: list[list[Tensor]] = [[] for _ in self.layers]
        self.token_SH = embedding_TH.new_empty(0)
        self.token_SO: Tensor | None = None
        self.outputs_SH = self._start(states_TX.to(head.fc.weight.dtype), embedding_TH)

    def _start(self, states_TX: Tensor, embedding_TH: Tensor) -> Tensor:
        head = self.head
        token_TH = head.token_side(embedding_TH)
        input_TH, residual_TH = head.enter(token_TH, feature_TH=head.features(states_TX))
        chosen = self._places(self.slots_S)
        all_slots = self._places(torch.arange(states_TX.shape[0]))
        rotations = head.rotations(all_slots.positions_S)
        for index, layer in enumerate(self.layers):
            if index > 0:
                input_TH, residual_TH = later_input(layer, hidden_TH=residual_TH)
            projections = self.projections[index]
            token_TK = projections.token_keys_values(token_TH)
            self._add_keys(index, projections.keys_values(input_TH, token=token_TK), rotations)
            last = layer is self.layers[-1]
            places = chosen if last else all_slots
            if last:
                rows_S = places.device_slots_S
                rotations = (rotations[0][rows_S], rotations[1][rows_S])
                input_TH, residual_TH = take_rows(input_TH, rows_S), take_rows(residual_TH, rows_S)
            token_SQ = self._keep_tokens(token_TH, token_TK, places, chosen) if index == 0 else None
            query_SQ = projections.queries(input_TH, token_TQ=token_SQ)
            residual_TH = self._attend(index, query_SQ, residual_TH, rotations, places)
        return residual_TH

    def _keep_tokens(self, token_TH: Tensor, token_TK: Tensor | None, places: Places, chosen: Places) -> Tensor | None:
        """Keep what later steps read of the true tokens; what the token side adds to the first layer's queries."""
        rows_S = chosen.device_slots_S
        self.token_SH = take_rows(token_TH, rows_S)
        if token_TK is None:
            return None
        of_all = places is not chosen
        token_SQ = self.projections[0].token_queries(token_TH if of_all else self.token_SH)
        assert token_SQ is not None
        chosen_SQ = take_rows(token_SQ, rows_S) if of_all else token_SQ
        self.token_SO = torch.cat((chosen_SQ, take_rows(token_TK, rows_S)), dim=-1)
        return token_SQ

    def keep(self, slots_S: Tensor) -> None:
        """Go on with the chains of a subset of the slots, ascending, on the CPU."""
        if slots_S.shape == self.slots_S.shape:
            return
        kept_S = torch.searchsorted(self.slots_S, slots_S).to(self.device, non_blocking=True)
        self.slots_S = slots_S
        self.outputs_SH = take_rows(self.outputs_SH, kept_S)
        self.own_keys, self.own_values = (
            [[take_rows(own_SME, kept_S) for own_SME in steps] for steps in layers]
            for layers in (self.own_keys, self.own_values)
        )

    def follow(self, *, detach: bool = False) -> Tensor:
        """One more step on the true tokens; outputs [S, H].

        What step i reads at slot t stands where step 0 read it at slot t + i, so t + i must be one of the first slots:
        of the slots that a server drafts from (slots.py) it is.

        Args:
            detach: cut the gradient at the feature that is fed back, as HASS does.
        """
        rows_S = torch.searchsorted(self.first_slots_S, self.slots_S + self.step + 1).to(self.device, non_blocking=True)
        token_SO = None if self.token_SO is None else take_rows(self.token_SO, rows_S)
        return self._advance(take_rows(self.token_SH, rows_S), token_SO, detach=detach)

    def advance(self, embedding_SH: Tensor) -> Tensor:
        """One more step on other tokens, those that the step before proposed, by their embeddings; outputs [S, H]."""
        token_SH = self.head.token_side(embedding_SH)
        return self._advance(token_SH, self.projections[0].token_all(token_SH), detach=False)

    def _advance(self, token_SH: Tensor, token_SO: Tensor | None, *, detach: bool) -> Tensor:
        self.step += 1
        head = self.head
        feature_SH = head.feed_back(self.outputs_SH)
        input_SH, hidden_SH = head.enter(token_SH, feature_TH=feature_SH.detach() if detach else feature_SH)
        places = self._places(self.slots_S)
        rotations = head.rotations(places.positions_S + self.step)
        for index, layer in enumerate(self.layers):
            if index > 0:
                input_SH, hidden_SH = later_input(layer, hidden_TH=hidden_SH)
            projections = self.projections[index]
            projected_SO = projections.all(input_SH, token_TO=token_SO if index == 0 else None)
            width = projections.query_width
            query_SQ, key_value_SK = projected_SO.split((width, projected_SO.shape[1] - width), dim=1)
            self._add_keys(index, key_value_SK, rotations)
            hidden_SH = self._attend(index, query_SQ, hidden_SH, rotations, places)
        self.outputs_SH = hidden_SH
        return hidden_SH

    def _add_keys(self, index: int, key_value: Tensor, rotations: Rotations) -> None:
        attention = self.layers[index].self_attn
        key, value = key_value.chunk(2, dim=-1)
        key_TME, value_TME = attention.finish_keys(key, rotations=rotations), attention.heads(value)
        if self.step == 0:
            self.keys.append(key_TME)
            self.values.append(value_TME)
        else:
            self.own_keys[index].append(key_TME)
            self.own_values[index].append(value_TME)

    def _attend(
        self, index: int, query_SQ: Tensor, residual_SH: Tensor, rotations: Rotations, places: Places
    ) -> Tensor:
        layer = self.layers[index]
        attended_SNE = chain_attention(
            layer.self_attn.finish_queries(query_SQ, rotations=rotations),
            key_TME=self.keys[index],
            value_TME=self.values[index],
            own_keys=self.own_keys[index],
            own_values=self.own_values[index],
            places=places,
            window=self.head.config.window,
        )
        return layer.finish(attended_SNE, residual_TH=residual_SH)

    def _places(self, slots_S: Tensor) -> Places:
        return Places(slots_S, lengths=self.lengths, device=self.device)


def dense_outputs(
    head: DraftHead,
    *,
    states_TX: Tensor,
    embedding_TH: Tensor,
    num_steps: int,
    detach: bool = False,
) -> list[Tensor]:
    """Reference of `Chains` on the true tokens of one document: the outputs [T, H] of every slot at each step.

    Embeddings past the document's end are read as zeros; no slot with a true token at a step depends on them.
    """
    layers = _layers(head)
    slots_T = torch.arange(embedding_TH.shape[0], device=embedding_TH.device)
    feature_TH = head.features(states_TX.to(head.fc.weight.dtype))
    keys: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    outputs: list[Tensor] = []
    for step in range(num_steps):
        shifted_TH = torch.cat((embedding_TH[step:], torch.zeros_like(embedding_TH[:step])))[: slots_T.shape[0]]
        rotations = head.rotations(slots_T + step)
        token_TH = head.token_side(shifted_TH)
        input_TX, hidden_TH = head.enter(token_TH, feature_TH=feature_TH)
        input_TX = whole_input(head, token_TH, input_TH=input_TX)
        for index, layer in enumerate(layers):
            if index > 0:
                input_TX, hidden_TH = later_input(layer, hidden_TH=hidden_TH)
            key_TME, value_TME = layer.self_attn.keys_values(input_TX, rotations=rotations)
            keys[index].append(key_TME)
            values[index].append(value_TME)
            attended_TNE = dense_chain_attention(
                layer.self_attn.queries(input_TX, rotations=rotations),
                step_keys=keys[index],
                step_values=values[index],
                window=head.config.window,
            )
            hidden_TH = layer.finish(attended_TNE, residual_TH=hidden_TH)
        outputs.append(hidden_TH)
        feature_TH = head.feed_back(hidden_TH)
        if detach:
            feature_TH = feature_TH.detach()
    return outputs


def _layers(head: DraftHead) -> list[DraftLayer]:
    return [layer for layer in head.layers if isinstance(layer, DraftLayer)]
