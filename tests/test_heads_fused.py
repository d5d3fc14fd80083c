"""Fused operations against their plain forms, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from eyas.heads.fused import gated_silu, rms_norm, rotate, take_rows


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _assert_same(fused: Callable, plain: Callable, leaves: list[torch.Tensor], *, tolerance: float = 1e-12) -> None:
    ours, reference = fused(*leaves), plain(*leaves)
    assert ours.dtype == reference.dtype
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn(ours.shape).to(ours.dtype)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, cotangent), torch.autograd.grad(reference, leaves, cotangent), strict=True
    ):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 16)])
def test_the_norm(shape: tuple[int, ...]) -> None:
    _assert_same(
        lambda hidden, weight: rms_norm(hidden, weight_H=weight, eps=1e-5),
        lambda hidden, weight: F.rms_norm(hidden, weight.shape, weight, 1e-5),
        _leaves(shape, (16,)),
    )


def test_the_norm_of_bfloat16_is_that_of_float32_rounded() -> None:
    (hidden,) = _leaves((9, 32), dtype=torch.bfloat16)
    (weight,) = _leaves((32,), dtype=torch.float32)
    ours = rms_norm(hidden, weight_H=weight, eps=1e-5)
    assert ours.dtype == torch.bfloat16
    wide = hidden.detach().float().requires_grad_()
    reference = F.rms_norm(wide, weight.shape, weight, 1e-5)
    assert torch.equal(ours, reference.bfloat16())
    mine = torch.autograd.grad(ours.float().square().sum(), [hidden, weight])
    theirs = torch.autograd.grad(reference.square().sum(), [wide, weight])
    assert [gradient.dtype for gradient in mine] == [torch.bfloat16, torch.float32]
    for a, b in zip(mine, theirs, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 0.02


def test_the_rotation() -> None:
    angles_TE = torch.randn(7, 8, dtype=torch.float64).repeat(1, 2)
    rotations = (1.3 * angles_TE.cos(), 1.3 * angles_TE.sin())  # scaled, as YaRN scales them

    def plain(states: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * rotations[0][:, None] + torch.cat((-second, first), dim=-1) * rotations[1][:, None]

    _assert_same(lambda states: rotate(states, rotations=rotations), plain, _leaves((7, 3, 16)))


def test_the_gate_and_the_rows() -> None:
    _assert_same(gated_silu, lambda gate, up: F.silu(gate) * up, _leaves((5, 12), (5, 12)))
    places = torch.tensor([0, 3, 4])
    _assert_same(lambda rows: take_rows(rows, places), lambda rows: rows[places], _leaves((6, 2, 3)))
    _assert_same(lambda rows: take_rows(rows, places[:0]), lambda rows: rows[places[:0]], _leaves((6, 2)))
