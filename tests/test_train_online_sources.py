"""What computes states beside training: windows, who computes what, the target here or in its own process, the cache."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.train.data.tokens import Split, Tokens
from eyas.train.features.cache import CACHE_NAME, CachedDocuments, first_meetings, open_cache
from eyas.train.features.encoding import EncodedDocument, StoreForm, decode
from eyas.train.features.online import OnlineDocuments, StateSource, TargetStates, Window, plan_windows
from eyas.train.features.store import FeatureStore
from eyas.train.features.target_process import TargetProcess, pack, unpack
from eyas.train.features.teacher import HiddenTeacher, TopKTeacher
from eyas.train.order import OrderSettings, RunOrder
from tests.online import BATCH_TOKENS, EAGLE, PLAIN, SMALL, Inputs, make_inputs, target_settings


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"), target=tiny_target)


# Planning


batches_of_runs = st.lists(st.lists(st.integers(0, 19), max_size=5, unique=True), max_size=30)


@given(batches=batches_of_runs, lengths=st.lists(st.integers(1, 60), min_size=20, max_size=20), data=st.data())
def test_windows_hand_over_every_batch_and_do_not_depend_on_where_reading_begins(
    batches: list[list[int]], lengths: list[int], data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, 300))
    first = data.draw(st.integers(0, len(batches)))
    whole = plan_windows(batches, lengths=lengths, window_tokens=budget, first=0)
    assert [batch for window in whole for batch in window.batches] == batches
    for window in whole:
        assert sorted(window.documents) == sorted(set(itertools.chain.from_iterable(window.batches)))
        tokens = sum(lengths[index] for batch in window.batches for index in batch)
        assert tokens <= budget or len([batch for batch in window.batches if batch]) == 1
    resumed = plan_windows(batches, lengths=lengths, window_tokens=budget, first=first)
    assert [batch for window in resumed for batch in window.batches] == batches[first:]
    assert [window.documents for window in resumed] == [window.documents for window in whole]
    for window in resumed:
        assert batches[window.first : window.first + len(window.batches)] == window.batches


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    budget=st.integers(1, 100),
    limit=st.none() | st.integers(1, 60),
    epochs=st.integers(1, 3),
    world_size=st.integers(1, 3),
    ahead=st.integers(0, 4),
)
def test_every_document_is_computed_by_the_process_that_meets_it_first(
    lengths: list[int], budget: int, limit: int | None, epochs: int, world_size: int, ahead: int
) -> None:
    """What a process reads from the cache is there, however far the others are behind."""
    settings = OrderSettings(batch_tokens=budget, pack_tokens=limit, seed=0, epochs=epochs)
    order = RunOrder(lengths, torch.ones(len(lengths), 1, dtype=torch.long), settings=settings)
    plans = [first_meetings(order, rank=rank, world_size=world_size, ahead=ahead) for rank in range(world_size)]
    runs = [order.all_packs(rank=rank, world_size=world_size) for rank in range(world_size)]
    computed_by = [dict[int, int]() for _ in range(world_size)]  # document: pack that it is computed for
    for run, plan, computed in zip(runs, plans, computed_by, strict=True):
        assert len(run) == len(plan)
        for number, (pack_documents, new) in enumerate(zip(run, plan, strict=True)):
            assert set(new) <= set(pack_documents)
            assert computed.keys().isdisjoint(new), "once by a process"
            computed.update(dict.fromkeys(new, number))
    assert set().union(*computed_by) == set(range(len(lengths)))
    if world_size == 1:
        return
    begins = [order.packs_before(step, rank=0, world_size=world_size) for step in range(len(order))]
    for rank, run in enumerate(runs):
        for number, pack_documents in enumerate(run):
            # While the pack is loaded, `ahead` packs before it may be in training; the others have ended earlier steps.
            in_training = max(0, number - ahead)
            over = max(begin for begin in begins if begin <= in_training)
            for index in pack_documents:
                own = computed_by[rank].get(index, len(run)) <= number
                assert own or any(computed.get(index, len(run)) < over for computed in computed_by)


def test_nothing_is_computed_twice_but_at_the_seam_of_epochs() -> None:
    lengths = [10] * 400
    settings = OrderSettings(batch_tokens=100, pack_tokens=50, seed=0, epochs=3)
    order = RunOrder(lengths, torch.ones(400, 1, dtype=torch.long), settings=settings)
    for ahead, most in ((0, 0), (2, 30)):  # of ten documents a step
        plans = [first_meetings(order, rank=rank, world_size=2, ahead=ahead) for rank in range(2)]
        computed = [index for plan in plans for documents in plan for index in documents]
        assert set(computed) == set(range(400))
        assert 0 <= len(computed) - 400 <= most


# Documents


def _order(inputs: Inputs, *, batch_tokens: int = 60, pack_tokens: int | None = None, epochs: int = 2) -> RunOrder:
    tokens = Tokens(inputs.tokens, split="train")
    settings = OrderSettings(batch_tokens=batch_tokens, pack_tokens=pack_tokens, seed=0, epochs=epochs)
    return RunOrder(tokens.lengths.tolist(), tokens.trained_rows(num_steps=3), settings=settings)


def _batches(inputs: Inputs) -> list[list[int]]:
    return _order(inputs).all_packs(rank=0, world_size=1)


def _documents(source: StateSource, inputs: Inputs, *, first: int) -> Iterator[tuple[int, int, EncodedDocument]]:
    """What a source hands over from batch `first` on: batch, index, document."""
    batches, lengths = _batches(inputs), Tokens(inputs.tokens, split="train").lengths.tolist()
    windows = plan_windows(batches, lengths=lengths, window_tokens=2 * BATCH_TOKENS, first=first)
    stream = source.stream("train", [window for window in windows if window.batches])
    for number in range(first, len(batches)):
        for index, document in zip(batches[number], next(stream), strict=True):
            yield number, index, document
    assert next(stream, None) is None


@pytest.mark.parametrize("form", [PLAIN, EAGLE, SMALL], ids=["plain", "eagle", "fp8 top-k"])
def test_computed_documents_are_the_stored_ones(form: StoreForm, inputs: Inputs) -> None:
    store = FeatureStore(inputs.stores[form], split="train")
    for _, index, encoded in _documents(TargetStates(target_settings(inputs, form)), inputs, first=0):
        ours, stored = decode(encoded), store[index]
        assert torch.equal(ours.token_ids_T, stored.token_ids_T)
        assert torch.equal(ours.answer_mask_T, stored.answer_mask_T)
        pairs = [(ours.captured_TX, stored.captured_TX)]
        if form.last_everywhere:
            assert ours.last_TH is not None and stored.last_TH is not None
            pairs.append((ours.last_TH, stored.last_TH))
        if isinstance(ours.teacher, HiddenTeacher):
            assert isinstance(stored.teacher, HiddenTeacher)
            pairs.append((ours.teacher.hidden_PH, stored.teacher.hidden_PH))
        else:
            assert isinstance(stored.teacher, TopKTeacher)
            pairs.append((ours.teacher.log_probs_PK, stored.teacher.log_probs_PK))
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype
            if form.storage == "float32":
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            else:  # where rounding is a close call, a number of 3 bits may be its neighbour
                close = torch.isclose(mine.float(), theirs.float(), rtol=1e-3, atol=1e-6)
                assert close.float().mean() > 0.999
                torch.testing.assert_close(mine, theirs, rtol=0.13, atol=1e-2)


def test_both_places_and_every_beginning_give_the_same_bits(inputs: Inputs) -> None:
    """Inline or in its own process, read from the first batch or resumed in the middle of a window."""
    settings = target_settings(inputs, SMALL)
    here = TargetStates(settings)
    reference = {(number, index): pack([document]) for number, index, document in _documents(here, inputs, first=0)}
    assert len(reference) > 40
    there = TargetProcess(settings)
    try:
        for source, first in ((here, 7), (there, 0), (there, 13)):
            for number, index, document in _documents(source, inputs, first=first):
                assert pack([document]) == reference[number, index]
    finally:
        there.close()


def test_small_training_batches_are_computed_in_large_forwards(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    states = TargetStates(target_settings(inputs))
    shapes: list[torch.Size] = []
    capture = states._capture

    def counted(token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(token_ids_BT.shape)
        return capture(token_ids_BT)

    monkeypatch.setattr(states, "_capture", counted)
    tokens = Tokens(inputs.tokens, split="train")
    documents = OnlineDocuments(tokens, split="train", source=states, window_tokens=8 * BATCH_TOKENS)
    batches = _batches(inputs)
    documents.start(batches)
    for batch in batches:
        documents.load(batch)
    needed = 2 * int(tokens.lengths.sum())
    computed = sum(shape.numel() for shape in shapes)
    assert computed < 1.1 * needed, "padding"
    assert len(shapes) < 1.5 * needed / BATCH_TOKENS < len(batches) / 2
    assert max(shape.numel() for shape in shapes) <= BATCH_TOKENS


def test_packed_documents_come_back(inputs: Inputs) -> None:
    store = FeatureStore(inputs.stores[SMALL], split="train")
    documents = [store.load_encoded(index) for index in range(12)]
    for ours, theirs in zip(unpack(pack(documents)), documents, strict=True):
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in ours.tensors.items():
            assert tensor.dtype == theirs.tensors[name].dtype
            assert torch.equal(tensor.view(torch.uint8), theirs.tensors[name].view(torch.uint8))
    assert unpack(pack([])) == []


# The target's own process


def test_a_stream_that_is_left_half_read_is_given_up_for_the_next(inputs: Inputs) -> None:
    """As when training ends early and the head is measured on the held-out split."""
    settings = target_settings(inputs)
    lengths = Tokens(inputs.tokens, split="train").lengths.tolist()
    batches = _batches(inputs) * 20
    windows = plan_windows(batches, lengths=lengths, window_tokens=1, first=0)  # more than the socket holds
    heldout = [Window(0, 0, [0, 1], [[1], [0]])]
    expected = list(TargetStates(settings).stream("heldout", heldout))
    source = TargetProcess(settings)
    try:
        for read in (1, 0, 9):
            stream = source.stream("train", windows)
            for _ in range(read):
                next(stream)
            found = list(source.stream("heldout", heldout))
            assert [pack(batch) for batch in found] == [pack(batch) for batch in expected]
            with pytest.raises(AssertionError, match="another stream"):
                list(stream)
    finally:
        source.close()


def test_closing_ends_a_thread_that_waits_for_the_target(inputs: Inputs) -> None:
    source = TargetProcess(target_settings(inputs))
    reached, ended = threading.Event(), []

    def work() -> None:
        stream = source.stream("train", [Window(0, 0, [0], [[0]]), Window(1, 1, [], [[]] * 100_000)])
        next(stream)
        reached.set()
        try:
            for _ in stream:
                pass
        except (ValueError, AssertionError) as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(120)
    source.close()
    thread.join(60)
    assert not thread.is_alive() and len(ended) == 1
    source.close()


def test_an_error_in_the_targets_process_is_told_by_the_trainer(inputs: Inputs, tmp_path: Path) -> None:
    broken = TargetProcess(replace(target_settings(inputs), target_dir=tmp_path))
    try:
        stream = broken.stream("train", [Window(0, 0, [0], [[0]])])
        with pytest.raises(ValueError, match=r"own process on cpu failed: .*config\.json"):
            next(stream)
        with pytest.raises(ValueError, match="ended with exit code 2"):
            next(broken.stream("train", [Window(0, 0, [0], [[0]])]))
    finally:
        broken.close()
    assert broken._process.returncode not in (0, None)


# A cache that several processes share


@pytest.mark.parametrize("ahead", [0, 4])
def test_processes_read_from_the_cache_what_others_computed(inputs: Inputs, tmp_path: Path, ahead: int) -> None:
    """Three processes in step, of which the first loads as far ahead as it may and the others do not; and a resumed run."""
    order, tokens, world_size = (
        _order(inputs, batch_tokens=150, pack_tokens=60, epochs=6),
        Tokens(inputs.tokens, split="train"),
        3,
    )
    settings = target_settings(inputs)
    cache = tmp_path / CACHE_NAME
    cache.mkdir()
    open_cache(cache, settings.identity, tokens=tokens)
    store = FeatureStore(inputs.stores[PLAIN], split="train")
    computed: list[int] = []

    class Counting(TargetStates):
        def compute(self, split: Split, indices: Sequence[int]) -> dict[int, EncodedDocument]:
            computed.extend(indices)
            return super().compute(split, indices)

    def run(first: int, last: int) -> None:
        documents = []
        for rank in range(world_size):
            source = Counting(replace(settings, cache=cache, shard_prefix=f"{rank}of3-"))
            planned = first_meetings(order, rank=rank, world_size=world_size, ahead=ahead)
            documents.append(CachedDocuments(cache, tokens=tokens, source=source, first_met=planned, window_tokens=1))
        runs = [order.all_packs(rank=rank, world_size=world_size) for rank in range(world_size)]
        begin = order.packs_before(first, rank=0, world_size=world_size)
        for rank in range(world_size):
            documents[rank].start(runs[rank], first=begin)
        loaded = [begin] * world_size
        for step in range(first, last):
            until = order.packs_before(step + 1, rank=0, world_size=world_size)
            for rank in range(world_size):
                most = until + (ahead if rank == 0 else 0)
                for number in range(loaded[rank], min(most, len(runs[rank]))):
                    for index, document in zip(
                        runs[rank][number], documents[rank].load(runs[rank][number]), strict=True
                    ):
                        torch.testing.assert_close(document.captured_TX, store[index].captured_TX, rtol=1e-5, atol=1e-5)
                    loaded[rank] = number + 1
        for each in documents:
            each.close()

    half, end = len(order) // 12, len(order)
    run(0, half)
    before = len(computed)
    run(half, end)
    trained = set(itertools.chain.from_iterable(order.documents(step) for step in range(end)))
    assert set(computed) == trained
    assert 0 < before < len(computed) <= 1.5 * len(trained), "later epochs read"
    before = len(computed)
    run(end - 3, end)  # everything is there
    assert len(computed) == before
