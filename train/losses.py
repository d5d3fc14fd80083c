"""Distillation loss of a head, in chunks: no [slots, D] tensor of the whole batch ever exists.

The loss of a row (a slot at a step) is the forward KL divergence from the target's distribution over the draft
vocabulary, renormalised, to the head's; it differs from soft cross-entropy by the target's entropy, a constant. HASS
(arXiv 2408.15766, eq. 3) adds the cross-entropy over the target's k likeliest tokens alone.

`chunked_distillation` walks over teacher rows; the distribution of a row is computed once and serves every step that
points at it, and the gradients with respect to the hidden states and the readout are made in the same pass, so nothing
is kept for a backward pass. For the softmax readout z = W h the gradient is closed: dKL/dz = q - p, and of the top-k
term, with p_k the target's distribution cut to its k likeliest tokens: sum(p_k) q - p_k. Where the teacher stored some
tokens only (features/teacher.py), the others are one bucket of mass p_rest to which the head gives q_rest, and their p
in these formulas is p_rest q / q_rest.

`dense_distillation` is the reference: plain autograd over whole tensors.

Shapes: R rows (slot and step pairs), P teacher rows, C rows of a chunk, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.train.features.teacher import (
    Distributions,
    HiddenTeacher,
    Teacher,
    TopKTeacher,
    hidden_distributions,
    top_k_distributions,
)

CHUNK_POSITIONS = 512


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Weights of the two terms on a head's token distributions; `top_k` is k of the second."""

    weight: float = 1.0
    top_k: int = 10
    top_k_weight: float = 0.0


@dataclass(frozen=True)
class StepRows:
    """Rows of one TTT step: `hidden_RH` are what the readout multiplies, `targets_R` the ascending teacher rows that
    judge them, `weight` what one row counts in the total loss."""

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
    readout_DH: Tensor
    draft_to_target_D: Tensor

    def distributions(self, rows: Tensor | slice, *, terms: TokenLoss) -> Distributions:
        """Distributions of some of the rows."""
        teacher, top_k = self.teacher.rows(rows), terms.top_k if terms.top_k_weight > 0.0 else None
        if isinstance(teacher, HiddenTeacher):
            return hidden_distributions(teacher.hidden_PH, readout_DH=self.readout_DH, top_k=top_k)
        return top_k_distributions(teacher, draft_to_target_D=self.draft_to_target_D, top_k=top_k)


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
    judge: JudgedBy,
    terms: TokenLoss,
    chunk_positions: int = CHUNK_POSITIONS,
) -> DistillationResult:
    """Weighted sum over steps and rows of the token loss, with gradients for `hidden_RH` and `readout_DH`.

    Args:
        readout_DH: the head's readout.

    Raises:
        ValueError: the top-k term wants more tokens than the teacher stored.
    """
    require_terms(terms, teacher=judge.teacher)
    sizes = [step.hidden_RH.shape[0] for step in steps]
    hidden_RH = torch.cat([step.hidden_RH for step in steps])
    dtype = _matmul_dtype(hidden_RH)
    # Teacher rows that no row points at cost no distribution.
    needed_N, places = torch.unique(torch.cat([step.targets_R for step in steps]), return_inverse=True)
    loss, kl_sums_K, hits_K = _ChunkedDistillation.apply(
        hidden_RH,
        readout_DH,
        list(places.split(sizes)),
        [step.weight for step in steps],
        sizes,
        JudgedBy(judge.teacher.rows(needed_N), judge.readout_DH.to(dtype), judge.draft_to_target_D),
        terms,
        chunk_positions,
        dtype,
    )
    return DistillationResult(loss=loss, kl_sums_K=kl_sums_K, hits_K=hits_K)


def require_terms(terms: TokenLoss, *, teacher: Teacher) -> None:
    """
    Raises:
        ValueError: the top-k term wants more tokens than a top-k teacher stored.
    """
    if isinstance(teacher, TopKTeacher) and terms.top_k_weight > 0.0 and terms.top_k > teacher.ids_PK.shape[1]:
        raise ValueError(
            f"train.top_k={terms.top_k} is more than the {teacher.ids_PK.shape[1]} tokens that the features hold of each "
            "teacher distribution; lower it, or raise features.teacher_k and extract again"
        )


def dense_distillation(
    steps: Sequence[StepRows], *, readout_DH: Tensor, judge: JudgedBy, terms: TokenLoss
) -> DistillationResult:
    """Reference of `chunked_distillation`."""
    target = judge.distributions(slice(None), terms=terms)
    losses, sums, hits = [], [], []
    for step in steps:
        log_q_RD = torch.log_softmax((step.hidden_RH @ readout_DH.T).float(), dim=-1)
        p_RD = target.probability_CD[step.targets_R]
        kl_R = (torch.xlogy(p_RD, p_RD) - p_RD * log_q_RD).sum(dim=-1)
        if target.rest_C is not None and target.outside_CD is not None:
            rest_R, outside_RD = target.rest_C[step.targets_R], target.outside_CD[step.targets_R]
            q_rest_R = torch.where(outside_RD, log_q_RD.exp(), 0.0).sum(dim=-1)
            kl_R = kl_R + torch.xlogy(rest_R, rest_R) - rest_R * q_rest_R.clamp_min(1e-30).log()
        best_RK = p_RD.topk(min(terms.top_k, p_RD.shape[1]), dim=-1).indices
        top_R = -(p_RD.gather(1, best_RK) * log_q_RD.gather(1, best_RK)).sum(dim=-1)
        losses.append(step.weight * (terms.weight * kl_R + terms.top_k_weight * top_R).sum())
        sums.append(kl_R.sum().detach())
        hits.append((log_q_RD.argmax(dim=-1) == target.best_C[step.targets_R]).sum())
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
        judge: JudgedBy,
        terms: TokenLoss,
        chunk_positions: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student = readout_DH.to(dtype)
        hidden = list(hidden_RH.to(dtype).split(sizes))
        grad_hidden = [torch.zeros_like(rows, dtype=hidden_RH.dtype) for rows in hidden]
        grad_readout_DH = torch.zeros_like(readout_DH) if ctx.needs_input_grad[1] else None
        sums = [hidden_RH.new_zeros(len(hidden), dtype=torch.float32) for _ in range(2)]
        hits_K = torch.zeros(len(hidden), dtype=torch.long, device=hidden_RH.device)
        for begin in range(0, len(judge.teacher), chunk_positions):
            end = min(begin + chunk_positions, len(judge.teacher))
            bounds = [_rows_between(targets_R, begin, end) for targets_R in positions]
            if all(low == high for low, high in bounds):
                continue
            target = judge.distributions(slice(begin, end), terms=terms)
            for step, (low, high) in enumerate(bounds):
                if low == high:
                    continue
                rows = slice(low, high)
                local_R = positions[step][rows] - begin
                log_q_RD = torch.log_softmax((hidden[step][rows] @ student.T).float(), dim=-1)
                hits_K[step] += (log_q_RD.argmax(dim=-1) == target.best_C[local_R]).sum()
                kl, top, grad_RD = _rows_loss(log_q_RD, local_R, target=target, terms=terms)
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
            *[None] * 7,
        )


def _rows_loss(
    log_q_RD: Tensor, local_R: Tensor, *, target: Distributions, terms: TokenLoss
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Sums of KL and of the top-k term over rows, and the gradient [R, D] of their weighted sum; `log_q_RD` is used up."""
    p_RD = target.probability_CD[local_R]
    kl = target.negative_entropy_C[local_R].sum() - torch.dot(p_RD.flatten(), log_q_RD.flatten())
    if target.rest_C is not None and target.outside_CD is not None:
        more, rest_RD = _bucket(log_q_RD, rest_R=target.rest_C[local_R], outside_RD=target.outside_CD[local_R])
        kl, p_RD = kl + more, p_RD + rest_RD
    if target.top_CD is None:
        return kl, 0.0, log_q_RD.exp_().sub_(p_RD).mul_(terms.weight)
    top_RD = target.top_CD[local_R]
    top = -torch.dot(top_RD.flatten(), log_q_RD.flatten())
    mass_R1 = terms.weight + terms.top_k_weight * top_RD.sum(dim=-1, keepdim=True)
    grad_RD = log_q_RD.exp_().mul_(mass_R1).sub_(p_RD, alpha=terms.weight).sub_(top_RD, alpha=terms.top_k_weight)
    return kl, top, grad_RD


def _bucket(log_q_RD: Tensor, *, rest_R: Tensor, outside_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of -p_rest log q_rest, and p_rest q / q_rest [R, D]: the bucket's mass spread as the head spreads it."""
    log_out_RD = log_q_RD.masked_fill(~outside_RD, float("-inf"))
    log_rest_R = torch.logsumexp(log_out_RD, dim=-1)
    # Where every draft token is stored there is no bucket: p_rest is 0 and log q_rest is -inf.
    log_rest_R = torch.where(rest_R > 0.0, log_rest_R, 0.0)
    return -(rest_R * log_rest_R).sum(), (log_out_RD - log_rest_R[:, None]).exp() * rest_R[:, None]


def _rows_between(targets_R: Tensor, begin: int, end: int) -> tuple[int, int]:
    bounds = torch.searchsorted(targets_R, torch.tensor([begin, end], device=targets_R.device))
    return int(bounds[0]), int(bounds[1])


def _matmul_dtype(tensor: Tensor) -> torch.dtype:
    """A custom function is outside autocast, so it takes autocast's dtype itself."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
