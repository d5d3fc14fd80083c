"""Training-time test: the head runs K steps on its own features, and every step is trained.

Step 0 at slot t reads the target's feature; step i reads the head's own output of step i-1 at the same slot and the
embedding of token t+1+i, and attends to the step-0 keys of its document up to t and to its own keys of steps 1..i
(EAGLE-3, section 3; for EAGLE the same is the harmonised context alignment of HASS). heads/chain.py has the computation.

Trained-slot gathering. In a one-layer head the output at slot t is needed only for slot t's own loss and later steps;
every other slot is needed only for its step-0 key and value. So all slots pay for fc, norms, keys and values once, and
only the slots that the server drafts from (heads/slots.py) pay for queries, output projection, MLP, readout and later
steps. In a deeper head this holds for the last layer. The result is exact; `dense_hidden_states` is the reference that
computes every slot at every step.

Shapes: T slots of a pack, S_i slots trained at step i, H hidden, D draft vocabulary, K steps, R rows (slot and step pairs),
P teacher rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.heads.chain import Chains, dense_outputs
from eyas.heads.head import DraftHead
from eyas.train.features.teacher import HiddenTeacher, Teacher
from eyas.train.losses import JudgedBy, StepRows, TokenLoss, chunked_distillation
from eyas.train.pack import TrainingPack


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


class HeadObjective(nn.Module):
    """The head with its loss, as one module: what is wrapped for several processes."""

    target_readout_DH: Tensor | None

    def __init__(
        self, head: DraftHead, *, target_readout_DH: Tensor | None, losses: Losses, autocast: torch.dtype | None
    ) -> None:
        """
        Args:
            target_readout_DH: the target's readout rows of the draft vocabulary; None with a top-k teacher and a head
                that has a readout of its own.
            autocast: dtype of products in the forward pass, or None for the parameters' own.
        """
        super().__init__()
        self.head, self.losses, self.autocast = head, losses, autocast
        self.register_buffer("target_readout_DH", target_readout_DH, persistent=False)

    def forward(self, pack: TrainingPack, row_weights: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a pack over `len(row_weights)` steps, every row of step i counting `row_weights[i]`.

        Every trainable parameter gets a gradient, of zeros where the pack has no trained slot.

        Returns:
            The loss, and sums over the rows of each step [K], without gradients: `kl`, `hits` (rows whose argmax is the
            teacher's), `acceptance` (sum of min(p, q)), and with a feature loss `feature` (smooth L1).

        Raises:
            ValueError: a term of the loss needs what the teacher does not hold.
        """
        device = pack.states_TX.device.type
        with torch.autocast(device, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            loss, sums = self._loss(pack, row_weights)
        # Processes that add up gradients expect one of every parameter, whatever a pack holds.
        anchors = [parameter.flatten()[:0].sum() for parameter in self.head.parameters() if parameter.requires_grad]
        return loss + sum(anchors), sums

    def _loss(self, pack: TrainingPack, row_weights: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
        head, num_steps = self.head, len(row_weights)
        feature_weight = self.losses.feature_weight
        last_PH = last_states(pack.teacher) if feature_weight > 0.0 else None
        if pack.slots[0].numel() == 0:
            zeros_K = torch.zeros(num_steps, device=pack.states_TX.device)
            names = ("kl", "hits", "acceptance", *(() if last_PH is None else ("feature",)))
            return zeros_K.sum(), {name: zeros_K.clone() for name in names}
        outputs = trained_hidden_states(head, pack, num_steps=num_steps, detach=self.losses.detach)
        rows = [
            StepRows(hidden_RH=head.readout_input(output_SH), targets_R=targets_S, weight=weight)
            for output_SH, targets_S, weight in zip(outputs, pack.targets, row_weights, strict=False)
        ]
        tokens = chunked_distillation(
            rows,
            readout_DH=head.readout(self.target_readout_DH),
            judge=JudgedBy(pack.teacher, self.target_readout_DH, head.draft_to_target_D),
            terms=self.losses.token,
        )
        sums = {"kl": tokens.kl_sums_K, "hits": tokens.hits_K, "acceptance": tokens.acceptance_sums_K}
        if last_PH is None:
            return tokens.loss, sums
        distances_K = feature_distances(outputs, pack.targets, last_PH=last_PH)
        weights_K = torch.tensor(row_weights).to(distances_K, non_blocking=True)
        return tokens.loss + feature_weight * (distances_K * weights_K).sum(), sums | {"feature": distances_K.detach()}


def last_states(teacher: Teacher) -> Tensor:
    """The target's last states [P, H] that the feature loss is a distance to.

    Raises:
        ValueError: the teacher holds likeliest tokens instead.
    """
    if not isinstance(teacher, HiddenTeacher):
        raise ValueError(
            "train.losses.feature needs the target's last states, and these features hold its likeliest tokens "
            "only; set features.teacher=hidden and extract again, or set train.losses.feature=0"
        )
    return teacher.hidden_PH


def feature_distances(outputs: Sequence[Tensor], targets: Sequence[Tensor], *, last_PH: Tensor) -> Tensor:
    """Sum over the rows of each step of the mean smooth L1 distance to the target's hidden state (EAGLE, eq. 1), [K]."""
    return torch.stack(
        [
            F.smooth_l1_loss(output_SH.float(), last_PH[targets_S.to(last_PH.device)].float(), reduction="none")
            .mean(dim=-1)
            .sum()
            for output_SH, targets_S in zip(outputs, targets, strict=False)
        ]
    )


def trained_hidden_states(head: DraftHead, pack: TrainingPack, *, num_steps: int, detach: bool = False) -> list[Tensor]:
    """Outputs o^i [S_i, H] of the trained slots at each step; the pack has trained slots."""
    chains = Chains(
        head,
        states_TX=pack.states_TX,
        embedding_TH=_embedding(head, pack),
        slots_S=pack.slots[0],
        lengths=pack.lengths,
    )
    outputs = [chains.outputs_SH]
    for slots_S in pack.slots[1:num_steps]:
        if slots_S.numel() == 0:
            outputs.append(chains.outputs_SH[:0])
            continue
        # Later steps train a subset of the slots: the chains that still fit into the answer.
        chains.keep(slots_S)
        outputs.append(chains.follow(detach=detach))
    return outputs


def dense_hidden_states(head: DraftHead, pack: TrainingPack, *, num_steps: int, detach: bool = False) -> list[Tensor]:
    """Reference of `trained_hidden_states`: document by document, every slot at every step with dense masks, and the
    trained slots picked last."""
    embedding_TH = _embedding(head, pack)
    documents: list[list[Tensor]] = []
    begin = 0
    for length in pack.lengths:
        slots = slice(begin, begin + length)
        outputs = dense_outputs(
            head,
            states_TX=pack.states_TX[slots],
            embedding_TH=embedding_TH[slots],
            num_steps=num_steps,
            detach=detach,
        )
        documents.append(outputs)
        begin += length
    return [
        torch.cat([outputs[step] for outputs in documents])[slots_S]
        for step, slots_S in enumerate(pack.slots[:num_steps])
    ]


def _embedding(head: DraftHead, pack: TrainingPack) -> Tensor:
    """Embeddings [T, H] of the pack's tokens: its own rows of the target's table, or the head's."""
    if pack.embedding_TH is not None and head.embed_tokens is None:
        return pack.embedding_TH.to(head.fc.weight.dtype)
    return head.embed(pack.next_ids_T, embedding_VH=None)


def step_weights(num_steps: int, *, decay: float) -> list[float]:
    """Share of each step in the loss: proportional to decay^i, adding up to 1."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]
