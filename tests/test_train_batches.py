"""Which documents go together, in which order, and on which process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.train.batches import epoch_batches, run_batches


@given(
    lengths=st.lists(st.integers(1, 50), min_size=8, max_size=60),
    budget=st.integers(1, 100),
    seed=st.integers(0, 5),
)
def test_epoch_batches_are_disjoint_over_processes_and_reproducible(lengths: list[int], budget: int, seed: int) -> None:
    def of(rank: int, world_size: int) -> list[list[int]]:
        return epoch_batches(lengths, batch_tokens=budget, seed=seed, epoch=0, rank=rank, world_size=world_size)

    whole = of(0, 1)
    assert whole == of(0, 1)
    assert sorted(index for batch in whole for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in whole)
    if len(whole) < 2:
        with pytest.raises(ValueError, match="2 processes"):
            of(0, 2)
        return
    halves = of(0, 2), of(1, 2)
    assert len(halves[0]) == len(halves[1])
    assert [batch for pair in zip(*halves, strict=True) for batch in pair] == whole[: len(whole) // 2 * 2]


def test_a_run_is_its_epochs_one_after_another_though_they_differ_in_length() -> None:
    lengths = [1, 30, 2, 40, 3, 50, 4, 45, 5, 35, 20, 20, 25]

    def epoch(number: int) -> list[list[int]]:
        return epoch_batches(lengths, batch_tokens=60, seed=0, epoch=number, rank=0, world_size=1)

    epochs = [epoch(number) for number in range(6)]
    assert len({len(batches) for batches in epochs}) > 1
    whole = run_batches(lengths, batch_tokens=60, seed=0, epochs=6, rank=0, world_size=1)
    assert whole == [batch for batches in epochs for batch in batches]


def test_epochs_differ_in_order() -> None:
    orders = [epoch_batches([1] * 50, batch_tokens=5, seed=0, epoch=epoch, rank=0, world_size=1) for epoch in (0, 1)]
    assert orders[0] != orders[1]
