"""Training-time test: the head runs K steps on its own features, and every step is trained.

Step 0 at slot t reads the target's feature; step i reads the head's own output of step i-1 at the same slot and the
embedding of token t+1+i, and attends to the step-0 keys up to t and to its own keys of steps 1..i (EAGLE-3, section 3;
the equations are in heads/eagle3.py and heads/attention.py).

Trained-slot gathering. In a one-layer head the output at slot t is needed only for slot t's own loss and later steps;
every other slot is needed only for its step-0 key and value. So all slots pay for fc, norms, keys and values once, and
only the slots that the server drafts from (heads/slots.py) pay for queries, output projection, MLP, readout and later
steps. The result is exact; `dense_hidden_states` is the reference that computes every slot at every step.

Shapes: T slots, S_i slots trained at step i, X = A*H captured width, H hidden, K steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.heads.attention import chain_attention, dense_chain_attention
from eyas.heads.drafting import stack_steps
from eyas.heads.eagle3 import Eagle3Head
from eyas.train.batches import TrainingDocument
from eyas.train.losses import DistillationResult, StepRows, chunked_distillation


def batch_loss(
    head: Eagle3Head,
    documents: Sequence[TrainingDocument],
    *,
    embedding_VH: Tensor,
    teacher_readout_DH: Tensor,
    row_weights: Sequence[float],
) -> DistillationResult:
    """Loss of a batch of documents over `len(row_weights)` steps, every row of step i counting `row_weights[i]`."""
    num_steps = len(row_weights)
    hidden: list[list[Tensor]] = [[] for _ in range(num_steps)]
    positions: list[list[Tensor]] = [[] for _ in range(num_steps)]
    base = 0
    for document in documents:
        outputs = trained_hidden_states(head, document, embedding_VH=embedding_VH, num_steps=num_steps)
        for step, output_SH in enumerate(outputs):
            hidden[step].append(output_SH)
            # The output at slot t, step i predicts the distribution that the target gives at position t+1+i.
            positions[step].append(document.slots[step] + 1 + step + base)
        base += document.last_TH.shape[0]
    rows = [
        StepRows(hidden_RH=head.norm(torch.cat(hidden[step])), positions_R=torch.cat(positions[step]), weight=weight)
        for step, weight in enumerate(row_weights)
    ]
    return chunked_distillation(
        rows,
        readout_DH=head.lm_head.weight,
        teacher_hidden_PH=torch.cat([document.last_TH for document in documents]),
        teacher_readout_DH=teacher_readout_DH,
    )


def trained_hidden_states(
    head: Eagle3Head, document: TrainingDocument, *, embedding_VH: Tensor, num_steps: int
) -> list[Tensor]:
    """Outputs o^i [S_i, H] of the trained slots at each step."""
    feature_TH = head.fuse(document.captured_TX.to(head.fc.weight.dtype))
    input_TX = head.layer_input(embedding_VH[document.next_ids_T].to(feature_TH.dtype), feature_TH=feature_TH)
    rotations_T = head.rotations(torch.arange(feature_TH.shape[0], device=feature_TH.device))
    key_TME, value_TME = head.keys_values(input_TX, rotations=rotations_T)
    slots_S = document.slots[0]
    feature_SH, input_SX = feature_TH[slots_S], input_TX[slots_S]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    outputs: list[Tensor] = []
    for step in range(num_steps):
        if step > 0:
            # Later steps train a subset of the slots: the chains that still fit into the answer.
            keep = torch.searchsorted(slots_S, document.slots[step])
            slots_S = document.slots[step]
            feature_SH = outputs[-1][keep]
            own_keys, own_values = ([own[keep] for own in kept] for kept in (own_keys, own_values))
            token_ids_S = document.next_ids_T[slots_S + step]
            input_SX = head.layer_input(embedding_VH[token_ids_S].to(feature_SH.dtype), feature_TH=feature_SH)
        rotations_S = head.rotations(slots_S + step)
        if step > 0:
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
        outputs.append(head.finish(attended_SNE, feature_TH=feature_SH))
    return outputs


def dense_hidden_states(
    head: Eagle3Head, document: TrainingDocument, *, embedding_VH: Tensor, num_steps: int
) -> list[Tensor]:
    """Reference of `trained_hidden_states`: every slot at every step with dense masks, the trained slots picked last.

    Tokens past the document's end are read as token 0; the slots that would see them are never among the trained.
    """
    length = document.captured_TX.shape[0]
    positions_T = torch.arange(length)
    feature_TH = head.fuse(document.captured_TX.to(head.fc.weight.dtype))
    step_keys: list[Tensor] = []
    step_values: list[Tensor] = []
    outputs: list[Tensor] = []
    for step in range(num_steps):
        shifted_T = torch.cat((document.next_ids_T[step:], document.next_ids_T.new_zeros(step)))
        input_TX = head.layer_input(embedding_VH[shifted_T].to(feature_TH.dtype), feature_TH=feature_TH)
        rotations = head.rotations(positions_T + step)
        key_TME, value_TME = head.keys_values(input_TX, rotations=rotations)
        step_keys.append(key_TME)
        step_values.append(value_TME)
        query_TNE = head.queries(input_TX, rotations=rotations)
        attended_TNE = dense_chain_attention(query_TNE, step_keys=step_keys, step_values=step_values)
        feature_TH = head.finish(attended_TNE, feature_TH=feature_TH)
        outputs.append(feature_TH[document.slots[step]])
    return outputs


def step_weights(num_steps: int, *, decay: float) -> list[float]:
    """Share of each step in the loss: proportional to decay^i, adding up to 1."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]
