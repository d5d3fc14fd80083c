"""Chain attention against its dense reference, and the head's steps put together from both."""

from __future__ import annotations

import pytest
import torch

from eyas.heads.attention import chain_attention, dense_chain_attention

T, N, M, E = 13, 4, 2, 16


def _random_steps(num_steps: int, *, dtype: torch.dtype = torch.float32) -> tuple[list, list, list]:
    torch.manual_seed(num_steps)
    queries = [torch.randn(T, N, E, dtype=dtype, requires_grad=True) for _ in range(num_steps)]
    keys = [torch.randn(T, M, E, dtype=dtype, requires_grad=True) for _ in range(num_steps)]
    values = [torch.randn(T, M, E, dtype=dtype, requires_grad=True) for _ in range(num_steps)]
    return queries, keys, values


def _fast(queries: list, keys: list, values: list, slots: torch.Tensor) -> torch.Tensor:
    own = len(queries) - 1
    empty = keys[0].new_empty(slots.shape[0], 0, M, E)
    return chain_attention(
        queries[-1][slots],
        key_TME=keys[0],
        value_TME=values[0],
        own_key_SIME=torch.stack([key[slots] for key in keys[1:]], dim=1) if own else empty,
        own_value_SIME=torch.stack([value[slots] for value in values[1:]], dim=1) if own else empty,
        slots_S=slots,
    )


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("slots", [list(range(T)), [0], [2, 3, 7, 12]])
def test_value_and_gradient_equal_the_dense_reference(num_steps: int, slots: list[int]) -> None:
    queries, keys, values = _random_steps(num_steps, dtype=torch.float64)
    chosen = torch.tensor(slots)
    dense = dense_chain_attention(queries[-1], step_keys=keys, step_values=values)[chosen]
    fast = _fast(queries, keys, values, chosen)
    torch.testing.assert_close(fast, dense, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(dense)
    leaves = [queries[-1], *keys, *values]
    for ours, reference in zip(
        torch.autograd.grad(fast, leaves, cotangent),
        torch.autograd.grad(dense, leaves, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)


def test_a_chain_never_sees_a_later_slot_or_another_chain() -> None:
    queries, keys, values = _random_steps(3)
    slots = torch.tensor([4])
    before = _fast(queries, keys, values, slots)
    with torch.no_grad():
        for step in range(3):
            later = 5 if step == 0 else 0  # own keys of other slots must not matter either
            for tensor in (keys[step], values[step]):
                changed = torch.arange(T) >= later
                changed[4] = False
                tensor[changed] += 100.0
    torch.testing.assert_close(_fast(queries, keys, values, slots), before)


def test_bfloat16_stays_close_to_float32() -> None:
    queries, keys, values = _random_steps(3)
    slots = torch.arange(T)
    half = [[tensor.detach().bfloat16() for tensor in tensors] for tensors in (queries, keys, values)]
    difference = (_fast(*half, slots).float() - _fast(queries, keys, values, slots)).abs().max()
    assert float(difference.detach()) < 0.05
