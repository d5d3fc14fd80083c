"""Small operations of a head with gradients written out: fewer passes over memory than their parts, and less kept.

On CUDA PyTorch has its own fused form of the norm. Every function here is held against its plain form in the tests.

Shapes: T slots, S chosen slots, H hidden, N heads, E head size, I width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(hidden_TH: Tensor, *, weight_H: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in the dtype of its input; inside it is float32 or wider."""
    if hidden_TH.device.type != "cpu":
        return F.rms_norm(hidden_TH, weight_H.shape, weight_H.to(hidden_TH.dtype), eps)
    return _RMSNorm.apply(hidden_TH, weight_H, eps)


def take_rows(rows: Tensor, places_S: Tensor) -> Tensor:
    """`rows[places_S]` where no place comes twice, so that the gradient is copied and not added up."""
    return _TakeRows.apply(rows, places_S)


def rotate(states_TNE: Tensor, *, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama: x cos + rotate_half(x) sin.

    Args:
        rotations: cosine and sine [T, E]; the two halves of each are equal.
    """
    cos_TE, sin_TE = rotations
    return _Rotate.apply(states_TNE, cos_TE.to(states_TNE.dtype), sin_TE.to(states_TNE.dtype))


def gated_silu(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) * up; nothing is kept besides the two."""
    return _GatedSilu.apply(gate_TI, up_TI)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide_TH = hidden_TH.to(torch.promote_types(hidden_TH.dtype, torch.float32))
        norm_T1 = torch.linalg.vector_norm(wide_TH, dim=-1, keepdim=True)
        scale_T1 = torch.rsqrt(norm_T1.square() / hidden_TH.shape[-1] + eps)
        ctx.save_for_backward(hidden_TH, weight_H, scale_T1)
        return (wide_TH * scale_T1).mul_(weight_H).to(hidden_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_H, scale_T1 = ctx.saved_tensors
        width = hidden_TH.shape[-1]
        hidden_RH, grad_RH = (each.reshape(-1, width).to(scale_T1.dtype) for each in (hidden_TH, grad_outputs[0]))
        scale_R1, weight_H = scale_T1.reshape(-1, 1), weight_H.to(scale_T1.dtype)
        product_RH = grad_RH * hidden_RH
        grad_weight_H = scale_R1[:, 0] @ product_RH if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight_H, None
        along_R1 = (product_RH @ weight_H)[:, None] * scale_R1.pow(3) / -width
        grad_hidden_RH = (grad_RH * weight_H).mul_(scale_R1).addcmul_(hidden_RH, along_R1)
        return grad_hidden_RH.view(hidden_TH.shape).to(hidden_TH.dtype), grad_weight_H, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places_S: Tensor) -> Tensor:
        ctx.save_for_backward(places_S)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, places_S)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (places_S,) = grad_outputs, ctx.saved_tensors
        whole = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        whole[places_S] = grad
        return whole, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_TNE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TE, sin_TE)
        return _rotated(states_TNE, cos_TE, sin_TE, sign=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # The transpose of a rotation turns the other way.
        return _rotated(grad_outputs[0], *ctx.saved_tensors, sign=-1), None, None


def _rotated(states_TNE: Tensor, cos_TE: Tensor, sin_TE: Tensor, *, sign: int) -> Tensor:
    half = states_TNE.shape[-1] // 2
    sin_T1F = sin_TE[:, None, :half]
    turned_TNE = states_TNE * cos_TE[:, None]
    turned_TNE[..., :half].addcmul_(states_TNE[..., half:], sin_T1F, value=-sign)
    turned_TNE[..., half:].addcmul_(states_TNE[..., :half], sin_T1F, value=sign)
    return turned_TNE


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        return F.silu(gate_TI).mul_(up_TI)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TI,), (gate_TI, up_TI) = grad_outputs, ctx.saved_tensors
        grad_up_TI = F.silu(gate_TI).mul_(grad_TI)
        grad_gate_TI = torch.ops.aten.silu_backward(grad_TI * up_TI, gate_TI)
        return grad_gate_TI, grad_up_TI
