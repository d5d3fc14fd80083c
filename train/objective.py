"""Training-time test: the head runs K steps on its own features, and every step is trained.

Step 0 at slot t reads the target's feature; step i reads the head's own output of step i-1 at the same slot and the
embedding of token t+1+i, and attends to the step-0 keys up to t and to its own keys of steps 1..i (EAGLE-3, section 3;
for EAGLE the same is the harmonised context alignment of HASS). heads/chain.py has the computation.

Trained-slot gathering. In a one-layer head the output at slot t is needed only for slot t's own loss and later steps;
every other slot is needed only for its step-0 key and value. So all slots pay for fc, norms, keys and values once, and
only the slots that the server drafts from (heads/slots.py) pay for queries, output projection, MLP, readout and later
steps. In a deeper head this holds for the last layer. The result is exact; `dense_hidden_states` is the reference that
computes every slot at every step.

Shapes: T slots, S_i slots trained at step i, H hidden, K steps, R rows (slot and step pairs), P teacher rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.heads.chain import Chains, dense_outputs
from eyas.heads.head import DraftHead
from eyas.train.batches import TrainingDocument
from eyas.train.features.teacher import HiddenTeacher, Teacher, concatenate
from eyas.train.losses import JudgedBy, StepRows, TokenLoss, chunked_distillation


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What a row's loss is made of.

    Attributes:
        token: terms on the token distributions.
        feature_weight: weight of the smooth L1 distance to the target's last hidden state (EAGLE).
        detach: cut the gradient between steps at the feature that is fed back, as HASS does.
    """

    token: TokenLoss
    feature_weight: float = 0.0
    detach: bool = False


@dataclass(frozen=True)
class ObjectiveResult:
    """`loss` is differentiable; the sums per step are for metrics: KL, rows whose argmax is the teacher's, smooth L1."""

    loss: Tensor
    kl_sums_K: Tensor
    hits_K: Tensor
    feature_sums_K: Tensor


def batch_loss(
    head: DraftHead,
    documents: Sequence[TrainingDocument],
    *,
    embedding_VH: Tensor,
    target_readout_DH: Tensor,
    row_weights: Sequence[float],
    losses: Losses,
) -> ObjectiveResult:
    """Loss of a batch of documents over `len(row_weights)` steps, every row of step i counting `row_weights[i]`.

    Raises:
        ValueError: a term of the loss needs what the teacher does not hold.
    """
    num_steps = len(row_weights)
    hidden: list[list[Tensor]] = [[] for _ in range(num_steps)]
    targets: list[list[Tensor]] = [[] for _ in range(num_steps)]
    base = 0
    for document in documents:
        outputs = trained_hidden_states(
            head, document, embedding_VH=embedding_VH, num_steps=num_steps, detach=losses.detach
        )
        for step, output_SH in enumerate(outputs):
            hidden[step].append(output_SH)
            targets[step].append(document.targets[step] + base)
        base += len(document.teacher)
    outputs_K = [torch.cat(rows) for rows in hidden]
    targets_K = [torch.cat(rows) for rows in targets]
    teacher = concatenate([document.teacher for document in documents])
    rows = [
        StepRows(hidden_RH=head.readout_input(output_RH), targets_R=targets_R, weight=weight)
        for output_RH, targets_R, weight in zip(outputs_K, targets_K, row_weights, strict=True)
    ]
    tokens = chunked_distillation(
        rows,
        readout_DH=head.readout(target_readout_DH),
        judge=JudgedBy(teacher, target_readout_DH, head.draft_to_target_D),
        terms=losses.token,
    )
    if losses.feature_weight == 0.0:
        return ObjectiveResult(tokens.loss, tokens.kl_sums_K, tokens.hits_K, torch.zeros_like(tokens.kl_sums_K))
    distances_K = feature_distances(outputs_K, targets_K, last_PH=last_states(teacher))
    weights_K = torch.tensor(row_weights, device=distances_K.device)
    loss = tokens.loss + losses.feature_weight * (distances_K * weights_K).sum()
    return ObjectiveResult(loss, tokens.kl_sums_K, tokens.hits_K, distances_K.detach())


def last_states(teacher: Teacher) -> Tensor:
    """The target's last states [P, H] that the feature loss is a distance to.

    Raises:
        ValueError: the teacher holds likeliest tokens instead.
    """
    if not isinstance(teacher, HiddenTeacher):
        raise ValueError(
            "train.feature_loss_weight needs the target's last states, and these features hold its likeliest tokens "
            "only; set features.teacher=hidden and extract again, or set train.feature_loss_weight=0"
        )
    return teacher.hidden_PH


def feature_distances(outputs_K: Sequence[Tensor], targets_K: Sequence[Tensor], *, last_PH: Tensor) -> Tensor:
    """Sum over the rows of each step of the mean smooth L1 distance to the target's hidden state (EAGLE, eq. 1), [K]."""
    return torch.stack(
        [
            F.smooth_l1_loss(output_RH.float(), last_PH[targets_R].float(), reduction="none").mean(dim=-1).sum()
            for output_RH, targets_R in zip(outputs_K, targets_K, strict=True)
        ]
    )


def trained_hidden_states(
    head: DraftHead, document: TrainingDocument, *, embedding_VH: Tensor, num_steps: int, detach: bool = False
) -> list[Tensor]:
    """Outputs o^i [S_i, H] of the trained slots at each step."""
    chains = Chains(
        head,
        states_TX=document.states_TX,
        next_ids_T=document.next_ids_T,
        embedding_VH=embedding_VH,
        slots_S=document.slots[0],
    )
    outputs = [chains.outputs_SH]
    for step in range(1, num_steps):
        # Later steps train a subset of the slots: the chains that still fit into the answer.
        chains.keep(document.slots[step])
        outputs.append(chains.advance(document.next_ids_T[chains.slots_S + step], detach=detach))
    return outputs


def dense_hidden_states(
    head: DraftHead, document: TrainingDocument, *, embedding_VH: Tensor, num_steps: int, detach: bool = False
) -> list[Tensor]:
    """Reference of `trained_hidden_states`: every slot at every step with dense masks, the trained slots picked last."""
    outputs = dense_outputs(
        head,
        states_TX=document.states_TX,
        next_ids_T=document.next_ids_T,
        embedding_VH=embedding_VH,
        num_steps=num_steps,
        detach=detach,
    )
    return [output_TH[slots_S] for output_TH, slots_S in zip(outputs, document.slots, strict=False)]


def step_weights(num_steps: int, *, decay: float) -> list[float]:
    """Share of each step in the loss: proportional to decay^i, adding up to 1."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]
