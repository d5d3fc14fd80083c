"""Distillation loss of a head, in chunks: no [slots, D] tensor of the whole batch ever exists.

The loss of a row (a slot at a step) is the forward KL divergence from the target's distribution over the draft
vocabulary, renormalised, to the head's. `chunked_distillation` walks over target positions; the teacher's
distribution of a position is computed once and serves every step that points at it, and the gradients with respect to
the hidden states and the readout are made in the same pass, so nothing is kept for a backward pass. For the softmax
readout z = W h the gradient is closed: dL/dz = w (q - p).

`dense_distillation` is the reference: plain autograd over whole tensors.

Shapes: R rows (slot and step pairs), P target positions, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_POSITIONS = 512


@dataclass(frozen=True)
class StepRows:
    """Rows of one TTT step: `hidden_RH` are the head's normed outputs, `positions_R` the ascending target positions they
    predict the distribution of, `weight` what one row counts in the total loss."""

    hidden_RH: Tensor
    positions_R: Tensor
    weight: float


@dataclass(frozen=True)
class DistillationResult:
    """`loss` is differentiable; the sums per step are for metrics: KL and rows whose argmax is the teacher's."""

    loss: Tensor
    kl_sums_K: Tensor
    hits_K: Tensor


def chunked_distillation(
    steps: Sequence[StepRows],
    *,
    readout_DH: Tensor,
    teacher_hidden_PH: Tensor,
    teacher_readout_DH: Tensor,
    chunk_positions: int = CHUNK_POSITIONS,
) -> DistillationResult:
    """Weighted sum over steps and rows of KL(teacher || head), with gradients for `hidden_RH` and `readout_DH`.

    Args:
        readout_DH: the head's readout. teacher_hidden_PH: the target's last states, after its final norm.
        teacher_readout_DH: the target's readout rows of the draft vocabulary, frozen.
    """
    sizes = [step.hidden_RH.shape[0] for step in steps]
    hidden_RH = torch.cat([step.hidden_RH for step in steps])
    loss, kl_sums_K, hits_K = _ChunkedDistillation.apply(
        hidden_RH,
        readout_DH,
        [step.positions_R for step in steps],
        [step.weight for step in steps],
        sizes,
        teacher_hidden_PH,
        teacher_readout_DH,
        chunk_positions,
        _matmul_dtype(hidden_RH),
    )
    return DistillationResult(loss=loss, kl_sums_K=kl_sums_K, hits_K=hits_K)


def dense_distillation(
    steps: Sequence[StepRows], *, readout_DH: Tensor, teacher_hidden_PH: Tensor, teacher_readout_DH: Tensor
) -> DistillationResult:
    """Reference of `chunked_distillation`."""
    teacher_PD = torch.log_softmax((teacher_hidden_PH @ teacher_readout_DH.T).float(), dim=-1)
    losses, sums, hits = [], [], []
    for step in steps:
        log_q_RD = torch.log_softmax((step.hidden_RH @ readout_DH.T).float(), dim=-1)
        log_p_RD = teacher_PD[step.positions_R]
        kl_R = F.kl_div(log_q_RD, log_p_RD, log_target=True, reduction="none").sum(dim=-1)
        losses.append(step.weight * kl_R.sum())
        sums.append(kl_R.sum().detach())
        hits.append((log_q_RD.argmax(dim=-1) == log_p_RD.argmax(dim=-1)).sum())
    return DistillationResult(loss=torch.stack(losses).sum(), kl_sums_K=torch.stack(sums), hits_K=torch.stack(hits))


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        readout_DH: Tensor,
        positions: list[Tensor],
        weights: list[float],
        sizes: list[int],
        teacher_hidden_PH: Tensor,
        teacher_readout_DH: Tensor,
        chunk_positions: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student = readout_DH.to(dtype)
        teacher = teacher_readout_DH.to(dtype)
        hidden = list(hidden_RH.to(dtype).split(sizes))
        grad_hidden = [torch.zeros_like(rows, dtype=hidden_RH.dtype) for rows in hidden]
        grad_readout_DH = torch.zeros_like(readout_DH) if ctx.needs_input_grad[1] else None
        kl_sums_K = hidden_RH.new_zeros(len(hidden), dtype=torch.float32)
        hits_K = torch.zeros(len(hidden), dtype=torch.long, device=hidden_RH.device)
        for begin in range(0, teacher_hidden_PH.shape[0], chunk_positions):
            end = min(begin + chunk_positions, teacher_hidden_PH.shape[0])
            bounds = [_rows_between(positions_R, begin, end) for positions_R in positions]
            if all(low == high for low, high in bounds):
                continue
            teacher_CD = torch.log_softmax((teacher_hidden_PH[begin:end].to(dtype) @ teacher.T).float(), dim=-1)
            probability_CD = teacher_CD.exp()
            negative_entropy_C = (probability_CD * teacher_CD).sum(dim=-1)
            best_C = teacher_CD.argmax(dim=-1)
            for step, (low, high) in enumerate(bounds):
                if low == high:
                    continue
                rows = slice(low, high)
                local_R = positions[step][rows] - begin
                log_q_RD = torch.log_softmax((hidden[step][rows] @ student.T).float(), dim=-1)
                p_RD = probability_CD[local_R]
                kl_sums_K[step] += negative_entropy_C[local_R].sum() - torch.dot(p_RD.flatten(), log_q_RD.flatten())
                hits_K[step] += (log_q_RD.argmax(dim=-1) == best_C[local_R]).sum()
                grad_RD = log_q_RD.exp_().sub_(p_RD).mul_(weights[step]).to(dtype)
                grad_hidden[step][rows] = (grad_RD @ student).to(hidden_RH.dtype)
                if grad_readout_DH is not None:
                    grad_readout_DH += grad_RD.T @ hidden[step][rows]
        ctx.save_for_backward(torch.cat(grad_hidden), grad_readout_DH)
        loss = (kl_sums_K * torch.tensor(weights, device=kl_sums_K.device)).sum()
        ctx.mark_non_differentiable(kl_sums_K, hits_K)
        return loss, kl_sums_K, hits_K

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_RH, grad_readout_DH = ctx.saved_tensors
        scale = grad_outputs[0]
        return (
            grad_hidden_RH * scale,
            None if grad_readout_DH is None else grad_readout_DH * scale,
            *[None] * 7,
        )


def _rows_between(positions_R: Tensor, begin: int, end: int) -> tuple[int, int]:
    bounds = torch.searchsorted(positions_R, torch.tensor([begin, end], device=positions_R.device))
    return int(bounds[0]), int(bounds[1])


def _matmul_dtype(tensor: Tensor) -> torch.dtype:
    """A custom function is outside autocast, so it takes autocast's dtype itself."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
