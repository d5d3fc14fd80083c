"""The loss of a batch: rows and their teacher rows, EAGLE's regression, official EAGLE at K = 1, noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from eyas.heads.head import FeatureSource
from eyas.heads.slots import serving_slots, teacher_positions
from eyas.train.batches import TrainingDocument, training_document
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher, top_k_teacher
from eyas.train.losses import TokenLoss
from eyas.train.noise import FeatureNoise
from eyas.train.objective import Losses, batch_loss, step_weights, trained_hidden_states
from tests.tiny import EAGLE, head_config, random_head

V, H = 100, 32
MASK = torch.zeros(30, dtype=torch.bool)
MASK[7:15] = True
MASK[20:29] = True


def _document(*, seed: int = 0) -> Document:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, V, (30,), generator=generator)
    captured, last = torch.randn(30, 3 * H, generator=generator), torch.randn(30, H, generator=generator)
    return Document(token_ids, MASK, captured, last, HiddenTeacher(last[teacher_positions(MASK)]))


def _training_document(
    *, source: FeatureSource = "captured", num_steps: int = 3, seed: int = 0, document: Document | None = None
) -> TrainingDocument:
    return training_document(
        document or _document(seed=seed), source=source, num_steps=num_steps, device=torch.device("cpu")
    )


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator)


def test_documents_of_a_batch_do_not_see_each_other() -> None:
    head = random_head(head_config())
    embedding, readout = _weights()
    documents = [_training_document(seed=seed) for seed in (0, 1)]

    def loss(chosen: list[TrainingDocument]) -> tuple[torch.Tensor, torch.Tensor]:
        result = batch_loss(
            head,
            chosen,
            embedding_VH=embedding,
            target_readout_DH=readout[head.draft_to_target_D],
            row_weights=[0.5, 0.3, 0.2],
            losses=Losses(token=TokenLoss()),
        )
        return result.loss, result.hits_K

    together, alone = loss(documents), [loss([document]) for document in documents]
    torch.testing.assert_close(together[0], alone[0][0] + alone[1][0])
    torch.testing.assert_close(together[1], alone[0][1] + alone[1][1])


def test_targets_are_the_teacher_rows_of_the_predicted_positions() -> None:
    document = _document()
    assert document.last_TH is not None
    made = _training_document(num_steps=5)
    assert isinstance(made.teacher, HiddenTeacher)
    assert made.num_tokens == 30
    for step, slots in enumerate(serving_slots(MASK, num_steps=5)):
        assert torch.equal(made.slots[step], slots)
        assert torch.equal(made.teacher.hidden_PH[made.targets[step]], document.last_TH[slots + 1 + step])
        assert torch.equal(made.next_ids_T[slots], document.token_ids_T[slots + 1])


def test_a_batch_with_all_tokens_stored_is_the_one_with_last_states() -> None:
    head = random_head(head_config())
    embedding, readout = _weights()
    exact = [_training_document(seed=seed) for seed in (0, 1)]
    stored = [
        replace(document, teacher=top_k_teacher(document.teacher.hidden_PH, readout_VH=readout, k=V))
        for document in exact
        if isinstance(document.teacher, HiddenTeacher)
    ]
    results = [
        batch_loss(
            head,
            documents,
            embedding_VH=embedding,
            target_readout_DH=readout[head.draft_to_target_D],
            row_weights=[0.5, 0.3, 0.2],
            losses=Losses(token=TokenLoss(weight=0.5, top_k=4, top_k_weight=0.5)),
        )
        for documents in (exact, stored)
    ]
    torch.testing.assert_close(results[0].loss, results[1].loss)
    assert torch.equal(results[0].hits_K, results[1].hits_K)
    parameters = list(head.parameters())
    for a, b in zip(*(torch.autograd.grad(result.loss, parameters) for result in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_the_features_do_not_hold_is_an_error() -> None:
    head = random_head(head_config(**EAGLE))
    embedding, readout = _weights()
    document = _document()
    assert isinstance(document.teacher, HiddenTeacher)
    with pytest.raises(ValueError, match=r"reads the last hidden state at every slot"):
        _training_document(source="last", document=replace(document, last_TH=None))
    stored = replace(document, teacher=top_k_teacher(document.teacher.hidden_PH, readout_VH=readout, k=20))
    with pytest.raises(ValueError, match=r"train\.feature_loss_weight .* features\.teacher=hidden"):
        batch_loss(
            head,
            [_training_document(source="last", document=stored)],
            embedding_VH=embedding,
            target_readout_DH=readout,
            row_weights=[1.0],
            losses=Losses(token=TokenLoss(), feature_weight=1.0),
        )


def test_one_step_of_eagle_is_the_official_objective() -> None:
    """1.0 x smooth L1 (mean over the features) + 0.1 x soft cross-entropy through the frozen head, means over the trained
    slots (the official training script's loss), with the same gradient; the values differ by the teacher's entropy."""
    head = random_head(head_config(**EAGLE)).double()
    embedding, readout = (weights.double() for weights in _weights())
    document = _training_document(source="last", num_steps=1)
    last_TH = _document().last_TH
    assert last_TH is not None
    last_TH = last_TH.double()
    document = replace(
        document,
        states_TX=document.states_TX.double(),
        teacher=HiddenTeacher(last_TH[teacher_positions(MASK)]),
    )
    slots = document.slots[0]
    ours = batch_loss(
        head,
        [document],
        embedding_VH=embedding,
        target_readout_DH=readout,
        row_weights=[1.0 / slots.shape[0]],
        losses=Losses(token=TokenLoss(weight=0.1), feature_weight=1.0),
    )
    (predicted_SH,) = trained_hidden_states(head, document, embedding_VH=embedding, num_steps=1)
    target_SH = last_TH[slots + 1]
    p_SV = torch.softmax(target_SH @ readout.T, dim=-1)
    cross_entropy = -(p_SV * torch.log_softmax(predicted_SH @ readout.T, dim=-1)).sum(dim=-1).mean()
    official = F.smooth_l1_loss(predicted_SH, target_SH) + 0.1 * cross_entropy
    entropy = -(p_SV * p_SV.log()).sum(dim=-1).mean()
    assert ours.loss.item() == pytest.approx((official - 0.1 * entropy).item(), rel=1e-5)
    assert float(ours.feature_sums_K[0]) / slots.shape[0] == pytest.approx(
        F.smooth_l1_loss(predicted_SH, target_SH).item(), rel=1e-5
    )
    parameters = list(head.parameters())
    for a, b in zip(torch.autograd.grad(ours.loss, parameters), torch.autograd.grad(official, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_noise_is_uniform_of_the_given_width_and_a_function_of_its_place() -> None:
    states = torch.zeros(128, 64)
    constant = FeatureNoise(kind="constant", width=0.2).apply(states, seed=1, step=2, document=3)
    assert 0.099 < float(constant.max()) <= 0.1
    assert -0.1 <= float(constant.min()) < -0.099
    assert abs(float(constant.mean())) < 2e-3
    scaled = FeatureNoise(kind="length", width=0.2).apply(states, seed=1, step=2, document=3)
    torch.testing.assert_close(scaled, constant * 4.0)  # 512 / 128 tokens
    assert torch.equal(FeatureNoise(kind="none", width=0.2).apply(states, seed=1, step=2, document=3), states)
    for place in ({"seed": 0}, {"step": 0}, {"document": 0}):
        other = FeatureNoise(kind="constant", width=0.2).apply(
            states, **({"seed": 1, "step": 2, "document": 3} | place)
        )
        assert not torch.equal(other, constant)


def test_step_weights_fall_and_add_up_to_one() -> None:
    weights = step_weights(3, decay=0.8)
    assert sum(weights) == pytest.approx(1.0)
    assert weights[1] / weights[0] == pytest.approx(0.8)
