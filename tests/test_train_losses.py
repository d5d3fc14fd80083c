"""Token losses in chunks against the definitions and autograd, for exact teachers and for stored likeliest tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.train.features.teacher import HiddenTeacher, Teacher, TopKTeacher, top_k_teacher
from eyas.train.losses import JudgedBy, StepRows, TokenLoss, chunked_distillation, dense_distillation

V, H, P = 100, 32, 24
NONE = TokenLoss(forward_kl=0.0)
SINGLE = {
    "forward_kl": TokenLoss(),
    "reverse_kl": replace(NONE, reverse_kl=0.7),
    "jensen_shannon": replace(NONE, jensen_shannon=1.3),
    "total_variation": replace(NONE, total_variation=1.0),
    "log_acceptance": replace(NONE, log_acceptance=0.8),
    "cross_entropy": replace(NONE, cross_entropy=1.0),
    "top_k": replace(NONE, top_k=0.5, top_k_tokens=3),
}
TERMS = SINGLE | {
    "half of forward_kl": TokenLoss(forward_kl=0.5),
    "HASS": TokenLoss(forward_kl=0.1, top_k=1.0, top_k_tokens=10),
    "all": TokenLoss(
        forward_kl=0.3,
        reverse_kl=0.2,
        jensen_shannon=0.5,
        total_variation=0.7,
        log_acceptance=0.4,
        cross_entropy=0.6,
        top_k=0.1,
    ),
}


def _rows(*, width: int = H, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[StepRows]:
    """Rows that point at stretches, at scattered rows, at nothing, and at one row twice."""
    targets = [
        torch.arange(3, 23),
        torch.tensor([0, 1, 5, 6, 7, 8, 9, 20, 21, 22, 23]),
        torch.tensor([], dtype=torch.long),
        torch.tensor([4, 4, 6]),
    ]
    return [
        StepRows((scale * torch.randn(len(rows), width, dtype=dtype)).requires_grad_(), rows, weight)
        for rows, weight in zip(targets, (0.5, 0.25, 1.0, 0.125), strict=True)
    ]


def _gradients(loss: torch.Tensor, rows: list[StepRows], readout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(3 * loss, [readout, *[step.hidden_RH for step in rows]])


def _assert_equal(
    judge: JudgedBy,
    *,
    rows: list[StepRows],
    readout: torch.Tensor,
    terms: TokenLoss,
    chunk: int | None = None,
    tolerance: float = 2e-5,
    least_scale: float = 1e-6,
) -> None:
    """Loss, sums and gradients against the reference; gradients to within the tolerance of their largest entry, which
    counts as `least_scale` at least."""
    reference = dense_distillation(rows, readout_DH=readout, judge=judge, terms=terms)
    ours = chunked_distillation(rows, readout_DH=readout, judge=judge, terms=terms, chunk_positions=chunk)
    assert torch.isfinite(ours.loss)
    torch.testing.assert_close(ours.loss, reference.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.kl_sums_K, reference.kl_sums_K, rtol=tolerance, atol=tolerance * 10)
    torch.testing.assert_close(ours.acceptance_sums_K, reference.acceptance_sums_K, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours.hits_K, reference.hits_K)
    for a, b in zip(_gradients(ours.loss, rows, readout), _gradients(reference.loss, rows, readout), strict=True):
        scale = max(b.abs().max().item(), least_scale) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale)


def _judge(kind: str, *, draft_vocab: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> JudgedBy:
    """An exact teacher, or one that stored `kind` tokens."""
    hidden, readout = scale * torch.randn(P, H, dtype=dtype), 0.3 * torch.randn(V, H, dtype=dtype)
    ids = torch.sort(torch.randperm(V)[:draft_vocab]).values
    if kind == "hidden":
        return JudgedBy(HiddenTeacher(hidden), readout[ids], ids)
    return JudgedBy(top_k_teacher(hidden, readout_VH=readout, k=int(kind)), None, ids)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize(("kind", "draft_vocab"), [("hidden", 40), ("10", 40), ("60", 7), ("60", V), ("100", 40)])
def test_chunked_loss_equals_autograd(terms: str, chunk: int | None, kind: str, draft_vocab: int) -> None:
    torch.manual_seed(0)
    judge, rows = _judge(kind, draft_vocab=draft_vocab), _rows()
    readout = (0.3 * torch.randn(draft_vocab, H)).requires_grad_()
    _assert_equal(judge, rows=rows, readout=readout, terms=TERMS[terms], chunk=chunk)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("kind", ["hidden", "10"])
def test_closed_gradients_are_derivatives(terms: str, kind: str) -> None:
    """In float64, along a random direction; the kinks of min(p, q) are far from these points."""
    torch.manual_seed(0)
    judge, rows = _judge(kind, draft_vocab=20, dtype=torch.float64), _rows(dtype=torch.float64)
    readout = (0.3 * torch.randn(20, H, dtype=torch.float64)).requires_grad_()
    inputs = [readout, *[step.hidden_RH for step in rows]]
    directions = [torch.randn_like(tensor) for tensor in inputs]

    def loss(shift: float) -> torch.Tensor:
        moved = [tensor + shift * direction for tensor, direction in zip(inputs, directions, strict=True)]
        steps = [replace(step, hidden_RH=rows_RH) for step, rows_RH in zip(rows, moved[1:], strict=True)]
        return chunked_distillation(steps, readout_DH=moved[0], judge=judge, terms=TERMS[terms], chunk_positions=9).loss

    gradients = torch.autograd.grad(loss(0.0), inputs)
    slope = sum(float((a * b).sum()) for a, b in zip(gradients, directions, strict=True))
    width = 1e-6
    assert float((loss(width) - loss(-width)).detach()) / (2 * width) == pytest.approx(slope, rel=1e-6)
    _assert_equal(judge, rows=rows, readout=readout, terms=TERMS[terms], chunk=9, tolerance=1e-10)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.01, 1.0, 3.7]), min_size=7, max_size=7),
    tokens=st.integers(1, 10),
    kind=st.sampled_from(["hidden", "10"]),
    chunk=st.integers(1, P + 1),
    seed=st.integers(0, 1000),
)
def test_any_mix_is_the_sum_of_its_terms(weights: list[float], tokens: int, kind: str, chunk: int, seed: int) -> None:
    torch.manual_seed(seed)
    terms = TokenLoss(**dict(zip(SINGLE, weights, strict=True)), top_k_tokens=tokens)
    judge, rows = _judge(kind, draft_vocab=30), _rows()
    _assert_equal(
        judge, rows=rows, readout=torch.randn(30, H).requires_grad_(), terms=terms, chunk=chunk, tolerance=1e-4
    )


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("kind", ["hidden", "10"])
def test_bf16_products_change_the_loss_by_their_rounding_only(terms: str, kind: str) -> None:
    """bf16 rounds to 2^-9 relative. Inputs are rounded for the reference too, so what differs is the rounding of logits,
    of up to 4, by at most 2^-7 each, and of gradients of logits and their products: all below 3 %, most far below."""
    torch.manual_seed(0)
    terms_, judge, rows = TERMS[terms], _judge(kind, draft_vocab=40), _rows()
    readout = (0.3 * torch.randn(40, H)).bfloat16().float().requires_grad_()
    rows = [replace(step, hidden_RH=step.hidden_RH.detach().bfloat16().float().requires_grad_()) for step in rows]
    if isinstance(judge.teacher, HiddenTeacher):
        assert judge.readout_DH is not None
        rounded = HiddenTeacher(judge.teacher.hidden_PH.bfloat16())
        judge = JudgedBy(rounded, judge.readout_DH.bfloat16(), judge.draft_to_target_D)
    reference = dense_distillation(rows, readout_DH=readout, judge=judge, terms=terms_)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_distillation(rows, readout_DH=readout, judge=judge, terms=terms_, chunk_positions=7)
    assert ours.loss.dtype == torch.float32
    torch.testing.assert_close(ours.loss, reference.loss, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours.acceptance_sums_K, reference.acceptance_sums_K, rtol=1e-2, atol=1e-2)
    for a, b in zip(_gradients(ours.loss, rows, readout), _gradients(reference.loss, rows, readout), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 3e-2 * b.norm()


@pytest.mark.parametrize("kind", ["hidden", "10"])
def test_autocast_reaches_the_products_alone(kind: str) -> None:
    """The same numbers as with bf16 tensors and without autocast, to the bit."""
    torch.manual_seed(0)
    judge, rows, readout = _judge(kind, draft_vocab=40), _rows(), torch.randn(40, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_distillation(rows, readout_DH=readout, judge=judge, terms=TERMS["all"])
    narrow = [replace(step, hidden_RH=step.hidden_RH.detach().bfloat16()) for step in rows]
    other = chunked_distillation(narrow, readout_DH=readout.bfloat16(), judge=judge, terms=TERMS["all"])
    assert torch.equal(ours.loss.detach(), other.loss)
    assert torch.equal(ours.kl_sums_K, other.kl_sums_K)
    assert torch.equal(ours.acceptance_sums_K, other.acceptance_sums_K)


def test_the_readouts_gradient_is_summed_in_float32() -> None:
    """Thousands of small contributions: a bf16 sum would stop growing at 256 of them."""
    hidden = torch.ones(2048, 1, requires_grad=True)
    readout = torch.zeros(2, 1, requires_grad=True)
    judge = JudgedBy(HiddenTeacher(torch.full((2048, 1), 40.0)), torch.tensor([[1.0], [-1.0]]), torch.arange(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = chunked_distillation(
            [StepRows(hidden, torch.arange(2048), 1.0)],
            readout_DH=readout,
            judge=judge,
            terms=TokenLoss(),
            chunk_positions=1,
        )
    (gradient,) = torch.autograd.grad(result.loss, readout)
    torch.testing.assert_close(gradient, torch.tensor([[-1024.0], [1024.0]]))


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_large_vocabularies_and_peaked_distributions(terms: str, scale: float) -> None:
    """At scale 30 nearly all p and q are 0 in float32, and mostly p and q do not meet.

    Logits in the hundreds are known to 3e-5, so probabilities are to 1e-4. Where a term saturates its gradient is what is
    left of log-ratios of hundreds, each known to 3e-5, times hidden states of some tens.
    """
    torch.manual_seed(0)
    large, width = 32768, 8
    judge = JudgedBy(HiddenTeacher(scale * torch.randn(P, width)), torch.randn(large, width), torch.arange(large))
    readout = torch.randn(large, width).requires_grad_()
    with torch.no_grad():
        p = judge.distributions(slice(None), terms=NONE).probability_CD
        assert bool((p == 0).any()) == (scale == 30.0)
    rows = _rows(width=width, scale=scale)
    _assert_equal(judge, rows=rows, readout=readout, terms=TERMS[terms], chunk=5, tolerance=3e-4, least_scale=scale)


@pytest.mark.parametrize("terms", TERMS)
def test_a_head_that_is_its_target_gets_no_gradient_from_divergences(terms: str) -> None:
    """p = q bit for bit: every min(p, q) is a tie."""
    torch.manual_seed(0)
    hidden, readout = torch.randn(9, H), torch.randn(40, H)
    rows = [StepRows(hidden.clone().requires_grad_(), torch.arange(9), 1.0)]
    result = chunked_distillation(
        rows,
        readout_DH=readout,
        judge=JudgedBy(HiddenTeacher(hidden), readout, torch.arange(40)),
        terms=TERMS[terms],
    )
    (gradient,) = torch.autograd.grad(result.loss, rows[0].hidden_RH)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(result.acceptance_sums_K, torch.tensor([9.0]))
    assert result.hits_K.tolist() == [9]
    assert abs(result.kl_sums_K.item()) < 1e-4
    if terms in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "log_acceptance"):
        assert abs(result.loss.item()) < 1e-4
        assert gradient.abs().max() < 1e-4


def test_log_acceptance_without_common_ground_is_finite() -> None:
    """sum min(p, q) is about e^-60: its gradient still moves the head to the target's token; at e^-200 it is given up."""
    for gap, expected in ((60.0, 60.0), (200.0, 69.1)):
        hidden = torch.tensor([[0.0, gap]], requires_grad=True)
        result = chunked_distillation(
            [StepRows(hidden, torch.tensor([0]), 1.0)],
            readout_DH=torch.eye(2),
            judge=JudgedBy(HiddenTeacher(torch.tensor([[2 * gap, 0.0]])), torch.eye(2), torch.arange(2)),
            terms=SINGLE["log_acceptance"],
        )
        (gradient,) = torch.autograd.grad(result.loss, hidden)
        assert result.loss.item() == pytest.approx(0.8 * expected, rel=1e-2)
        wanted = [[-0.8, 0.8]] if gap == 60.0 else [[0.0, 0.0]]
        torch.testing.assert_close(gradient, torch.tensor(wanted), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("terms", TERMS)
def test_rows_of_no_weight_and_no_rows_give_zero_gradients(terms: str) -> None:
    torch.manual_seed(0)
    judge, readout = _judge("hidden", draft_vocab=40), torch.randn(40, H, requires_grad=True)
    weightless = [replace(step, weight=0.0) for step in _rows()]
    empty = [StepRows(torch.zeros(0, H, requires_grad=True), torch.zeros(0, dtype=torch.long), 1.0) for _ in range(2)]
    for rows in (weightless, empty):
        result = chunked_distillation(rows, readout_DH=readout, judge=judge, terms=TERMS[terms])
        assert result.loss.item() == 0.0
        assert result.kl_sums_K.shape == (len(rows),)
        for gradient in _gradients(result.loss, rows, readout):
            assert gradient.count_nonzero() == 0
    no_teacher = JudgedBy(HiddenTeacher(torch.zeros(0, H)), torch.randn(40, H), torch.arange(40))
    result = chunked_distillation(empty, readout_DH=readout, judge=no_teacher, terms=TERMS[terms])
    assert _gradients(result.loss, empty, readout)[0].count_nonzero() == 0
    # One step without weight among others leaves the others as they are.
    mixed = [replace(step, weight=0.0 if number == 0 else step.weight) for number, step in enumerate(_rows())]
    _assert_equal(judge, rows=mixed, readout=readout, terms=TERMS[terms], chunk=7)


def test_a_frozen_readout_gets_no_gradient_and_the_hidden_states_the_same() -> None:
    torch.manual_seed(0)
    judge, rows, readout = _judge("hidden", draft_vocab=40), _rows(), torch.randn(40, H, requires_grad=True)
    trained = chunked_distillation(rows, readout_DH=readout, judge=judge, terms=TERMS["all"])
    frozen = chunked_distillation(rows, readout_DH=readout.detach(), judge=judge, terms=TERMS["all"])
    expected = _gradients(trained.loss, rows, readout)[1:]
    for a, b in zip(torch.autograd.grad(3 * frozen.loss, [step.hidden_RH for step in rows]), expected, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        silent = chunked_distillation(rows, readout_DH=readout, judge=judge, terms=TERMS["all"])
    assert torch.equal(silent.loss, trained.loss.detach())


def test_no_tensor_of_all_rows_and_the_vocabulary_exists() -> None:
    """Every tensor that an operation makes is as tall as a chunk at most, where it is as wide as the vocabulary."""
    seen: list[torch.Size] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            seen.extend(
                item.shape for item in (result if isinstance(result, tuple) else (result,)) if hasattr(item, "shape")
            )
            return result

    judge, rows, readout = _judge("hidden", draft_vocab=41), _rows(), torch.randn(41, H, requires_grad=True)
    with Watch():
        chunked_distillation(
            rows, readout_DH=readout, judge=judge, terms=TERMS["all"], chunk_positions=2
        ).loss.backward()
    heights = {shape[0] for shape in seen if len(shape) == 2 and shape[1] == 41 and shape[0] not in (41, H)}
    assert max(heights) <= 2 * 2 + 2  # two stretches of two, and one row that is pointed at twice


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
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.kl_sums_K, b.kl_sums_K, rtol=1e-5, atol=1e-5)
    assert torch.equal(a.hits_K, b.hits_K)
    for x, y in zip(_gradients(a.loss, rows, readout), _gradients(b.loss, rows, readout), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_tokens_that_were_not_stored_are_one_bucket() -> None:
    """By hand: draft vocabulary {0, 2, 3, 5}; stored 2 (0.5), 1 (0.2), 5 (0.1); 0.2 is left, counted as tokens 0 and 3."""
    teacher = TopKTeacher(torch.tensor([[2, 1, 5]]), torch.tensor([[0.5, 0.2, 0.1]]).log(), torch.tensor([0.2]))
    logits_D = torch.tensor([0.3, -0.2, 0.5, 0.1], requires_grad=True)
    q = torch.softmax(logits_D, dim=0)
    p = torch.tensor([0.5, 0.1, 0.2]) / 0.8
    q_of = torch.stack((q[1], q[3], q[0] + q[2]))
    middle = (p + q_of) / 2
    acceptance = torch.minimum(p, q_of).sum()
    expected = {
        "forward_kl": (p * (p.log() - q_of.log())).sum(),
        "reverse_kl": 0.7 * (q_of * (q_of.log() - p.log())).sum(),
        "jensen_shannon": 0.65 * (p * (p / middle).log() + q_of * (q_of / middle).log()).sum(),
        "total_variation": 1 - acceptance,
        "log_acceptance": -0.8 * acceptance.log(),
        "cross_entropy": -q[1].log(),
    }
    for name, loss in expected.items():
        (expected_gradient,) = torch.autograd.grad(loss, logits_D, retain_graph=True)
        hidden = logits_D.detach()[None].clone().requires_grad_()
        result = chunked_distillation(
            [StepRows(hidden_RH=hidden, targets_R=torch.tensor([0]), weight=1.0)],
            readout_DH=torch.eye(4),
            judge=JudgedBy(teacher, None, torch.tensor([0, 2, 3, 5])),
            terms=SINGLE[name],
        )
        torch.testing.assert_close(result.loss, loss.detach())
        torch.testing.assert_close(result.acceptance_sums_K, acceptance.detach()[None])
        torch.testing.assert_close(torch.autograd.grad(result.loss, hidden)[0][0], expected_gradient)
        assert result.hits_K.tolist() == [0]  # the head's best is target token 3, the teacher's is 2


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("tail", [0.0, 1e-30, 0.4])
@pytest.mark.parametrize("log_prob", [-0.5, -200.0, float("-inf")])
@pytest.mark.parametrize("draft_ids", [[1, 2], [1, 2, 4, 6], [4, 6]])
def test_extreme_teachers_give_finite_losses_and_gradients(
    terms: str, tail: float, log_prob: float, draft_ids: list[int]
) -> None:
    """All draft tokens stored, none stored, no mass left, mass below the smallest float."""
    teacher = TopKTeacher(
        torch.tensor([[1, 2, 3]]), torch.tensor([[log_prob, log_prob - 1, -0.1]]), torch.tensor([tail])
    )
    hidden = torch.tensor([[90.0, -90.0, 5.0, 0.0]])[:, : len(draft_ids)].requires_grad_()
    result = chunked_distillation(
        [StepRows(hidden_RH=hidden, targets_R=torch.tensor([0]), weight=1.0)],
        readout_DH=torch.eye(len(draft_ids)),
        judge=JudgedBy(teacher, None, torch.tensor(draft_ids)),
        terms=replace(TERMS[terms], top_k_tokens=2),
    )
    (gradient,) = torch.autograd.grad(result.loss, hidden)
    assert torch.isfinite(result.loss)
    assert torch.isfinite(gradient).all()
    if draft_ids == [4, 6]:  # nothing stored is in the vocabulary: the bucket says nothing
        torch.testing.assert_close(result.loss.detach(), torch.tensor(0.0))
        assert gradient.abs().max() < 1e-6


def test_a_tie_for_the_likeliest_token_is_no_hit() -> None:
    """A head without weights likes all tokens equally and must not count as right."""
    judge = JudgedBy(HiddenTeacher(torch.tensor([[1.0]])), torch.tensor([[3.0], [1.0]]), torch.arange(2))
    rows = [StepRows(torch.ones(1, 1), torch.tensor([0]), 1.0)]
    for readout, hits in (([[0.0], [0.0]], 0), ([[0.1], [0.0]], 1), ([[0.0], [0.1]], 0)):
        result = chunked_distillation(rows, readout_DH=torch.tensor(readout), judge=judge, terms=TokenLoss())
        assert result.hits_K.tolist() == [hits]


def test_the_top_k_term_wants_no_more_tokens_than_were_stored() -> None:
    teacher = top_k_teacher(torch.randn(3, H), readout_VH=torch.randn(V, H), k=5)
    rows = [StepRows(hidden_RH=torch.randn(3, H), targets_R=torch.arange(3), weight=1.0)]
    judge = JudgedBy(teacher, None, torch.arange(V))

    def loss(terms: TokenLoss) -> float:
        return float(chunked_distillation(rows, readout_DH=torch.randn(V, H), judge=judge, terms=terms).loss)

    with pytest.raises(ValueError, match=r"train\.losses\.top_k_tokens=6 .*features\.teacher_k"):
        loss(TokenLoss(top_k_tokens=6, top_k=0.1))
    loss(TokenLoss(top_k_tokens=5, top_k=0.1))
    loss(TokenLoss(top_k_tokens=6, top_k=0.0))


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
    torch.manual_seed(0)
    hidden, readout = torch.randn(9, H), torch.randn(40, H)
    stored = top_k_teacher(hidden, readout_VH=readout, k=7)
    teacher: Teacher = HiddenTeacher(hidden) if teacher_of == "hidden" else stored
    rows = [StepRows(hidden_RH=hidden, targets_R=torch.arange(9), weight=1.0)]
    result = chunked_distillation(
        rows, readout_DH=readout, judge=JudgedBy(teacher, readout, torch.arange(40)), terms=TokenLoss()
    )
    assert abs(result.loss.item()) < 1e-4
    assert result.hits_K.tolist() == [9]


def test_the_references_terms_are_what_they_are_called() -> None:
    """The reference against torch's own divergences and losses."""
    torch.manual_seed(0)
    hidden, readout, own = torch.randn(5, H), torch.randn(40, H), torch.randn(40, H)
    rows = [StepRows(hidden_RH=torch.randn(5, H), targets_R=torch.arange(5), weight=1.0)]
    judge = JudgedBy(HiddenTeacher(hidden), readout, torch.arange(40))
    log_q = torch.log_softmax(rows[0].hidden_RH @ own.T, dim=-1)
    log_p = torch.log_softmax(hidden @ readout.T, dim=-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((p + q) / 2).log()
    values, ids = p.topk(3, dim=-1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.kl_div(b, a, log_target=True, reduction="sum")

    expected = {
        "forward_kl": kl(log_p, log_q),
        "reverse_kl": 0.7 * kl(log_q, log_p),
        "jensen_shannon": 0.65 * (kl(log_p, log_m) + kl(log_q, log_m)),
        "total_variation": 0.5 * F.l1_loss(p, q, reduction="sum"),
        "log_acceptance": -0.8 * torch.minimum(p, q).sum(dim=-1).log().sum(),
        "cross_entropy": F.cross_entropy(log_q, p.argmax(dim=-1), reduction="sum"),
        "top_k": -0.5 * (values * log_q.gather(1, ids)).sum(),
    }
    for name, terms in SINGLE.items():
        result = dense_distillation(rows, readout_DH=own, judge=judge, terms=terms)
        torch.testing.assert_close(result.loss, expected[name])
