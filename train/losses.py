"""Distillation loss of a head, in chunks: no [slots, D] tensor of the whole batch ever exists.

The loss of a row (a slot at a step) is the forward KL divergence from the target's distribution over the draft
vocabulary, renormalised, to the head's; it differs from soft cross-entropy by the target's entropy, a constant. HASS
(arXiv 2408.15766, eq. 3) adds the cross-entropy over the target's k likeliest tokens alone. `chunked_distillation` walks over target positions; the teacher's
distribution of a position is computed once and serves every step that points at it, and the gradients with respect to
the hidden states and the readout are made in the same pass, so nothing is kept for a backward pass. For the softmax
readout z = W h the gradient is closed: dKL/dz = q - p, and of the top-k term, with p_k the target's distribution cut to
its k likeliest tokens: sum(p_k) q - p_k.

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


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Weights of the two terms on a head's token distributions; `top_k` is k of the second."""

    weight: float = 1.0
    top_k: int = 10
    top_k_weight: float = 0.0


@dataclass(frozen=True)
class StepRows:
    """Rows of one TTT step: `hidden_RH` are what the readout multiplies, `positions_R` the ascending target positions they
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
    terms: TokenLoss,
    chunk_positions: int = CHUNK_POSITIONS,
) -> DistillationResult:
    """Weighted sum over steps and rows of the token loss, with gradients for `hidden_RH` and `readout_DH`.

    Args:
        readout_DH: the head's readout. teacher_hidden_PH: the target's last states, after its final norm.
        teacher_readout_DH: the target's readout rows of the draft vocabulary, frozen.
    """
    sizes = [step.hidden_RH.shape[0] for step in steps]
    hidden_RH = torch.cat([step.hidden_RH for step in steps])
    # Positions that no row points at, such as a prompt's, cost no distribution.
    needed_N, places = torch.unique(torch.cat([step.positions_R for step in steps]), return_inverse=True)
    loss, kl_sums_K, hits_K = _ChunkedDistillation.apply(
        hidden_RH,
        readout_DH,
        list(places.split(sizes)),
        [step.weight for step in steps],
        sizes,
        teacher_hidden_PH[needed_N],
        teacher_readout_DH,
        terms,
        chunk_positions,
        _matmul_dtype(hidden_RH),
    )
    return DistillationResult(loss=loss, kl_sums_K=kl_sums_K, hits_K=hits_K)


def dense_distillation(
    steps: Sequence[StepRows],
    *,
    readout_DH: Tensor,
    teacher_hidden_PH: Tensor,
    teacher_readout_DH: Tensor,
    terms: TokenLoss,
) -> DistillationResult:
    """Reference of `chunked_distillation`."""
    teacher_PD = torch.log_softmax((teacher_hidden_PH @ teacher_readout_DH.T).float(), dim=-1)
    losses, sums, hits = [], [], []
    for step in steps:
        log_q_RD = torch.log_softmax((step.hidden_RH @ readout_DH.T).float(), dim=-1)
        log_p_RD = teacher_PD[step.positions_R]
        kl_R = F.kl_div(log_q_RD, log_p_RD, log_target=True, reduction="none").sum(dim=-1)
        best_RK = log_p_RD.topk(min(terms.top_k, log_p_RD.shape[1]), dim=-1).indices
        top_R = -(log_p_RD.gather(1, best_RK).exp() * log_q_RD.gather(1, best_RK)).sum(dim=-1)
        losses.append(step.weight * (terms.weight * kl_R + terms.top_k_weight * top_R).sum())
        sums.append(kl_R.sum().detach())
        hits.append((log_q_RD.argmax(dim=-1) == log_p_RD.argmax(dim=-1)).sum())
    return DistillationResult(loss=torch.stack(losses).sum(), kl_sums_K=torch.stack(sums), hits_K=torch.stack(hits))


@dataclass(frozen=True)
class _Teacher:
    """The target's distributions of one chunk of positions."""

    probability_CD: Tensor
    negative_entropy_C: Tensor
    best_C: Tensor
    top_CD: Tensor | None
    """Probabilities of the k likeliest tokens, zero elsewhere; None without a top-k term."""

    @classmethod
    def of(cls, hidden_CH: Tensor, *, readout_DH: Tensor, terms: TokenLoss) -> _Teacher:
        log_CD = torch.log_softmax((hidden_CH.to(readout_DH.dtype) @ readout_DH.T).float(), dim=-1)
        probability_CD = log_CD.exp()
        top_CD = None
        if terms.top_k_weight > 0.0:
            values, indices = probability_CD.topk(min(terms.top_k, probability_CD.shape[1]), dim=-1)
            top_CD = torch.zeros_like(probability_CD).scatter_(1, indices, values)
        return cls(probability_CD, (probability_CD * log_CD).sum(dim=-1), log_CD.argmax(dim=-1), top_CD)


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
        terms: TokenLoss,
        chunk_positions: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student = readout_DH.to(dtype)
        teacher_rows = teacher_readout_DH.to(dtype)
        hidden = list(hidden_RH.to(dtype).split(sizes))
        grad_hidden = [torch.zeros_like(rows, dtype=hidden_RH.dtype) for rows in hidden]
        grad_readout_DH = torch.zeros_like(readout_DH) if ctx.needs_input_grad[1] else None
        sums = [hidden_RH.new_zeros(len(hidden), dtype=torch.float32) for _ in range(2)]
        hits_K = torch.zeros(len(hidden), dtype=torch.long, device=hidden_RH.device)
        for begin in range(0, teacher_hidden_PH.shape[0], chunk_positions):
            end = min(begin + chunk_positions, teacher_hidden_PH.shape[0])
            bounds = [_rows_between(positions_R, begin, end) for positions_R in positions]
            if all(low == high for low, high in bounds):
                continue
            teacher = _Teacher.of(teacher_hidden_PH[begin:end], readout_DH=teacher_rows, terms=terms)
            for step, (low, high) in enumerate(bounds):
                if low == high:
                    continue
                rows = slice(low, high)
                local_R = positions[step][rows] - begin
                log_q_RD = torch.log_softmax((hidden[step][rows] @ student.T).float(), dim=-1)
                hits_K[step] += (log_q_RD.argmax(dim=-1) == teacher.best_C[local_R]).sum()
                kl, top, grad_RD = _rows_loss(log_q_RD, local_R, teacher=teacher, terms=terms)
                sums[0][step] += kl
                sums[1][step] += top
                grad_RD = grad_RD.mul_(weights[step]).to(dtype)
                grad_hidden[step][rows] = (grad_RD @ student).to(hidden_RH.dtype)
                if grad_readout_DH is not None:
                    grad_readout_DH += grad_RD.T @ hidden[step][rows]
        ctx.save_for_backward(torch.cat(grad_hidden), grad_readout_DH)
        weights_K = torch.tensor(weights, device=hits_K.device)
        loss = ((terms.weight * sums[0] + terms.top_k_weight * sums[1]) * weights_K).sum()
        ctx.mark_non_differentiable(sums[0], hits_K)
        return loss, sums[0], hits_K

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_RH, grad_readout_DH = ctx.saved_tensors
        scale = grad_outputs[0]
        return (
            grad_hidden_RH * scale,
            None if grad_readout_DH is None else grad_readout_DH * scale,
            *[None] * 8,
        )


def _rows_loss(
    log_q_RD: Tensor, local_R: Tensor, *, teacher: _Teacher, terms: TokenLoss
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Sums of KL and of the top-k term over rows, and the gradient [R, D] of their weighted sum; `log_q_RD` is used up."""
    p_RD = teacher.probability_CD[local_R]
    kl = teacher.negative_entropy_C[local_R].sum() - torch.dot(p_RD.flatten(), log_q_RD.flatten())
    if teacher.top_CD is None:
        return kl, 0.0, log_q_RD.exp_().sub_(p_RD).mul_(terms.weight)
    top_RD = teacher.top_CD[local_R]
    top = -torch.dot(top_RD.flatten(), log_q_RD.flatten())
    mass_R1 = terms.weight + terms.top_k_weight * top_RD.sum(dim=-1, keepdim=True)
    grad_RD = log_q_RD.exp_().mul_(mass_R1).sub_(p_RD, alpha=terms.weight).sub_(top_RD, alpha=terms.top_k_weight)
    return kl, top, grad_RD


def _rows_between(positions_R: Tensor, begin: int, end: int) -> tuple[int, int]:
    bounds = torch.searchsorted(positions_R, torch.tensor([begin, end], device=positions_R.device))
    return int(bounds[0]), int(bounds[1])


def _matmul_dtype(tensor: Tensor) -> torch.dtype:
    """A custom function is outside autocast, so it takes autocast's dtype itself."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
