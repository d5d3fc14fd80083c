"""A head run as chains over one document: step 0 reads the target's features, later steps the head's own outputs.

Slot t holds the target's features of token t. Step i at slot t reads the embedding of token t+1+i and proposes token
t+2+i; it attends to the step-0 keys of slots 0..t and to its own keys of steps 1..i, in every layer. That is what the
server's cache holds when it drafts: accepted tokens are run again with the target's features, so old keys are always
step-0 keys. Training-time test (EAGLE-3, section 3) and harmonised training of EAGLE (HASS, arXiv 2408.15766) are this
computation with the true tokens; drafting is the same with the drafted ones.

Slots that no chain starts from are needed only for their keys and values. So the last layer does nothing but keys and
values there, and later steps run at chosen slots alone. `dense_outputs` is the reference: every slot at every step, with
dense masks.

Shapes: T slots, S chosen slots, X width of the target's features, H hidden, M key-value heads, E head size, I own steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.heads.attention import chain_attention, dense_chain_attention
from eyas.heads.head import DraftHead, later_input
from eyas.heads.layers import DraftLayer, Rotations


class Chains:
    """Chains that start at `slots_S` of one document. `outputs_SH` are the last layer's outputs of the newest step."""

    def __init__(
        self, head: DraftHead, *, states_TX: Tensor, next_ids_T: Tensor, embedding_VH: Tensor, slots_S: Tensor
    ) -> None:
        """Step 0.

        Args:
            states_TX: the target's states that the head reads, of slots 0..T-1.
            next_ids_T: token t+1 of each slot; the true token of step i at slot t is `next_ids_T[t + i]`.
            embedding_VH: the target's token embedding.
        """
        self.head, self.embedding_VH, self.slots_S, self.step = head, embedding_VH, slots_S, 0
        self.layers = _layers(head)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.own_keys: list[list[Tensor]] = [[] for _ in self.layers]
        self.own_values: list[list[Tensor]] = [[] for _ in self.layers]
        self.outputs_SH = self._start(states_TX.to(head.fc.weight.dtype), next_ids_T)

    def _start(self, states_TX: Tensor, next_ids_T: Tensor) -> Tensor:
        head = self.head
        embedding_TH = head.embed(next_ids_T, embedding_VH=self.embedding_VH)
        input_TX, residual_TH = head.enter(embedding_TH, feature_TH=head.features(states_TX))
        all_slots_T = torch.arange(next_ids_T.shape[0], device=next_ids_T.device)
        rotations = head.rotations(all_slots_T)
        for index, layer in enumerate(self.layers):
            if index > 0:
                input_TX, residual_TH = later_input(layer, hidden_TH=residual_TH)
            key_TME, value_TME = layer.self_attn.keys_values(input_TX, rotations=rotations)
            self.keys.append(key_TME)
            self.values.append(value_TME)
            if layer is self.layers[-1]:
                slots_S = self.slots_S
                rotations_S = (rotations[0][slots_S], rotations[1][slots_S])
                return self._attend(index, input_TX[slots_S], residual_TH[slots_S], rotations_S, slots_S)
            residual_TH = self._attend(index, input_TX, residual_TH, rotations, all_slots_T)
        raise AssertionError("a head has at least one layer")

    def keep(self, slots_S: Tensor) -> None:
        """Go on with the chains of a subset of the slots, ascending."""
        kept = torch.searchsorted(self.slots_S, slots_S)
        self.slots_S = slots_S
        self.outputs_SH = self.outputs_SH[kept]
        self.own_keys, self.own_values = (
            [[own_SME[kept] for own_SME in steps] for steps in layers] for layers in (self.own_keys, self.own_values)
        )

    def advance(self, token_ids_S: Tensor, *, detach: bool = False) -> Tensor:
        """One more step, in which `token_ids_S` are the tokens that the step before proposed; outputs [S, H].

        Args:
            detach: cut the gradient at the feature that is fed back, as HASS does.
        """
        self.step += 1
        head = self.head
        feature_SH = head.feed_back(self.outputs_SH)
        embedding_SH = head.embed(token_ids_S, embedding_VH=self.embedding_VH)
        input_SX, hidden_SH = head.enter(embedding_SH, feature_TH=feature_SH.detach() if detach else feature_SH)
        rotations = head.rotations(self.slots_S + self.step)
        for index, layer in enumerate(self.layers):
            if index > 0:
                input_SX, hidden_SH = later_input(layer, hidden_TH=hidden_SH)
            key_SME, value_SME = layer.self_attn.keys_values(input_SX, rotations=rotations)
            self.own_keys[index].append(key_SME)
            self.own_values[index].append(value_SME)
            hidden_SH = self._attend(index, input_SX, hidden_SH, rotations, self.slots_S)
        self.outputs_SH = hidden_SH
        return hidden_SH

    def _attend(
        self, index: int, input_SX: Tensor, residual_SH: Tensor, rotations: Rotations, slots_S: Tensor
    ) -> Tensor:
        layer, key_TME, value_TME = self.layers[index], self.keys[index], self.values[index]
        attended_SNE = chain_attention(
            layer.self_attn.queries(input_SX, rotations=rotations),
            key_TME=key_TME,
            value_TME=value_TME,
            own_key_SIME=_stack(self.own_keys[index], like=key_TME, num_slots=slots_S.shape[0]),
            own_value_SIME=_stack(self.own_values[index], like=value_TME, num_slots=slots_S.shape[0]),
            slots_S=slots_S,
            window=self.head.config.window,
        )
        return layer.finish(attended_SNE, residual_TH=residual_SH)


def dense_outputs(
    head: DraftHead,
    *,
    states_TX: Tensor,
    next_ids_T: Tensor,
    embedding_VH: Tensor,
    num_steps: int,
    detach: bool = False,
) -> list[Tensor]:
    """Reference of `Chains` on the true tokens: the outputs [T, H] of every slot at each step.

    Tokens past the document's end are read as token 0; no slot with a true token at a step depends on them.
    """
    layers = _layers(head)
    slots_T = torch.arange(next_ids_T.shape[0], device=next_ids_T.device)
    feature_TH = head.features(states_TX.to(head.fc.weight.dtype))
    keys: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    outputs: list[Tensor] = []
    for step in range(num_steps):
        shifted_T = torch.cat((next_ids_T[step:], next_ids_T.new_zeros(step)))[: next_ids_T.shape[0]]
        rotations = head.rotations(slots_T + step)
        embedding_TH = head.embed(shifted_T, embedding_VH=embedding_VH)
        input_TX, hidden_TH = head.enter(embedding_TH, feature_TH=feature_TH)
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


def _stack(steps: list[Tensor], *, like: Tensor, num_slots: int) -> Tensor:
    """[S, M, E] of each own step -> [S, I, M, E]; I = 0 gives an empty tensor of the right kind."""
    if steps:
        return torch.stack(steps, dim=1)
    return like.new_empty((num_slots, 0, *like.shape[1:]))
