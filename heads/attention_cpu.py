"""Chain attention on the CPU: PyTorch's flash kernel on blocks, merged by log-sum-exp.

The softmax of a query runs over blocks of step-0 keys and over the chain's own keys. Each block gives its attended
values and the log of its sum of exponentials, from which the joint ones follow. The gradient of a block is the flash
kernel's own backward pass given the *joint* values and log-sum-exp, as in ring attention (arXiv 2310.01889): then its
probabilities are already those of the joint softmax, and nothing of a block has to be kept.

Shapes: S queries, T slots, N query heads, M key-value heads, G = N/M, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.heads.attention_blocks import Block, Group

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_chain_attention(
    query_SNE: Tensor,
    *,
    key_TME: Tensor,
    value_TME: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    groups: Sequence[Group],
) -> Tensor:
    """Attended values [S, N, E] in the queries' dtype; `groups` say which slots each query sees.

    Statistics and products are float32 or wider: the kernel is no faster in bfloat16 than in float32.
    """
    wide = torch.promote_types(query_SNE.dtype, torch.float32)
    tensors = [tensor.to(wide) for tensor in (query_SNE, key_TME, value_TME, *own_keys, *own_values)]
    return _ChainAttention.apply(groups, *tensors).to(query_SNE.dtype)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[Group], query_SNE: Tensor, key_TME: Tensor, value_TME: Tensor, *own: Tensor
    ) -> Tensor:
        attended_SNE = torch.zeros_like(query_SNE, memory_format=torch.contiguous_format)
        lse_SN = query_SNE.new_full(query_SNE.shape[:2], float("-inf"))
        for group in groups:
            rows = slice(group.begin, group.end)
            for number, block in enumerate(group.blocks):
                part, part_lse = _attend(query_SNE[rows], key_TME, value_TME, block)
                if number == 0:
                    attended_SNE[rows], lse_SN[rows] = part, part_lse
                else:
                    _merge(attended_SNE[rows], lse_SN[rows], part, part_lse)
        num_own = len(own) // 2
        if num_own:
            lse_SN = _merge_own(attended_SNE, lse_SN, query_SNE, own[:num_own], own[num_own:])
        ctx.groups = groups
        ctx.save_for_backward(query_SNE, key_TME, value_TME, attended_SNE, lse_SN, *own)
        return attended_SNE

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query_SNE, key_TME, value_TME, attended_SNE, lse_SN, *own = ctx.saved_tensors
        grad_SNE = grad_outputs[0].contiguous()
        num_heads, num_kv_heads = query_SNE.shape[1], key_TME.shape[1]
        copies = _copies(num_heads, num_kv_heads)
        key_TNE, value_TNE = (each.repeat_interleave(copies, dim=1) for each in (key_TME, value_TME))
        grad_query_SNE = torch.zeros_like(grad_SNE)
        grad_key_TNE, grad_value_TNE = torch.zeros_like(key_TNE), torch.zeros_like(value_TNE)
        for group in ctx.groups:
            rows = slice(group.begin, group.end)
            for block in group.blocks:
                keys = slice(block.begin, block.end)
                grads = _flash_backward(
                    *(_headed(each) for each in (grad_SNE[rows], query_SNE[rows], key_TNE[keys], value_TNE[keys])),
                    _headed(attended_SNE[rows]),
                    lse_SN[rows].T[None],
                    0.0,
                    block.causal,
                    attn_mask=_additive(block, lse_SN.dtype),
                )
                wholes = (grad_query_SNE[rows], grad_key_TNE[keys], grad_value_TNE[keys])
                for whole, grad_BNSE in zip(wholes, grads, strict=True):
                    whole += grad_BNSE[0].transpose(0, 1)
        half = len(own) // 2
        grad_own = _backward_own(
            grad_query_SNE, grad_SNE, query_SNE, attended_SNE, lse_SN, keys=own[:half], values=own[half:]
        )
        grad_kv = (_summed(grad, num_kv_heads) for grad in (grad_key_TNE, grad_value_TNE))
        return None, grad_query_SNE, *grad_kv, *grad_own


def _copies(num_heads: int, num_kv_heads: int) -> int:
    """How often key heads are repeated: the backward pass is split over them, and too few would leave threads idle."""
    return 1 if num_kv_heads >= torch.get_num_threads() else num_heads // num_kv_heads


def _attend(query_SNE: Tensor, key_TME: Tensor, value_TME: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    keys = slice(block.begin, block.end)
    part_BNSE, lse_BNS = _flash(
        _headed(query_SNE),
        _headed(key_TME[keys]),
        _headed(value_TME[keys]),
        0.0,
        block.causal,
        attn_mask=_additive(block, query_SNE.dtype),
    )
    return part_BNSE[0].transpose(0, 1), lse_BNS[0].T


def _headed(rows_SNE: Tensor) -> Tensor:
    """The kernel's layout, [1, N, S, E]; it reads any strides."""
    return rows_SNE.transpose(0, 1)[None]


def _additive(block: Block, dtype: torch.dtype) -> Tensor | None:
    return None if block.mask_SL is None else block.mask_SL.to(dtype)[None, None]


def _merge(attended_SNE: Tensor, lse_SN: Tensor, part_SNE: Tensor, part_lse_SN: Tensor) -> None:
    """Join a block into what was attended to before, in place."""
    joint_SN = torch.logaddexp(lse_SN, part_lse_SN)
    attended_SNE.mul_((lse_SN - joint_SN).exp_().unsqueeze(-1))
    attended_SNE.addcmul_(part_SNE, (part_lse_SN - joint_SN).exp_().unsqueeze(-1))
    lse_SN.copy_(joint_SN)


def _merge_own(
    attended_SNE: Tensor, lse_SN: Tensor, query_SNE: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Tensor:
    """Join the chain's own keys, one of each step; the joint log-sum-exp."""
    scale = 1.0 / math.sqrt(query_SNE.shape[-1])
    scores = [_own_products(query_SNE, key_SME).mul_(scale) for key_SME in keys]
    joint_SN = torch.logsumexp(torch.stack((lse_SN, *scores)), dim=0)
    attended_SNE.mul_((lse_SN - joint_SN).exp_().unsqueeze(-1))
    for score_SN, value_SME in zip(scores, values, strict=True):
        _grouped(attended_SNE, value_SME).addcmul_(
            value_SME.unsqueeze(2), _grouped((score_SN - joint_SN).exp_().unsqueeze(-1), value_SME)
        )
    return joint_SN


def _backward_own(
    grad_query_SNE: Tensor,
    grad_SNE: Tensor,
    query_SNE: Tensor,
    attended_SNE: Tensor,
    lse_SN: Tensor,
    *,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of the own keys, then of the own values; that of the queries is added up in place."""
    if not keys:
        return []
    scale = 1.0 / math.sqrt(query_SNE.shape[-1])
    shift_SN = (grad_SNE * attended_SNE).sum(dim=-1)
    grad_keys: list[Tensor] = []
    grad_values: list[Tensor] = []
    for key_SME, value_SME in zip(keys, values, strict=True):
        weight_SN = _own_products(query_SNE, key_SME).mul_(scale).sub_(lse_SN).exp_()
        grad_score_SN = _own_products(grad_SNE, value_SME).sub_(shift_SN).mul_(weight_SN).mul_(scale)
        grad_values.append((_grouped(grad_SNE * weight_SN.unsqueeze(-1), value_SME)).sum(dim=2))
        grad_keys.append((_grouped(query_SNE * grad_score_SN.unsqueeze(-1), key_SME)).sum(dim=2))
        _grouped(grad_query_SNE, key_SME).addcmul_(key_SME.unsqueeze(2), _grouped(grad_score_SN.unsqueeze(-1), key_SME))
    return grad_keys + grad_values


def _own_products(rows_SNE: Tensor, own_SME: Tensor) -> Tensor:
    """Product [S, N] of each query head with its chain's one key: elementwise beats a batch of one-row products."""
    return (_grouped(rows_SNE, own_SME) * own_SME.unsqueeze(2)).sum(dim=-1).flatten(1)


def _grouped(rows_SNE: Tensor, own_SME: Tensor) -> Tensor:
    """A view [S, M, G, E or 1] of query heads under their key-value heads."""
    return rows_SNE.unflatten(1, (own_SME.shape[1], -1))


def _summed(grad_TNE: Tensor, num_kv_heads: int) -> Tensor:
    return grad_TNE if grad_TNE.shape[1] == num_kv_heads else grad_TNE.unflatten(1, (num_kv_heads, -1)).sum(dim=2)
