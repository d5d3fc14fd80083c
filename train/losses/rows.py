"""What a distillation loss is given and gives back.

Shapes: R rows (slot and step pairs), P teacher rows, H hidden, D draft vocabulary, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eyas.train.features.teacher import (
    Distributions,
    HiddenTeacher,
    Teacher,
    hidden_distributions,
    top_k_distributions,
)
from eyas.train.losses.terms import TokenLoss


@dataclass(frozen=True)
class StepRows:
    """Rows of one TTT step.

    Attributes:
        hidden_RH: what the readout multiplies.
        targets_R: the ascending teacher rows that judge them. On the CPU nothing has to wait for the device.
        weight: what one row counts in the total loss.
    """

    hidden_RH: Tensor
    targets_R: Tensor
    weight: float


@dataclass(frozen=True)
class JudgedBy:
    """What rows are judged by: teacher rows, and how they become distributions over the draft vocabulary.

    `readout_DH` are the target's readout rows of the draft vocabulary, frozen, in the type that they are multiplied in;
    a top-k teacher does without. `draft_to_target_D` are the target ids of the draft vocabulary, ascending.
    """

    teacher: Teacher
    readout_DH: Tensor | None
    draft_to_target_D: Tensor

    def distributions(self, rows: Tensor | slice, *, terms: TokenLoss) -> Distributions:
        """Distributions of some of the rows, with what the terms need."""
        teacher = self.teacher.rows(rows)
        if isinstance(teacher, HiddenTeacher):
            assert self.readout_DH is not None, "last states become distributions by the target's readout"
            return hidden_distributions(
                teacher.hidden_PH, readout_DH=self.readout_DH, top_k=terms.num_likeliest, with_log=terms.needs_log_p
            )
        return top_k_distributions(
            teacher, draft_to_target_D=self.draft_to_target_D, top_k=terms.num_likeliest, with_log=terms.needs_log_p
        )


@dataclass(frozen=True)
class DistillationResult:
    """`loss` is differentiable; the sums over the rows of each step are for metrics.

    Attributes:
        loss: weighted sum of the token loss over steps and rows.
        kl_sums_K: forward KL, whatever the terms.
        hits_K: rows whose likeliest token is the teacher's; a tie for the likeliest is none.
        acceptance_sums_K: sum of min(p, q), the probability that speculative sampling accepts a draft.
    """

    loss: Tensor
    kl_sums_K: Tensor
    hits_K: Tensor
    acceptance_sums_K: Tensor
