"""Token losses in chunks against autograd, for exact teachers and for those that stored the likeliest tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from eyas.train.features.teacher import HiddenTeacher, Teacher, TopKTeacher, top_k_teacher
from eyas.train.losses import JudgedBy, StepRows, TokenLoss, chunked_distillation, dense_distillation

V, H, P = 100, 32, 24
TERMS = {
    "kl": TokenLoss(),
    "kl and top-k": TokenLoss(weight=0.1, top_k=10, top_k_weight=1.0),
    "top-k alone": TokenLoss(weight=0.0, top_k=3, top_k_weight=0.5),
}
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


def _rows(*, width: int = H) -> list[StepRows]:
    targets = [
        torch.arange(3, 23),
        torch.tensor([0, 1, 5, 6, 7, 8, 9, 20, 21, 22, 23]),
        torch.tensor([], dtype=torch.long),
    ]
    return [
        StepRows(hidden_RH=torch.randn(rows.shape[0], width, requires_grad=True), targets_R=rows, weight=weight)
        for rows, weight in zip(targets, (0.5, 0.25, 1.0), strict=True)
    ]


def _gradients(loss: torch.Tensor, rows: list[StepRows], readout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(3 * loss, [*[step.hidden_RH for step in rows], readout])


def _assert_equal(
    judge: JudgedBy,
    rounded: JudgedBy,
    *,
    draft_vocab: int,
    terms: TokenLoss,
    chunk: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    rows = _rows()
    readout = (0.3 * torch.randn(draft_vocab, H)).requires_grad_()
    reference = dense_distillation(rows, readout_DH=readout, judge=rounded, terms=terms)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = chunked_distillation(rows, readout_DH=readout, judge=judge, terms=terms, chunk_positions=chunk)
    torch.testing.assert_close(ours.loss, reference.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.kl_sums_K, reference.kl_sums_K, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:
        assert torch.equal(ours.hits_K, reference.hits_K)
    for a, b in zip(_gradients(ours.loss, rows, readout), _gradients(reference.loss, rows, readout), strict=True):
        scale = b.abs().max().item() if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-6))


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("draft_vocab", [40, 5000])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_chunked_loss_equals_autograd(
    terms: str, draft_vocab: int, chunk: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    hidden, readout, ids = torch.randn(P, H), 0.3 * torch.randn(draft_vocab, H), torch.arange(draft_vocab)
    # The reference sees the teacher as rounded as autocast does: the k likeliest tokens depend on it.
    rounded = JudgedBy(HiddenTeacher(hidden.to(dtype)), readout.to(dtype), ids)
    _assert_equal(
        JudgedBy(HiddenTeacher(hidden), readout, ids),
        rounded,
        draft_vocab=draft_vocab,
        terms=TERMS[terms],
        chunk=chunk,
        dtype=dtype,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("draft_vocab", [7, 40, V])
@pytest.mark.parametrize("k", [10, 60, V])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_chunked_loss_of_stored_tokens_equals_autograd(
    terms: str, draft_vocab: int, k: int, chunk: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    teacher = top_k_teacher(torch.randn(P, H), readout_VH=0.3 * torch.randn(V, H), k=k)
    judge = JudgedBy(teacher, torch.empty(0), torch.sort(torch.randperm(V)[:draft_vocab]).values)
    _assert_equal(
        judge,
        judge,
        draft_vocab=draft_vocab,
        terms=TERMS[terms],
        chunk=chunk,
        dtype=dtype,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("draft_vocab", [40, V])
def test_all_tokens_stored_is_the_exact_teacher(terms: str, draft_vocab: int) -> None:
    torch.manual_seed(0)
    hidden, readout_V = torch.randn(P, H), 0.3 * torch.randn(V, H)
    ids = torch.sort(torch.randperm(V)[:draft_vocab]).values
    exact = JudgedBy(HiddenTeacher(hidden), readout_V[ids], ids)
    stored = JudgedBy(top_k_teacher(hidden, readout_VH=readout_V, k=V), readout_V[ids], ids)
    rows, readout = _rows(), (0.3 * torch.randn(draft_vocab, H)).requires_grad_()
    a, b = (
        chunked_distillation(rows, readout_DH=readout, judge=judge, terms=TERMS[terms]) for judge in (exact, stored)
    )
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.kl_sums_K, b.kl_sums_K, rtol=1e-6, atol=1e-5)
    assert torch.equal(a.hits_K, b.hits_K)
    for x, y in zip(_gradients(a.loss, rows, readout), _gradients(b.loss, rows, readout), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_tokens_that_were_not_stored_are_one_bucket() -> None:
    """By hand: draft vocabulary {0, 2, 3, 5}; stored 2 (0.5), 1 (0.2), 5 (0.1); 0.2 is left, counted as tokens 0 and 3."""
    teacher = TopKTeacher(torch.tensor([[2, 1, 5]]), torch.tensor([[0.5, 0.2, 0.1]]).log(), torch.tensor([0.2]))
    logits_D = torch.tensor([0.3, -0.2, 0.5, 0.1], requires_grad=True)
    q = torch.softmax(logits_D, dim=0)
    p = torch.tensor([0.5, 0.1, 0.2]) / 0.8
    q_of = torch.stack((q[1], q[3], q[0] + q[2]))
    expected = (p * (p.log() - q_of.log())).sum()
    (expected_gradient,) = torch.autograd.grad(expected, logits_D)
    hidden = logits_D.detach()[None].clone().requires_grad_()
    result = chunked_distillation(
        [StepRows(hidden_RH=hidden, targets_R=torch.tensor([0]), weight=1.0)],
        readout_DH=torch.eye(4),
        judge=JudgedBy(teacher, torch.empty(0), torch.tensor([0, 2, 3, 5])),
        terms=TokenLoss(),
    )
    torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(torch.autograd.grad(result.loss, hidden)[0][0], expected_gradient)
    assert result.hits_K.tolist() == [0]  # the head's best is target token 3, the teacher's is 2


@pytest.mark.parametrize("tail", [0.0, 1e-30, 0.4])
@pytest.mark.parametrize("log_prob", [-0.5, -200.0])
@pytest.mark.parametrize("draft_ids", [[1, 2], [1, 2, 4, 6], [4, 6]])
def test_extreme_teachers_give_finite_losses_and_gradients(tail: float, log_prob: float, draft_ids: list[int]) -> None:
    """All draft tokens stored, none stored, no mass left, mass below the smallest float."""
    teacher = TopKTeacher(
        torch.tensor([[1, 2, 3]]), torch.tensor([[log_prob, log_prob - 1, -0.1]]), torch.tensor([tail])
    )
    hidden = torch.tensor([[90.0, -90.0, 5.0, 0.0]])[:, : len(draft_ids)].requires_grad_()
    result = chunked_distillation(
        [StepRows(hidden_RH=hidden, targets_R=torch.tensor([0]), weight=1.0)],
        readout_DH=torch.eye(len(draft_ids)),
        judge=JudgedBy(teacher, torch.empty(0), torch.tensor(draft_ids)),
        terms=TokenLoss(weight=1.0, top_k=2, top_k_weight=1.0),
    )
    (gradient,) = torch.autograd.grad(result.loss, hidden)
    assert torch.isfinite(result.loss)
    assert torch.isfinite(gradient).all()
    if draft_ids == [4, 6]:  # nothing stored is in the vocabulary: the bucket says nothing
        torch.testing.assert_close(result.loss.detach(), torch.tensor(0.0))
        assert gradient.abs().max() < 1e-6


def test_the_top_k_term_wants_no_more_tokens_than_were_stored() -> None:
    teacher = top_k_teacher(torch.randn(3, H), readout_VH=torch.randn(V, H), k=5)
    rows = [StepRows(hidden_RH=torch.randn(3, H), targets_R=torch.arange(3), weight=1.0)]
    judge = JudgedBy(teacher, torch.empty(0), torch.arange(V))

    def loss(terms: TokenLoss) -> float:
        return float(chunked_distillation(rows, readout_DH=torch.randn(V, H), judge=judge, terms=terms).loss)

    with pytest.raises(ValueError, match=r"train\.top_k=6 .*features\.teacher_k"):
        loss(TokenLoss(top_k=6, top_k_weight=0.1))
    loss(TokenLoss(top_k=5, top_k_weight=0.1))
    loss(TokenLoss(top_k=6, top_k_weight=0.0))


def test_the_stored_form_is_the_targets_distribution_cut() -> None:
    torch.manual_seed(0)
    last, readout = torch.randn(9, H), torch.randn(V, H)
    teacher = top_k_teacher(last, readout_VH=readout, k=6, chunk_positions=4)
    p = torch.softmax(last @ readout.T, dim=-1)
    values, ids = p.topk(6, dim=-1)
    assert torch.equal(teacher.ids_PK.long(), ids)
    torch.testing.assert_close(teacher.log_probs_PK.exp(), values)
    torch.testing.assert_close(teacher.tail_P, 1 - values.sum(dim=-1), atol=1e-6, rtol=0)
    assert top_k_teacher(last, readout_VH=readout, k=V).tail_P.tolist() == [0.0] * 9
    empty = top_k_teacher(last[:0], readout_VH=readout, k=6)
    assert empty.ids_PK.shape == (0, 6)


@pytest.mark.parametrize("teacher_of", ["hidden", "stored"])
def test_a_perfect_head_has_no_loss_and_hits_everything(teacher_of: str) -> None:
    hidden, readout = torch.randn(9, H), torch.randn(40, H)
    stored = top_k_teacher(hidden, readout_VH=readout, k=7)
    teacher: Teacher = HiddenTeacher(hidden) if teacher_of == "hidden" else stored
    rows = [StepRows(hidden_RH=hidden, targets_R=torch.arange(9), weight=1.0)]
    result = chunked_distillation(
        rows, readout_DH=readout, judge=JudgedBy(teacher, readout, torch.arange(40)), terms=TokenLoss()
    )
    assert abs(float(result.loss)) < 1e-4
    assert result.hits_K.tolist() == [9]


def test_soft_cross_entropy_is_the_kl_and_the_teachers_entropy() -> None:
    """The reference against torch's own divergence."""
    torch.manual_seed(0)
    hidden, readout, own = torch.randn(5, H), torch.randn(40, H), torch.randn(40, H)
    rows = [StepRows(hidden_RH=torch.randn(5, H), targets_R=torch.arange(5), weight=1.0)]
    judge = JudgedBy(HiddenTeacher(hidden), readout, torch.arange(40))
    result = dense_distillation(rows, readout_DH=own, judge=judge, terms=TokenLoss())
    log_q = torch.log_softmax(rows[0].hidden_RH @ own.T, dim=-1)
    log_p = torch.log_softmax(hidden @ readout.T, dim=-1)
    torch.testing.assert_close(result.loss, F.kl_div(log_q, log_p, log_target=True, reduction="sum"))
