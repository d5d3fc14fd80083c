"""Training-time test: gathered slots against the dense form, the chunked loss against autograd, drafting against both."""

from __future__ import annotations

import pytest
import torch

from eyas.heads.drafting import draft_from_slots, draft_one_chain
from eyas.train.batches import TrainingDocument, training_document
from eyas.train.features.store import Document
from eyas.train.losses import StepRows, chunked_distillation, dense_distillation
from eyas.train.objective import batch_loss, dense_hidden_states, step_weights, trained_hidden_states
from tests.tiny import head_config, random_head

V, H, X = 100, 32, 96
MASK = torch.zeros(30, dtype=torch.bool)
MASK[7:15] = True
MASK[20:29] = True


def _document(seed: int = 0) -> Document:
    generator = torch.Generator().manual_seed(seed)
    return Document(
        token_ids_T=torch.randint(0, V, (30,), generator=generator),
        answer_mask_T=MASK,
        captured_TX=torch.randn(30, X, generator=generator),
        last_TH=torch.randn(30, H, generator=generator),
    )


def _training_document(num_steps: int, *, seed: int = 0) -> TrainingDocument:
    return training_document(_document(seed), num_steps=num_steps, device=torch.device("cpu"))


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator)


def _relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).detach().norm() / reference.detach().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_gathered_slots_equal_the_dense_form_in_value_and_gradient(
    num_steps: int, dtype: torch.dtype, tolerance: float
) -> None:
    head = random_head(head_config()).to(dtype)
    embedding, _ = (weights.to(dtype) for weights in _weights())
    document = _training_document(num_steps)
    gathered = trained_hidden_states(head, document, embedding_VH=embedding, num_steps=num_steps)
    dense = dense_hidden_states(head, document, embedding_VH=embedding, num_steps=num_steps)
    parameters = [p for name, p in head.named_parameters() if not name.startswith(("norm", "lm_head"))]
    gradients = []
    for outputs in (gathered, dense):
        torch.manual_seed(1)
        total = sum((output * torch.randn_like(output)).sum() for output in outputs)
        gradients.append(torch.autograd.grad(total, parameters))
    for ours, reference in zip(gathered, dense, strict=True):
        assert _relative_difference(ours, reference) < tolerance
    for ours, reference in zip(*gradients, strict=True):
        assert _relative_difference(ours, reference) < tolerance


def test_documents_of_a_batch_do_not_see_each_other() -> None:
    head = random_head(head_config())
    embedding, readout = _weights()
    teacher = readout[head.draft_to_target_D]
    documents = [_training_document(3, seed=seed) for seed in (0, 1)]
    together = batch_loss(
        head, documents, embedding_VH=embedding, teacher_readout_DH=teacher, row_weights=[0.5, 0.3, 0.2]
    )
    alone = [
        batch_loss(head, [document], embedding_VH=embedding, teacher_readout_DH=teacher, row_weights=[0.5, 0.3, 0.2])
        for document in documents
    ]
    torch.testing.assert_close(together.loss, alone[0].loss + alone[1].loss)
    torch.testing.assert_close(together.hits_K, alone[0].hits_K + alone[1].hits_K)


@pytest.mark.parametrize("draft_vocab", [40, 5000])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_chunked_loss_equals_autograd(draft_vocab: int, chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    hidden = [torch.randn(rows, H, requires_grad=True) for rows in (20, 11, 0)]
    positions = [
        torch.arange(3, 23),
        torch.tensor([0, 1, 5, 6, 7, 8, 9, 20, 21, 22, 23]),
        torch.tensor([], dtype=torch.long),
    ]
    readout = (0.3 * torch.randn(draft_vocab, H)).requires_grad_()
    teacher_hidden, teacher_readout = torch.randn(24, H), 0.3 * torch.randn(draft_vocab, H)
    rows = [
        StepRows(hidden_RH=h, positions_R=p, weight=w)
        for h, p, w in zip(hidden, positions, (0.5, 0.25, 1.0), strict=True)
    ]
    arguments = {"readout_DH": readout, "teacher_hidden_PH": teacher_hidden, "teacher_readout_DH": teacher_readout}
    reference = dense_distillation(rows, **arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = chunked_distillation(rows, **arguments, chunk_positions=chunk)
    torch.testing.assert_close(ours.loss, reference.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.kl_sums_K, reference.kl_sums_K, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:
        assert torch.equal(ours.hits_K, reference.hits_K)
    leaves = [*hidden, readout]
    for a, b in zip(
        torch.autograd.grad(3 * ours.loss, leaves), torch.autograd.grad(3 * reference.loss, leaves), strict=True
    ):
        scale = b.abs().max().item() if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-6))


def test_a_perfect_head_has_no_loss_and_hits_everything() -> None:
    teacher_hidden, readout = torch.randn(9, H), torch.randn(40, H)
    rows = [StepRows(hidden_RH=teacher_hidden, positions_R=torch.arange(9), weight=1.0)]
    result = chunked_distillation(
        rows, readout_DH=readout, teacher_hidden_PH=teacher_hidden, teacher_readout_DH=readout
    )
    assert abs(float(result.loss)) < 1e-4
    assert result.hits_K.tolist() == [9]


def test_drafting_from_many_slots_equals_the_cached_chain() -> None:
    head = random_head(head_config())
    embedding, _ = _weights()
    document = _document()
    slots = torch.tensor([0, 3, 6, 7, 20, 28])
    drafts = draft_from_slots(
        head,
        embedding_VH=embedding,
        token_ids_T=document.token_ids_T,
        captured_TX=document.captured_TX,
        slots_S=slots,
        num_tokens=4,
    )
    for row, slot in zip(drafts.tolist(), slots.tolist(), strict=True):
        assert row == draft_one_chain(
            head,
            embedding_VH=embedding,
            token_ids_T=document.token_ids_T,
            captured_TX=document.captured_TX,
            slot=slot,
            num_tokens=4,
        )


def test_the_chain_drafter_is_training_teacher_forced_on_its_own_tokens() -> None:
    head = random_head(head_config())
    embedding, _ = _weights()
    document = _document()
    slot, num_tokens = 6, 4
    draft = draft_one_chain(
        head,
        embedding_VH=embedding,
        token_ids_T=document.token_ids_T,
        captured_TX=document.captured_TX,
        slot=slot,
        num_tokens=num_tokens,
    )
    own = document.token_ids_T.clone()
    own[slot + 2 : slot + 2 + num_tokens] = torch.tensor(draft)
    forced = training_document(
        Document(own, MASK, document.captured_TX, document.last_TH), num_steps=num_tokens, device=torch.device("cpu")
    )
    outputs = trained_hidden_states(head, forced, embedding_VH=embedding, num_steps=num_tokens)
    row = [int((slots == slot).nonzero()) for slots in forced.slots]
    trained = [
        int(head.target_ids(head.logits(output[index : index + 1]).argmax()))
        for output, index in zip(outputs, row, strict=True)
    ]
    assert trained == draft


def test_step_weights_fall_and_add_up_to_one() -> None:
    weights = step_weights(3, decay=0.8)
    assert sum(weights) == pytest.approx(1.0)
    assert weights[1] / weights[0] == pytest.approx(0.8)
