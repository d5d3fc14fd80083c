"""The loss of a batch: rows and their teacher rows, EAGLE's regression, official EAGLE at K = 1, noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eyas.heads.head import DraftHead
from eyas.heads.slots import teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher, top_k_teacher
from eyas.train.losses import JudgedBy, StepRows, TokenLoss, dense_distillation
from eyas.train.noise import FeatureNoise
from eyas.train.objective import (
    HeadObjective,
    Losses,
    dense_hidden_states,
    step_weights,
    trained_hidden_states,
)
from eyas.train.pack import TrainingPack, training_pack
from tests.tiny import EAGLE, VARIANTS, head_config, random_head

V, H = 100, 32
MASK = torch.zeros(30, dtype=torch.bool)
MASK[7:15] = True
MASK[20:29] = True


WEIGHTS = [0.5, 0.3, 0.2]


def _document(*, seed: int = 0, mask_T: torch.Tensor = MASK) -> Document:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, V, (30,), generator=generator)
    captured, last = torch.randn(30, 3 * H, generator=generator), torch.randn(30, H, generator=generator)
    return Document(token_ids, mask_T, captured, last, HiddenTeacher(last[teacher_positions(mask_T)]))


def _pack(head: DraftHead, *documents: Document, num_steps: int = 3) -> TrainingPack:
    embedding_VH = None if head.embed_tokens is not None else _weights()[0]
    return training_pack(documents, source=head.feature_source, num_steps=num_steps, embedding_VH=embedding_VH)


def _objective(head: DraftHead, *, autocast: torch.dtype | None = None, **losses: Any) -> HeadObjective:
    readout_DH = _weights()[1][head.draft_to_target_D].to(head.fc.weight.dtype)
    return HeadObjective(
        head, target_readout_DH=readout_DH, losses=Losses(**({"token": TokenLoss()} | losses)), autocast=autocast
    )


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator)


@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1", "embedding", "window", "eagle"])
def test_loss_sums_and_gradients_are_those_of_dense_hidden_states_and_losses(variant: str) -> None:
    head = random_head(head_config(**VARIANTS[variant])).double()
    objective = _objective(head)
    pack = _pack(
        head, _document(seed=0), _document(seed=1, mask_T=torch.zeros(30, dtype=torch.bool)), _document(seed=2)
    )
    loss, sums = objective(pack, WEIGHTS)
    assert objective.target_readout_DH is not None
    dense = dense_distillation(
        [
            StepRows(hidden_RH=head.readout_input(output_SH), targets_R=targets_S, weight=weight)
            for output_SH, targets_S, weight in zip(
                dense_hidden_states(head, pack, num_steps=3), pack.targets, WEIGHTS, strict=True
            )
        ],
        readout_DH=head.readout(objective.target_readout_DH),
        judge=JudgedBy(pack.teacher, objective.target_readout_DH, head.draft_to_target_D),
        terms=TokenLoss(),
    )
    torch.testing.assert_close(loss.double(), dense.loss.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums["kl"], dense.kl_sums_K, rtol=1e-5, atol=1e-5)
    assert torch.equal(sums["hits"].long(), dense.hits_K.long())
    torch.testing.assert_close(sums["acceptance"], dense.acceptance_sums_K, rtol=1e-5, atol=1e-5)
    assert not any(value.requires_grad for value in sums.values())
    parameters = list(head.parameters())
    for ours, reference in zip(
        *(torch.autograd.grad(value, parameters, allow_unused=True) for value in (loss, dense.loss)), strict=True
    ):
        reference = torch.zeros_like(ours) if reference is None else reference
        assert float((ours - reference).norm()) <= 1e-5 * float(reference.norm())


def test_documents_of_a_pack_do_not_see_each_other() -> None:
    head = random_head(head_config())
    objective = _objective(head)
    documents = [_document(seed=seed) for seed in (0, 1)]
    together, *alone = (
        objective(_pack(head, *chosen), WEIGHTS) for chosen in (documents, *([each] for each in documents))
    )
    torch.testing.assert_close(together[0], alone[0][0] + alone[1][0])
    for name in ("kl", "hits", "acceptance"):
        torch.testing.assert_close(together[1][name], alone[0][1][name] + alone[1][1][name])


@pytest.mark.parametrize("variant", ["eagle3", "embedding", "eagle"])
@pytest.mark.parametrize("without", ["slots", "weight"])
def test_a_pack_that_counts_nothing_gives_zero_gradients_to_every_parameter(variant: str, without: str) -> None:
    head = random_head(head_config(**VARIANTS[variant]))
    head.fc.weight.requires_grad_(False)
    losses = {"feature_weight": 1.0} if variant == "eagle" else {}
    objective = _objective(head, **losses)
    mask_T = MASK if without == "weight" else torch.zeros(30, dtype=torch.bool)
    loss, sums = objective(_pack(head, _document(mask_T=mask_T)), [0.0] * 3)
    assert float(loss.detach()) == 0.0
    assert all(value.shape == (3,) for value in sums.values())
    if without == "slots":
        assert not any(value.any() for value in sums.values())
    loss.backward()
    assert head.fc.weight.grad is None
    for parameter in head.parameters():
        assert not parameter.requires_grad or (parameter.grad is not None and not parameter.grad.any())


@pytest.mark.parametrize("variant", ["eagle3", "layers", "eagle"])
def test_bfloat16_keeps_float32_parameters_and_stays_close(variant: str) -> None:
    head = random_head(head_config(**VARIANTS[variant]))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(0.3 if parameter.dim() == 2 else 1.0)
    pack = _pack(head, _document(seed=0), _document(seed=1))
    parameters = list(head.parameters())
    (loss, _), (half_loss, _) = (
        _objective(head, autocast=autocast)(pack, [weight / 32 for weight in WEIGHTS])
        for autocast in (None, torch.bfloat16)
    )
    assert float(half_loss.detach()) == pytest.approx(float(loss.detach()), rel=0.02)
    whole, half = (torch.autograd.grad(value, parameters) for value in (loss, half_loss))
    for ours, reference in zip(half, whole, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - reference).norm()) < 0.05 * float(reference.norm())


def test_a_batch_with_all_tokens_stored_is_the_one_with_last_states() -> None:
    head = random_head(head_config())
    readout = _weights()[1]
    exact = [_document(seed=seed) for seed in (0, 1)]
    stored = [
        replace(document, teacher=top_k_teacher(document.teacher.hidden_PH, readout_VH=readout, k=V))
        for document in exact
        if isinstance(document.teacher, HiddenTeacher)
    ]
    objective = _objective(head, token=TokenLoss(forward_kl=0.5, top_k_tokens=4, top_k=0.5))
    results = [objective(_pack(head, *documents), WEIGHTS) for documents in (exact, stored)]
    torch.testing.assert_close(results[0][0], results[1][0])
    assert torch.equal(results[0][1]["hits"], results[1][1]["hits"])
    parameters = list(head.parameters())
    for a, b in zip(*(torch.autograd.grad(loss, parameters) for loss, _ in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_the_features_do_not_hold_is_an_error() -> None:
    head = random_head(head_config(**EAGLE))
    document = _document()
    assert isinstance(document.teacher, HiddenTeacher)
    with pytest.raises(ValueError, match=r"reads the last hidden state at every slot"):
        _pack(head, replace(document, last_TH=None))
    stored = replace(document, teacher=top_k_teacher(document.teacher.hidden_PH, readout_VH=_weights()[1], k=20))
    with pytest.raises(ValueError, match=r"train\.losses\.feature .* features\.teacher=hidden"):
        _objective(head, feature_weight=1.0)(_pack(head, stored), [1.0])


def test_one_step_of_eagle_is_the_official_objective() -> None:
    """1.0 x smooth L1 (mean over the features) + 0.1 x soft cross-entropy through the frozen head, means over the trained
    slots (the official training script's loss), with the same gradient; the values differ by the teacher's entropy."""
    head = random_head(head_config(**EAGLE)).double()
    readout = _weights()[1].double()
    last_TH = _document().last_TH
    assert last_TH is not None
    last_TH = last_TH.double()
    document = replace(_document(), last_TH=last_TH, teacher=HiddenTeacher(last_TH[teacher_positions(MASK)]))
    pack = _pack(head, document, num_steps=1)
    slots = pack.slots[0]
    loss, sums = _objective(head, token=TokenLoss(forward_kl=0.1), feature_weight=1.0)(pack, [1.0 / slots.shape[0]])
    (predicted_SH,) = trained_hidden_states(head, pack, num_steps=1)
    target_SH = last_TH[slots + 1]
    p_SV = torch.softmax(target_SH @ readout.T, dim=-1)
    cross_entropy = -(p_SV * torch.log_softmax(predicted_SH @ readout.T, dim=-1)).sum(dim=-1).mean()
    official = F.smooth_l1_loss(predicted_SH, target_SH) + 0.1 * cross_entropy
    entropy = -(p_SV * p_SV.log()).sum(dim=-1).mean()
    assert loss.item() == pytest.approx((official - 0.1 * entropy).item(), rel=1e-5)
    assert float(sums["feature"][0]) / slots.shape[0] == pytest.approx(
        F.smooth_l1_loss(predicted_SH, target_SH).item(), rel=1e-5
    )
    parameters = list(head.parameters())
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(official, parameters), strict=True):
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
