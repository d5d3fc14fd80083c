"""Which documents a step trains on, and which process computes which of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.train.order import TOKENS_PER_ROW, OrderSettings, RunOrder
from eyas.train.packing import deal, fill_batches, first_fit, spread

lengths_of_documents = st.lists(st.integers(1, 50), min_size=1, max_size=40)
ROWS = 3


def _rows(lengths: Sequence[int], *, every: int = 5) -> torch.Tensor:
    """Rows of three TTT steps; one document of `every` has none."""
    return torch.tensor(
        [
            [max(0, length - 2 - step) if number % every else 0 for step in range(ROWS)]
            for number, length in enumerate(lengths)
        ]
    )


def _settings(**changes: int | None) -> OrderSettings:
    fields: dict[str, int | None] = {"batch_tokens": 100, "pack_tokens": None, "epochs": 2, "seed": 0}
    return OrderSettings(**(fields | changes))  # type: ignore[arg-type]


@st.composite
def orders(draw: st.DrawFn) -> tuple[RunOrder, list[int], torch.Tensor]:
    lengths = [*draw(lengths_of_documents), 9, 9]
    rows = _rows(lengths, every=draw(st.integers(2, 40)))
    settings = _settings(
        batch_tokens=draw(st.integers(1, 200)),
        pack_tokens=draw(st.none() | st.integers(1, 120)),
        epochs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 3)),
    )
    return RunOrder(lengths, rows, settings=settings), lengths, rows


# The global order


@given(made=orders())
def test_every_epoch_trains_each_document_once(made: tuple[RunOrder, list[int], torch.Tensor]) -> None:
    order, lengths, rows = made
    trained = sorted(index for index in range(len(lengths)) if rows[index, 0] > 0)
    assert order.untrained == len(lengths) - len(trained)
    epochs: dict[int, list[int]] = {}
    for step in range(len(order)):
        batch = order.documents(step)
        epochs.setdefault(int(order.epoch(step)), []).extend(batch)
        tokens = sum(lengths[index] for index in batch)
        assert tokens <= order.settings.batch_tokens or len(batch) == 1
        assert order.tokens(step) == tokens
        assert order.rows(step) == rows[list(batch)].sum(0).tolist()
    assert list(epochs) == list(range(order.settings.epochs))
    assert all(sorted(documents) == trained for documents in epochs.values())
    assert order.epoch(0) == 0 and order.epoch(len(order)) == order.settings.epochs
    with pytest.raises(IndexError):
        order.documents(len(order))


def test_epochs_and_seeds_differ_and_progress_within_an_epoch_is_counted_in_steps() -> None:
    lengths = [10] * 40
    order = RunOrder(lengths, _rows(lengths, every=99), settings=_settings(batch_tokens=100))
    assert len(order) == 8  # 39 documents, ten a step
    batches = [order.documents(step) for step in range(8)]
    assert batches[:4] != batches[4:]
    other = RunOrder(lengths, _rows(lengths, every=99), settings=_settings(batch_tokens=100, seed=1))
    assert batches != [other.documents(step) for step in range(8)]
    assert [order.epoch(step) for step in (1, 4, 7)] == [0.25, 1.0, 1.75]


def test_the_order_does_not_change_from_one_version_of_python_or_numpy_to_the_next() -> None:
    """A run that is resumed after an update goes on in its order."""
    lengths = [(7 * number) % 31 + 2 for number in range(12)]
    order = RunOrder(lengths, _rows(lengths, every=99), settings=_settings(batch_tokens=60, seed=5))
    assert [order.documents(step) for step in range(len(order))] == [
        (8, 9, 5, 3),
        (4, 6, 11),
        (7, 1, 2, 10),
        (8, 7, 6),
        (2, 9, 5, 3, 1),
        (4, 11, 10),
    ]


def test_another_process_finds_the_same_order() -> None:
    code = (
        "from tests.test_train_order import RunOrder, _rows, _settings\n"
        "lengths = [number % 37 + 2 for number in range(300)]\n"
        "order = RunOrder(lengths, _rows(lengths), settings=_settings(pack_tokens=40))\n"
        "print([order.packs(step, rank=1, world_size=3) for step in range(len(order))])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="none of the 3 training documents has an answer of two tokens"):
        RunOrder([5, 6, 7], torch.zeros(3, 2, dtype=torch.long), settings=_settings())
    with pytest.raises(ValueError, match="none of the 0 training documents"):
        RunOrder([], torch.zeros(0, 2, dtype=torch.long), settings=_settings())


def _lognormal(count: int, *, median: float, low: int, high: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.6, count)
    return drawn.clip(low, high).astype(int).tolist()


@pytest.mark.parametrize(
    ("median", "low", "high", "budget", "fill"),
    [
        (200, 50, 512, 2048, 0.99),
        (2500, 1000, 8000, 16384, 0.98),
        (200, 50, 512, 512, 0.975),  # of two conversations each
        (1060, 1030, 1100, 2048, 0.50),  # two do not fit: nothing can be done
    ],
)
def test_batches_are_full(median: float, low: int, high: int, budget: int, fill: float) -> None:
    lengths = _lognormal(4000, median=median, low=low, high=high)
    rows = torch.tensor(lengths)[:, None]
    order = RunOrder(lengths, rows, settings=_settings(batch_tokens=budget, epochs=1))
    statistics = order.statistics(world_size=1)
    assert fill < statistics.fill < fill + 0.025
    everything = sum(order.tokens(step) for step in range(len(order))) / (len(order) * budget)
    assert everything == pytest.approx(statistics.fill, rel=0.002)


@given(lengths=lengths_of_documents, budget=st.integers(1, 120), lookahead=st.integers(1, 50))
def test_no_document_waits_for_long(lengths: list[int], budget: int, lookahead: int) -> None:
    left = list(range(len(lengths)))
    for batch in fill_batches(lengths, budget=budget, lookahead=lookahead):
        seen = left[:lookahead]
        assert batch[0] == seen[0], "the one that waits longest comes first"
        assert set(batch) <= set(seen)
        room = budget - sum(lengths[place] for place in batch)
        assert all(lengths[place] > room for place in seen if place not in batch), "no further one fits"
        left = [place for place in left if place not in batch]
    assert left == []


# Processes and packs


@given(made=orders(), world_size=st.integers(1, 5))
def test_processes_share_each_global_batch(made: tuple[RunOrder, list[int], torch.Tensor], world_size: int) -> None:
    order, lengths, rows = made
    limit = order.settings.pack_tokens
    costs = torch.tensor(lengths) + TOKENS_PER_ROW * rows.sum(1)
    cheapest = (min((index for index in range(len(lengths)) if rows[index, 0] > 0), key=costs.tolist().__getitem__),)
    for step in range(len(order)):
        ranks = [order.packs(step, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert len({len(packs) for packs in ranks}) == 1, "equally many"
        counted = [index for packs in ranks for pack in packs if pack.counted for index in pack.documents]
        assert sorted(counted) == sorted(order.documents(step)), "each once"
        for packs in ranks:
            assert [pack.counted for pack in packs] == sorted((pack.counted for pack in packs), reverse=True)
            for pack in packs:
                tokens = sum(lengths[index] for index in pack.documents)
                assert pack.documents and (limit is None or tokens <= limit or len(pack.documents) == 1)
                assert pack.counted or pack.documents == cheapest
            assert limit is not None or len(packs) == 1
        assert any(all(pack.counted for pack in packs) for packs in ranks), "no pack without need"


@given(made=orders(), world_size=st.integers(1, 3), data=st.data())
def test_a_run_in_packs_is_its_steps_one_after_another(
    made: tuple[RunOrder, list[int], torch.Tensor], world_size: int, data: st.DataObject
) -> None:
    order, _, _ = made
    rank = data.draw(st.integers(0, world_size - 1))
    step = data.draw(st.integers(0, len(order)))
    steps = [order.packs(number, rank=rank, world_size=world_size) for number in range(len(order))]
    before = order.packs_before(step, rank=rank, world_size=world_size)
    assert before == sum(len(packs) for packs in steps[:step])
    everything = order.all_packs(rank=rank, world_size=world_size)
    assert everything == [list(pack.documents) for packs in steps for pack in packs]
    assert order.packs_before(step, rank=rank, world_size=world_size) == before


@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=30), parts=st.integers(1, 6))
def test_shares_cost_nearly_the_same(costs: list[int], parts: int) -> None:
    shares = deal(range(len(costs)), costs=costs, parts=parts)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    spent = [sum(costs[index] for index in share) for share in shares]
    # Taking its last document away from the costliest share leaves it no dearer than any other.
    worst = shares[spent.index(max(spent))]
    assert max(spent) - min(costs[index] for index in worst) <= min(spent)


@given(lengths=lengths_of_documents, limit=st.integers(1, 120), more=st.integers(0, 3))
def test_packs_of_a_share_are_alike(lengths: list[int], limit: int, more: int) -> None:
    documents = range(len(lengths))
    few = first_fit(documents, lengths=lengths, limit=limit)
    count = len(few) + more
    packs = spread(documents, lengths=lengths, costs=lengths, limit=limit, count=count)
    for made in (few, packs):
        assert sorted(index for pack in made for index in pack) == list(documents)
        assert all(len(pack) == 1 or sum(lengths[index] for index in pack) <= limit for pack in made)
    assert len(few) <= len(packs) <= count
    if limit >= sum(lengths):
        spent = [sum(lengths[index] for index in pack) for pack in packs]
        assert max(spent) - min(spent) <= max(lengths)


def test_packs_of_a_step_are_balanced_on_realistic_conversations() -> None:
    lengths = _lognormal(2000, median=2500, low=1000, high=8000)
    rows = (
        torch.tensor(lengths)[:, None]
        * torch.tensor([0.5, 0.4, 0.4])
        * torch.rand(2000, 1, generator=torch.manual_seed(0))
    )
    order = RunOrder(lengths, rows.long() + 1, settings=_settings(batch_tokens=131072, pack_tokens=16384))
    found = order.statistics(world_size=4)
    assert found.idle_share < 0.03
    assert found.filler_share < 0.01
    assert 2 <= found.packs_per_step < 3.3
    costs = torch.tensor(lengths) + TOKENS_PER_ROW * (rows.long() + 1).sum(1)
    spent = torch.tensor(
        [
            [float(costs[list(pack.documents)].sum()) for pack in order.packs(step, rank=0, world_size=4)][:2]
            for step in range(20)
        ]
    )
    assert (spent.amax(1) / spent.mean(1)).mean() < 1.25


def test_too_small_batches_are_told() -> None:
    lengths = [50] * 60
    order = RunOrder(lengths, _rows(lengths, every=99), settings=_settings(batch_tokens=100))
    assert order.warning(order.statistics(world_size=2), world_size=2) is None
    line = order.warning(order.statistics(world_size=8), world_size=8)
    assert line is not None and "2.0 conversations on average for 8 processes" in line and "75%" in line
    found = order.statistics(world_size=8)
    assert found.filler_share == pytest.approx(0.75, abs=0.01)
    assert found.packs_per_step == 1
