"""The loss of a batch: chunked terms against autograd, EAGLE's regression, HASS's top-k term, official EAGLE at K = 1."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from eyas.train.batches import TrainingDocument, training_document
from eyas.train.features.store import Document
from eyas.train.losses import StepRows, TokenLoss, chunked_distillation, dense_distillation
from eyas.train.noise import FeatureNoise
from eyas.train.objective import Losses, batch_loss, step_weights, trained_hidden_states
from tests.tiny import EAGLE, head_config, random_head

V, H = 100, 32
MASK = torch.zeros(30, dtype=torch.bool)
MASK[7:15] = True
MASK[20:29] = True
TERMS = {
    "kl": TokenLoss(),
    "kl and top-k": TokenLoss(weight=0.1, top_k=10, top_k_weight=1.0),
    "top-k alone": TokenLoss(weight=0.0, top_k=3, top_k_weight=0.5),
}


def _training_document(*, source: str = "captured", num_steps: int = 3, seed: int = 0) -> TrainingDocument:
    generator = torch.Generator().manual_seed(seed)
    document = Document(
        token_ids_T=torch.randint(0, V, (30,), generator=generator),
        answer_mask_T=MASK,
        captured_TX=torch.randn(30, 3 * H, generator=generator),
        last_TH=torch.randn(30, H, generator=generator),
    )
    return training_document(document, source=source, num_steps=num_steps, device=torch.device("cpu"))  # type: ignore[arg-type]


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


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("draft_vocab", [40, 5000])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_chunked_loss_equals_autograd(
    terms: str, draft_vocab: int, chunk: int, dtype: torch.dtype, tolerance: float
) -> None:
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
    arguments = {
        "readout_DH": readout,
        "teacher_hidden_PH": teacher_hidden,
        "teacher_readout_DH": teacher_readout,
        "terms": TERMS[terms],
    }
    # The reference sees the teacher as rounded as autocast does: the k likeliest tokens depend on it.
    rounded = {name: arguments[name].to(dtype) for name in ("teacher_hidden_PH", "teacher_readout_DH")}
    reference = dense_distillation(rows, **(arguments | rounded))
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
        rows, readout_DH=readout, teacher_hidden_PH=teacher_hidden, teacher_readout_DH=readout, terms=TokenLoss()
    )
    assert abs(float(result.loss)) < 1e-4
    assert result.hits_K.tolist() == [9]


def test_one_step_of_eagle_is_the_official_objective() -> None:
    """1.0 x smooth L1 (mean over the features) + 0.1 x soft cross-entropy through the frozen head, means over the trained
    slots (the official training script's loss), with the same gradient; the values differ by the teacher's entropy."""
    head = random_head(head_config(**EAGLE)).double()
    embedding, readout = (weights.double() for weights in _weights())
    document = _training_document(source="last", num_steps=1)
    document = TrainingDocument(
        document.next_ids_T, document.states_TX.double(), document.last_TH.double(), document.slots
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
    target_SH = document.last_TH[slots + 1]
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
