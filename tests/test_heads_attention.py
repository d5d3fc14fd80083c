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


def _fast(queries: list, keys: list, values: list, slots: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
    own = len(queries) - 1
    empty = keys[0].new_empty(slots.shape[0], 0, M, E)
    return chain_attention(
        queries[-1][slots],
        key_TME=keys[0],
        value_TME=values[0],
        own_key_SIME=torch.stack([key[slots] for key in keys[1:]], dim=1) if own else empty,
        own_value_SIME=torch.stack([value[slots] for value in values[1:]], dim=1) if own else empty,
        slots_S=slots,
        window=window,
    )


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
@pytest.mark.parametrize("slots", [list(range(T)), [0], [2, 3, 7, 12]])
def test_value_and_gradient_equal_the_dense_reference(num_steps: int, slots: list[int], window: int | None) -> None:
    queries, keys, values = _random_steps(num_steps, dtype=torch.float64)
    chosen = torch.tensor(slots)
    dense = dense_chain_attention(queries[-1], step_keys=keys, step_values=values, window=window)[chosen]
    fast = _fast(queries, keys, values, chosen, window=window)
    torch.testing.assert_close(fast, dense, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(dense)
    leaves = [queries[-1], *keys, *values]
    for ours, reference in zip(
        torch.autograd.grad(fast, leaves, cotangent, allow_unused=True),
        torch.autograd.grad(dense, leaves, cotangent, allow_unused=True),
        strict=True,
    ):
        if ours is None:  # a window that hides a whole step
            assert reference is None or not reference.any()
        else:
            torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_steps", [1, 3, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_packed_and_padded_documents_equal_each_document_alone(
    num_steps: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Documents are attended to one by one; a packed sequence with a document mask and padding is the same, by brute force."""
    bounds = [(0, 5), (5, 11)]  # slots 11 and 12 are padding
    queries, keys, values = _random_steps(num_steps)
    halves = [[tensor.detach().to(dtype).requires_grad_() for tensor in tensors] for tensors in (queries, keys, values)]
    alone = [
        _fast(*[[step[begin:end] for step in steps] for steps in halves], torch.arange(end - begin))
        for begin, end in bounds
    ]
    packed = [
        _brute_force(queries[-1], keys, values, slot=slot, begin=begin)
        for begin, end in bounds
        for slot in range(begin, end)
    ]
    ours, reference = torch.cat(alone).float(), torch.stack(packed)
    assert _relative(ours, reference) < tolerance
    cotangent = torch.randn_like(reference)
    gradients = torch.autograd.grad(ours, [halves[0][-1], *halves[1], *halves[2]], cotangent)
    expected = torch.autograd.grad(reference, [queries[-1], *keys, *values], cotangent)
    for a, b in zip(gradients, expected, strict=True):
        assert _relative(a.float(), b) < tolerance


def _brute_force(query: torch.Tensor, keys: list, values: list, *, slot: int, begin: int) -> torch.Tensor:
    """Attended values [N, E] of one slot of a document that begins at `begin`, key by key."""
    heads = []
    for head in range(N):
        kv = head // (N // M)
        seen_keys = [keys[0][s, kv] for s in range(begin, slot + 1)] + [key[slot, kv] for key in keys[1:]]
        seen_values = [values[0][s, kv] for s in range(begin, slot + 1)] + [value[slot, kv] for value in values[1:]]
        scores = torch.stack([query[slot, head] @ key for key in seen_keys]) / E**0.5
        heads.append(torch.softmax(scores, dim=0) @ torch.stack(seen_values))
    return torch.stack(heads)


def _relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


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
