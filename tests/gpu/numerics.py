"""The training step on a device against its reference on the CPU: same loss, same counts, same gradients.

The reference computes every slot at every step with dense masks and whole logits, in float32 (`dense_hidden_states`,
`dense_distillation`); the device runs what a run runs. Weights and documents are random in a preset's shapes.

Shapes: D draft vocabulary, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.heads.head import DraftHead
from eyas.train.losses import JudgedBy, StepRows, TokenLoss, dense_distillation
from eyas.train.objective import dense_hidden_states, step_weights
from eyas.train.pack import TrainingPack, training_pack
from tests.benchmarks.train_cells import Cell, Precision, chat_documents, random_weights
from tests.benchmarks.train_ours import STEP_DECAY, objective, random_head

LIMITS: dict[Precision, tuple[float, float]] = {"fp32": (1e-4, 1e-3), "bf16": (5e-3, 1e-1)}
"""Largest relative difference of the loss, and of a parameter's gradient (norm of the difference over the norm)."""


@dataclass(frozen=True)
class Outcome:
    """What a forward and a backward pass give; gradients by parameter, on the CPU."""

    loss: float
    hits: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The device's outcome beside the reference's."""

    precision: Precision
    loss: float
    reference_loss: float
    hits: float
    reference_hits: float
    gradient: float
    parameter: str

    @property
    def loss_error(self) -> float:
        """Relative difference of the losses."""
        return abs(self.loss - self.reference_loss) / abs(self.reference_loss)

    @property
    def fits(self) -> bool:
        """Whether both differences are within `LIMITS`; NaN is not."""
        loss, gradient = LIMITS[self.precision]
        return self.loss_error <= loss and self.gradient <= gradient


def compare(
    cell: Cell, *, device: torch.device, precisions: Sequence[Precision] = ("fp32", "bf16")
) -> list[Difference]:
    """Differences on `device` in each precision, for the documents of a cell."""
    config = cell.config
    embedding_VH = random_weights((config.vocab_size, config.hidden_size), seed=1, dtype=torch.bfloat16)
    readout_DH = random_weights((config.draft_vocab_size, config.hidden_size), seed=2, dtype=torch.float32, std=0.1)
    head = random_head(config, train_readout=True, seed=cell.seed)
    pack = training_pack(
        chat_documents(cell), source=head.feature_source, num_steps=cell.ttt_steps, embedding_VH=embedding_VH
    )
    shares = step_weights(cell.ttt_steps, decay=STEP_DECAY)
    weights = [share / max(slots_S.shape[0], 1) for share, slots_S in zip(shares, pack.slots, strict=True)]
    expected = reference(head, pack, readout_DH=readout_DH, weights=weights)
    head.to(device)
    found = []
    for precision in precisions:
        outcome = on_device(
            head, pack.to(device), readout_DH=readout_DH.to(device), weights=weights, precision=precision
        )
        found.append(difference(outcome, expected, precision=precision))
    return found


def reference(head: DraftHead, pack: TrainingPack, *, readout_DH: Tensor, weights: Sequence[float]) -> Outcome:
    """Loss and gradients by dense masks and the definitions of the loss."""
    outputs = dense_hidden_states(head, pack, num_steps=len(weights))
    dense = dense_distillation(
        [
            StepRows(hidden_RH=head.readout_input(output_SH), targets_R=targets_S, weight=weight)
            for output_SH, targets_S, weight in zip(outputs, pack.targets, weights, strict=True)
        ],
        readout_DH=head.readout(readout_DH),
        judge=JudgedBy(pack.teacher, readout_DH, head.draft_to_target_D),
        terms=TokenLoss(),
    )
    dense.loss.backward()
    return _outcome(head, loss=dense.loss, hits_K=dense.hits_K)


def on_device(
    head: DraftHead, pack: TrainingPack, *, readout_DH: Tensor, weights: Sequence[float], precision: Precision
) -> Outcome:
    """Loss and gradients as a run computes them, where head and pack are."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    loss, sums = objective(head, readout_DH=readout_DH.to(dtype), precision=precision)(pack, list(weights))
    loss.backward()
    return _outcome(head, loss=loss, hits_K=sums["hits"])


def difference(outcome: Outcome, expected: Outcome, *, precision: Precision) -> Difference:
    """Losses and counts side by side, and the gradient that differs most."""
    errors = {
        name: float((outcome.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.gradients.items()
    }
    # NaN is not above anything; here it is the worst.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return Difference(
        precision=precision,
        loss=outcome.loss,
        reference_loss=expected.loss,
        hits=outcome.hits,
        reference_hits=expected.hits,
        gradient=errors[worst],
        parameter=worst,
    )


def _outcome(head: DraftHead, *, loss: Tensor, hits_K: Tensor) -> Outcome:
    """Take the gradients off the head."""
    gradients = {}
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = parameter.grad.detach().float().cpu().clone()
        parameter.grad = None
    return Outcome(loss=float(loss.detach()), hits=float(hits_K.sum()), gradients=gradients)
