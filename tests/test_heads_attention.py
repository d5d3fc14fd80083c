"""Chain attention against its dense reference: over packs, windows and chosen slots, on the kernels of both devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.heads import attention_blocks
from eyas.heads.attention import Places, chain_attention, dense_chain_attention
from eyas.heads.attention_flex import flex_chain_attention

N, M, E = 4, 2, 16
CPU = torch.device("cpu")
Attend = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _flex_gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention refuses gradients on the CPU for want of a fast kernel; its eager form has them on any device."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_tensors: None)


def _steps(lengths: Sequence[int], num_steps: int, *, dtype: torch.dtype = torch.float64) -> tuple[list, list, list]:
    generator = torch.Generator().manual_seed(num_steps)
    total = sum(lengths)

    def make(heads: int) -> list[torch.Tensor]:
        made = [torch.randn(total, heads, E, dtype=dtype, generator=generator) for _ in range(num_steps)]
        return [tensor.requires_grad_() for tensor in made]

    return make(N), make(M), make(M)


def _fast(
    steps: tuple[list, list, list], slots: torch.Tensor, lengths: Sequence[int], *, window: int | None = None
) -> torch.Tensor:
    queries, keys, values = steps
    return chain_attention(
        queries[-1][slots],
        key_TME=keys[0],
        value_TME=values[0],
        own_keys=[key[slots] for key in keys[1:]],
        own_values=[value[slots] for value in values[1:]],
        places=Places(slots, lengths=lengths, device=CPU),
        window=window,
    )


def _flex(
    steps: tuple[list, list, list], slots: torch.Tensor, lengths: Sequence[int], *, window: int | None = None
) -> torch.Tensor:
    queries, keys, values = steps
    places = Places(slots, lengths=lengths, device=CPU)
    num_own = len(keys) - 1
    low = places.starts_S
    if window is not None:
        low = None if window <= num_own else torch.maximum(low, slots - (window - num_own) + 1)
    seen = slice(1, None) if window is None else slice(max(1, len(keys) - window), None)
    return flex_chain_attention(
        queries[-1][slots],
        key_TME=keys[0],
        value_TME=values[0],
        own_keys=[key[slots] for key in keys[seen]],
        own_values=[value[slots] for value in values[seen]],
        slots_S=slots,
        low_S=low,
    )


def _dense(
    steps: tuple[list, list, list], slots: torch.Tensor, lengths: Sequence[int], *, window: int | None = None
) -> torch.Tensor:
    queries, keys, values = steps
    parts, begin = [], 0
    for length in lengths:
        document = slice(begin, begin + length)
        parts.append(
            dense_chain_attention(
                queries[-1][document],
                step_keys=[key[document] for key in keys],
                step_values=[value[document] for value in values],
                window=window,
            )
        )
        begin += length
    return torch.cat(parts)[slots]


def _assert_equal(
    attend: Attend,
    lengths: Sequence[int],
    slots: torch.Tensor,
    *,
    num_steps: int,
    window: int | None,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
) -> None:
    steps = _steps(lengths, num_steps, dtype=dtype)
    dense, fast = (make(steps, slots, lengths, window=window) for make in (_dense, attend))
    assert _relative(fast, dense) < tolerance
    cotangent = torch.randn(dense.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    leaves = [steps[0][-1], *steps[1], *steps[2]]
    for ours, reference in zip(
        torch.autograd.grad(fast, leaves, cotangent, allow_unused=True),
        torch.autograd.grad(dense, leaves, cotangent, allow_unused=True),
        strict=True,
    ):
        if ours is None:  # a window that hides a whole step
            assert reference is None or not reference.any()
        else:
            assert reference is not None
            assert _relative(ours, reference, scale=cotangent) < tolerance


def _relative(ours: torch.Tensor, reference: torch.Tensor, *, scale: torch.Tensor | None = None) -> float:
    """Norm of the difference over that of the reference, or of `scale` where that is larger."""
    norm = reference.detach().norm() if scale is None else torch.maximum(reference.norm(), scale.norm())
    return float((ours - reference).detach().float().norm() / norm.clamp_min(1e-30))


@pytest.mark.parametrize("attend", [_fast, _flex])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
@pytest.mark.parametrize("slots", [list(range(13)), [0], [2, 3, 7, 12]])
def test_value_and_gradient_equal_the_dense_reference(
    attend: Attend, num_steps: int, slots: list[int], window: int | None
) -> None:
    _assert_equal(attend, [13], torch.tensor(slots), num_steps=num_steps, window=window)


@pytest.mark.parametrize("attend", [_fast, _flex])
@pytest.mark.parametrize("window", [None, 5, 150, 400])
def test_runs_longer_and_shorter_than_a_tile_in_a_pack(attend: Attend, window: int | None) -> None:
    """One long run, runs with a prompt before them, a document without queries, and short documents in one tile."""
    lengths = [700, 40, 9, 300, 20, 30]
    chosen = torch.zeros(sum(lengths), dtype=torch.bool)
    for begin, end in ((10, 620), (640, 660), (670, 690), (700, 710), (1040, 1099)):
        chosen[begin:end] = True
    slots = chosen.nonzero().squeeze(1)
    _assert_equal(attend, lengths, slots, num_steps=2, window=window)
    _assert_equal(attend, lengths, slots, num_steps=3, window=window, dtype=torch.float32, tolerance=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.2, 0.6, 0.95]),
    num_steps=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 20)),
    tile=st.integers(1, 12),
)
def test_any_plan_of_blocks_is_exact(
    lengths: list[int], seed: int, share: float, num_steps: int, window: int | None, tile: int
) -> None:
    total = sum(lengths)
    slots = (torch.rand(total, generator=torch.Generator().manual_seed(seed)) < share).nonzero().squeeze(1)
    if slots.numel() == 0:
        slots = torch.tensor([seed % total])
    places = Places(slots, lengths=lengths, device=CPU)
    groups = attention_blocks.plan_groups(slots, starts_S=places.starts_S, reach=window, tile=tile)
    seen = torch.zeros(slots.shape[0], total, dtype=torch.int)
    for group in groups:
        for block in group.blocks:
            assert block.mask_SL is None or block.mask_SL.numel() <= 2 * tile * tile
            visible = torch.ones(group.end - group.begin, block.end - block.begin, dtype=torch.int)
            if block.mask_SL is not None:
                visible = (block.mask_SL == 0).int()
            elif block.causal:
                assert torch.equal(slots[group.begin : group.end], torch.arange(block.begin, block.end))
                visible = visible.tril()
            seen[group.begin : group.end, block.begin : block.end] += visible
    keys = torch.arange(total)
    expected = (keys <= slots[:, None]) & (keys >= places.starts_S[:, None])
    if window is not None:
        expected &= keys > slots[:, None] - window
    assert torch.equal(seen, expected.int())
    _assert_equal(_fast, lengths, slots, num_steps=num_steps, window=window)


@pytest.mark.parametrize("threads", [1, 5])
def test_key_heads_repeated_for_threads_give_the_same_gradient(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    _assert_equal(_fast, [40, 13], torch.arange(5, 50), num_steps=3, window=None)


def test_many_short_answers_cost_few_calls() -> None:
    lengths = [20] * 100
    slots = torch.cat([torch.arange(begin + 12, begin + 19) for begin in range(0, 2000, 20)])
    groups = Places(slots, lengths=lengths, device=CPU).groups(None)
    assert sum(len(group.blocks) for group in groups) <= 2000 / attention_blocks.TILE + 2


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return results


@pytest.mark.parametrize("window", [None, 600])
def test_memory_is_linear_in_the_slots(window: int | None) -> None:
    total, num_steps = 4096, 3
    steps = _steps([total], num_steps, dtype=torch.float32)
    slots = torch.cat([torch.arange(begin + 64, begin + 512) for begin in range(0, total, 512)])
    with _Largest() as largest:
        _fast(steps, slots, [total], window=window).sum().backward()
    rows = total * N * E
    assert largest.elements <= max(rows, 2 * attention_blocks.TILE**2)
    assert rows < total * slots.shape[0] // 10


def test_a_chain_never_sees_a_later_slot_or_another_chain() -> None:
    steps = _steps([13], 3)
    slots = torch.tensor([4])
    before = _fast(steps, slots, [13])
    with torch.no_grad():
        for step in range(3):
            later = 5 if step == 0 else 0  # own keys of other slots must not matter either
            for tensor in (steps[1][step], steps[2][step]):
                changed = torch.arange(13) >= later
                changed[4] = False
                tensor[changed] += 100.0
    torch.testing.assert_close(_fast(steps, slots, [13]), before)


@pytest.mark.parametrize("attend", [_fast, _flex])
def test_bfloat16_stays_close_to_float32(attend: Attend) -> None:
    lengths, slots = [300, 13], torch.arange(313)
    steps = _steps(lengths, 3, dtype=torch.float32)
    half = tuple([tensor.detach().bfloat16().requires_grad_() for tensor in tensors] for tensors in steps)
    reference, ours = _dense(steps, slots, lengths), attend(half, slots, lengths)
    assert ours.dtype == torch.bfloat16
    assert _relative(ours.float(), reference) < 0.01
    reference.sum().backward()
    ours.sum().backward()
    for mine, theirs in zip([half[0][-1], *half[1], *half[2]], [steps[0][-1], *steps[1], *steps[2]], strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert _relative(mine.grad.float(), theirs.grad) < 0.03
