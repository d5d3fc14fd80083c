"""Packs against the documents that they are made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.heads.slots import serving_slots, teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher, TopKTeacher, top_k_teacher
from eyas.train.pack import training_pack

V, H = 50, 8
EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(0))


def _document(mask: list[bool], *, seed: int = 0) -> Document:
    generator = torch.Generator().manual_seed(seed)
    mask_T, length = torch.tensor(mask), len(mask)
    captured, last = torch.randn(length, 3 * H, generator=generator), torch.randn(length, H, generator=generator)
    token_ids = torch.randint(0, V, (length,), generator=generator)
    return Document(token_ids, mask_T, captured, last, HiddenTeacher(last[teacher_positions(mask_T)]))


@settings(max_examples=40, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=2, max_size=20), min_size=1, max_size=4),
    num_steps=st.integers(1, 5),
)
def test_every_slot_has_its_token_embedding_states_and_teacher_row(masks: list[list[bool]], num_steps: int) -> None:
    documents = [_document(mask, seed=seed) for seed, mask in enumerate(masks)]
    pack = training_pack(documents, source="captured", num_steps=num_steps, embedding_VH=EMBEDDING)
    assert pack.num_tokens == sum(len(mask) for mask in masks)
    assert pack.lengths == tuple(len(mask) - 1 for mask in masks)
    assert isinstance(pack.teacher, HiddenTeacher)
    assert pack.embedding_TH is not None
    begin = 0
    for document in documents:
        length = document.token_ids_T.shape[0] - 1
        assert torch.equal(pack.next_ids_T[begin : begin + length], document.token_ids_T[1:])
        assert torch.equal(pack.embedding_TH[begin : begin + length], EMBEDDING[document.token_ids_T[1:]])
        assert torch.equal(pack.states_TX[begin : begin + length], document.captured_TX[:-1])
        assert document.last_TH is not None
        for step, slots in enumerate(serving_slots(document.answer_mask_T, num_steps=num_steps)):
            mine = (pack.slots[step] >= begin) & (pack.slots[step] < begin + length)
            assert torch.equal(pack.slots[step][mine] - begin, slots)
            judged = pack.teacher.hidden_PH[pack.targets[step][mine]]
            assert torch.equal(judged, document.last_TH[slots + 1 + step])
        begin += length
    for slots, targets in zip(pack.slots, pack.targets, strict=True):
        assert bool((slots[1:] > slots[:-1]).all())
        assert bool((targets[1:] > targets[:-1]).all())


def test_states_are_perturbed_by_their_place_in_the_pack() -> None:
    documents = [_document([False, True, True], seed=seed) for seed in (0, 1)]
    pack = training_pack(
        documents,
        source="last",
        num_steps=1,
        embedding_VH=None,
        perturb=lambda states_TX, place: states_TX + 10.0 * place,
    )
    assert pack.embedding_TH is None
    assert documents[0].last_TH is not None
    assert documents[1].last_TH is not None
    expected = torch.cat((documents[0].last_TH[:-1], documents[1].last_TH[:-1] + 10.0))
    torch.testing.assert_close(pack.states_TX, expected)


@pytest.mark.parametrize("stored", [False, True])
def test_a_pack_moves_with_its_teacher_while_its_plan_stays_on_the_cpu(stored: bool) -> None:
    document = _document([False, True, True, True])
    assert isinstance(document.teacher, HiddenTeacher)
    if stored:
        teacher = top_k_teacher(document.teacher.hidden_PH, readout_VH=EMBEDDING, k=3)
        document = Document(document.token_ids_T, document.answer_mask_T, document.captured_TX, None, teacher)
    pack = training_pack([document], source="captured", num_steps=2, embedding_VH=EMBEDDING).to(torch.device("meta"))
    assert pack.embedding_TH is not None
    moved = [pack.next_ids_T, pack.embedding_TH, pack.states_TX]
    if isinstance(pack.teacher, TopKTeacher):
        moved += [pack.teacher.ids_PK, pack.teacher.log_probs_PK, pack.teacher.tail_P]
    else:
        moved.append(pack.teacher.hidden_PH)
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert {tensor.device.type for tensor in (*pack.slots, *pack.targets)} == {"cpu"}
