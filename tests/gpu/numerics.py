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

TOKENS, DOCUMENT_TOKENS = 512, 128
"""Of the pack, and of a document on average: four documents, of which one is longer than a tile of the attention's mask and
one begins behind a tile that it must not see."""
FEWEST_DOCUMENTS = 3


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Largest relative differences; of a gradient the norm of the difference over the norm; of `hits` by rows."""

    loss: float
    gradient: float
    acceptance: float
    hits: float


LIMITS: dict[Precision, Limit] = {
    "fp32": Limit(loss=1e-4, gradient=1e-3, acceptance=1e-3, hits=1e-2),
    "bf16": Limit(loss=5e-3, gradient=1e-1, acceptance=5e-2, hits=5e-2),
}


@dataclass(frozen=True)
class Outcome:
    """What a forward and a backward pass give: loss, sums over the rows of all steps, gradients by parameter on the CPU."""

    loss: float
    hits: float
    acceptance: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The device's outcome beside the reference's."""

    precision: Precision
    loss: float
    reference_loss: float
    hits: float
    reference_hits: float
    acceptance: float
    reference_acceptance: float
    rows: int
    gradient: float
    parameter: str

    @property
    def loss_error(self) -> float:
        """Relative difference of the losses."""
        return abs(self.loss - self.reference_loss) / abs(self.reference_loss)

    @property
    def acceptance_error(self) -> float:
        """Relative difference of the sums of min(p, q)."""
        return abs(self.acceptance - self.reference_acceptance) / abs(self.reference_acceptance)

    @property
    def fits(self) -> bool:
        """Whether all differences are within `LIMITS`; NaN is not."""
        limit = LIMITS[self.precision]
        return (
            self.loss_error <= limit.loss
            and self.gradient <= limit.gradient
            and self.acceptance_error <= limit.acceptance
            and abs(self.hits - self.reference_hits) <= limit.hits * self.rows
        )


def compare(
    cell: Cell, *, device: torch.device, precisions: Sequence[Precision] = ("fp32", "bf16")
) -> list[Difference]:
    """Differences on `device` in each precision, for the documents of a cell; of one document alone nothing could leak."""
    config, documents = cell.config, chat_documents(cell)
    assert len(documents) >= FEWEST_DOCUMENTS, f"{len(documents)} documents"
    embedding_VH = random_weights((config.vocab_size, config.hidden_size), seed=1, dtype=torch.bfloat16)
    readout_DH = random_weights((config.draft_vocab_size, config.hidden_size), seed=2, dtype=torch.float32, std=0.1)
    head = random_head(config, train_readout=True, seed=cell.seed)
    pack = training_pack(documents, source=head.feature_source, num_steps=cell.ttt_steps, embedding_VH=embedding_VH)
    shares = step_weights(cell.ttt_steps, decay=STEP_DECAY)
    weights = [share / max(slots_S.shape[0], 1) for share, slots_S in zip(shares, pack.slots, strict=True)]
    expected = reference(head, pack, readout_DH=readout_DH, weights=weights)
    head.to(device)
    found = []
    for precision in precisions:
        outcome = on_device(
            head, pack.to(device), readout_DH=readout_DH.to(device), weights=weights, precision=precision
        )
        rows = sum(slots_S.shape[0] for slots_S in pack.slots)
        found.append(difference(outcome, expected, rows=rows, precision=precision))
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
    return _outcome(head, loss=dense.loss, hits_K=dense.hits_K, acceptance_K=dense.acceptance_sums_K)


def on_device(
    head: DraftHead, pack: TrainingPack, *, readout_DH: Tensor, weights: Sequence[float], precision: Precision
) -> Outcome:
    """Loss and gradients as a run computes them, where head and pack are."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    loss, sums = objective(head, readout_DH=readout_DH.to(dtype), precision=precision)(pack, list(weights))
    loss.backward()
    return _outcome(head, loss=loss, hits_K=sums["hits"], acceptance_K=sums["acceptance"])


def difference(outcome: Outcome, expected: Outcome, *, rows: int, precision: Precision) -> Difference:
    """Losses and sums over `rows` rows side by side, and the gradient that differs most."""
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
        acceptance=outcome.acceptance,
        reference_acceptance=expected.acceptance,
        rows=rows,
        gradient=errors[worst],
        parameter=worst,
    )


def _outcome(head: DraftHead, *, loss: Tensor, hits_K: Tensor, acceptance_K: Tensor) -> Outcome:
    """Take the gradients off the head."""
    gradients = {}
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = parameter.grad.detach().float().cpu().clone()
        parameter.grad = None
    return Outcome(
        loss=float(loss.detach()), hits=float(hits_K.sum()), acceptance=float(acceptance_K.sum()), gradients=gradients
    )
