"""Chains of every kind of head: gathered slots against the dense form, and drafting against a cache filled by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.heads.drafting import draft_from_slots, draft_one_chain
from eyas.heads.head import DraftHead
from eyas.heads.slots import teacher_positions
from eyas.train.features.documents import Document, states_of
from eyas.train.features.teacher import HiddenTeacher
from eyas.train.objective import dense_hidden_states, trained_hidden_states
from eyas.train.pack import TrainingPack, training_pack
from tests.tiny import VARIANTS, head_config, random_head

V, H, LENGTH = 100, 32, 30
MASK = torch.zeros(LENGTH, dtype=torch.bool)
MASK[7:15] = True
MASK[20:29] = True


def _mask(length: int, *spans: tuple[int, int]) -> torch.Tensor:
    mask_T = torch.zeros(length, dtype=torch.bool)
    for begin, end in spans:
        mask_T[begin:end] = True
    return mask_T


def _document(mask_T: torch.Tensor = MASK, *, seed: int = 0) -> Document:
    generator = torch.Generator().manual_seed(seed)
    length = mask_T.shape[0]
    token_ids = torch.randint(0, V, (length,), generator=generator)
    captured, last = torch.randn(length, 3 * H, generator=generator), torch.randn(length, H, generator=generator)
    return Document(token_ids, mask_T, captured, last, HiddenTeacher(last[teacher_positions(mask_T)]))


def _packed() -> list[Document]:
    """Several answers in a document, one too short for later steps, documents without any, and one of two tokens."""
    masks = [MASK, _mask(12), _mask(2), _mask(19, (3, 5), (8, 18)), _mask(11, (2, 11))]
    return [_document(mask_T, seed=seed) for seed, mask_T in enumerate(masks)]


def _pack(head: DraftHead, num_steps: int, *, documents: list[Document] | None = None) -> TrainingPack:
    embedding_VH = None if head.embed_tokens is not None else _weights()[0].to(head.fc.weight.dtype)
    return training_pack(
        documents or [_document()], source=head.feature_source, num_steps=num_steps, embedding_VH=embedding_VH
    )


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator)


def _smaller(head: DraftHead, factor: float) -> DraftHead:
    """The head with smaller matrices: of random ones of full size, rounding grows from step to step."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(factor if parameter.dim() == 2 else 1.0)
    return head


def _relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).detach().float().norm() / reference.detach().float().norm())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_gathered_slots_of_a_pack_equal_the_dense_form_in_value_and_gradient(
    variant: str, num_steps: int, dtype: torch.dtype, tolerance: float
) -> None:
    head = _smaller(random_head(head_config(**VARIANTS[variant])), 0.5).to(dtype)
    pack = _pack(head, num_steps, documents=_packed())
    gathered = trained_hidden_states(head, pack, num_steps=num_steps)
    dense = dense_hidden_states(head, pack, num_steps=num_steps)
    # The readout and, unless it is fed back, the final norm are no part of the outputs.
    parameters = [p for name, p in head.named_parameters() if not name.startswith(("norm", "lm_head"))]
    gradients = []
    for outputs in (gathered, dense):
        torch.manual_seed(1)
        total = sum((output * torch.randn_like(output)).sum() for output in outputs)
        gradients.append(torch.autograd.grad(total, parameters))
    for ours, reference in zip(gathered, dense, strict=True):
        assert ours.shape == reference.shape
        assert _relative_difference(ours, reference) < tolerance
    for ours, reference in zip(*gradients, strict=True):
        assert _relative_difference(ours, reference) < tolerance


@settings(max_examples=25, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=2, max_size=16), min_size=1, max_size=4),
    num_steps=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 9)),
)
def test_any_masks_and_windows_equal_the_dense_form(
    masks: list[list[bool]], num_steps: int, window: int | None
) -> None:
    head = random_head(head_config(sliding_window=window)).double()
    documents = [_document(torch.tensor(mask), seed=seed) for seed, mask in enumerate(masks)]
    pack = _pack(head, num_steps, documents=documents)
    if pack.slots[0].numel() == 0:
        return
    gathered, dense = (make(head, pack, num_steps=num_steps) for make in (trained_hidden_states, dense_hidden_states))
    gradients = [
        torch.autograd.grad(sum(output.square().sum() for output in outputs), [head.fc.weight])[0]
        for outputs in (gathered, dense)
    ]
    torch.testing.assert_close(torch.cat(gathered), torch.cat(dense))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("variant", ["eagle3", "window", "eagle"])
def test_bfloat16_stays_close_to_the_dense_form_in_float32(variant: str) -> None:
    head = _smaller(random_head(head_config(**VARIANTS[variant])), 0.3)
    pack = _pack(head, 3, documents=_packed())
    dense = dense_hidden_states(head, pack, num_steps=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = trained_hidden_states(head, pack, num_steps=3)
    for half, reference in zip(ours, dense, strict=True):
        assert _relative_difference(half, reference) < 0.03


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafting_from_many_slots_equals_the_cached_chain(variant: str) -> None:
    head = random_head(head_config(**VARIANTS[variant])).double()
    embedding, readout = (weights.double() for weights in _weights())
    document = _document()
    slots = torch.tensor([0, 3, 6, 7, 20, 28])
    arguments = {
        "embedding_VH": embedding,
        "target_readout_DH": readout[head.draft_to_target_D],
        "token_ids_T": document.token_ids_T,
        "states_TX": states_of(document, source=head.feature_source).double(),
        "num_tokens": 6,
    }
    drafts = draft_from_slots(head, slots_S=slots, **arguments)
    for row, slot in zip(drafts.tolist(), slots.tolist(), strict=True):
        assert row == draft_one_chain(head, slot=slot, **arguments)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chain_drafter_is_training_teacher_forced_on_its_own_tokens(variant: str) -> None:
    head = random_head(head_config(**VARIANTS[variant])).double()
    embedding, readout = (weights.double() for weights in _weights())
    rows = readout[head.draft_to_target_D]
    document = _document()
    slot, num_tokens = 6, 4
    draft = draft_one_chain(
        head,
        embedding_VH=embedding,
        target_readout_DH=rows,
        token_ids_T=document.token_ids_T,
        states_TX=states_of(document, source=head.feature_source).double(),
        slot=slot,
        num_tokens=num_tokens,
    )
    own = document.token_ids_T.clone()
    own[slot + 2 : slot + 2 + num_tokens] = torch.tensor(draft)
    forced = _pack(head, num_tokens, documents=[replace(document, token_ids_T=own)])
    outputs = trained_hidden_states(head, forced, num_steps=num_tokens)
    row = [int((slots == slot).nonzero()) for slots in forced.slots]
    trained = [
        int(head.target_ids(head.logits(output[index : index + 1], target_readout_DH=rows).argmax()))
        for output, index in zip(outputs, row, strict=True)
    ]
    assert trained == draft


@pytest.mark.parametrize("variant", ["eagle3", "eagle"])
def test_detaching_cuts_the_gradient_between_steps_and_changes_no_value(variant: str) -> None:
    head = random_head(head_config(**VARIANTS[variant])).double()
    pack = _pack(head, 2)
    through, cut, dense_cut = (
        make(head, pack, num_steps=2, detach=detach)
        for make, detach in (
            (trained_hidden_states, False),
            (trained_hidden_states, True),
            (dense_hidden_states, True),
        )
    )
    torch.testing.assert_close(through[1], cut[1])
    parameter = head.fc.weight
    gradients = [torch.autograd.grad(outputs[1].sum(), parameter)[0] for outputs in (through, cut, dense_cut)]
    assert not torch.allclose(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[1], gradients[2])


def test_a_window_hides_what_lies_behind_it() -> None:
    head = random_head(head_config(sliding_window=4))
    document = _document()

    def outputs(captured_TX: torch.Tensor) -> list[torch.Tensor]:
        changed = replace(document, captured_TX=captured_TX)
        pack = _pack(head, 3, documents=[changed])
        steps = trained_hidden_states(head, pack, num_steps=3)
        return [step[int((slots == 10).nonzero())] for step, slots in zip(steps, pack.slots, strict=True)]

    plain = outputs(document.captured_TX)
    for slot, seen_until in ((6, -1), (7, 2), (10, 2)):
        changed = document.captured_TX.clone()
        changed[slot] += 5.0
        for step, (before, after) in enumerate(zip(plain, outputs(changed), strict=True)):
            # The chain of slot 10 sees positions 7 + step .. 10 + step, and what step 0 saw is fed on to its later steps.
            assert torch.equal(before, after) == (step > seen_until), f"slot {slot}, step {step}"
