"""Values of the terms and their closed gradients for a block of rows, in few passes over [R, D].

With q = softmax(z), dL/dz = q (u - sum q u) where u = dL/dq. So dL/dz is

- forward_kl: q - p.
- reverse_kl: q (v - sum q v) with v = log(q / p).
- jensen_shannon: the same with v = log(q / m) / 2, m = (p + q) / 2.
- total_variation: with v = -[q < p], the derivative of -sum min(p, q); where p = q it is taken from above.
- log_acceptance: that of total variation divided by the row's sum min(p, q).
- cross_entropy: q - e, e being 1 at the target's likeliest draft token and 0 elsewhere.
- top_k: sum(p_k) q - p_k with p_k = p at the k likeliest tokens and 0 elsewhere.

Those with a v are linear in it, so they share one q (v - sum q v). In log_acceptance 1 / sum min(p, q) may be huge and
yet no entry exceeds 1: where q < p, q is at most that sum, and elsewhere v is exactly 0.

Bucket (features/teacher.py). For the first five, u depends on p / q alone, which for a bucket is p_rest / q_rest. So the
formulas hold with p = p_rest q / q_rest at its tokens: the bucket's mass spread as the head spreads it.

Shapes: R rows of a block, D draft vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.train.features.teacher import LEAST_P, Distributions
from eyas.train.losses.terms import LEAST_ACCEPTANCE, TokenLoss


@dataclass(frozen=True)
class BlockSums:
    """Sums over the rows of a block: the weighted terms, forward KL, rows that hit, and acceptance."""

    loss: Tensor
    kl: Tensor
    hits: Tensor
    acceptance: Tensor


def logits_to_gradient(
    logits_RD: Tensor, *, target: Distributions, terms: TokenLoss, spare_RD: Tensor, mixed_RD: Tensor | None
) -> BlockSums:
    """Replace logits by the gradient of the sum of the rows' losses with respect to them.

    Args:
        spare_RD: room that is overwritten.
        mixed_RD: more of it, for reverse KL and Jensen-Shannon; None without.
    """
    hits = _hits(logits_RD, best_R=target.best_C)
    log_q_RD = torch.log_softmax(logits_RD, dim=-1, out=spare_RD)
    q_RD = torch.exp(log_q_RD, out=logits_RD)
    kl = target.negative_entropy_C.sum() - _dot(target.probability_CD, log_q_RD)
    if target.rest_C is not None and target.outside_CD is not None:
        log_q_rest_R = _log_q_rest(log_q_RD, outside_RD=target.outside_CD)
        kl = kl - torch.dot(target.rest_C, log_q_rest_R)
        target = _spread(target, log_q_RD=log_q_RD, log_q_rest_R=log_q_rest_R)
    if terms.only_forward_kl:
        gradient_RD = q_RD.sub_(target.probability_CD)
        acceptance = _accepted(gradient_RD, spare_RD=spare_RD)
        if terms.forward_kl != 1.0:
            gradient_RD.mul_(terms.forward_kl)
        return BlockSums(kl * terms.forward_kl, kl, hits, acceptance)
    loss, acceptance = _mix(q_RD, log_q_RD=log_q_RD, target=target, terms=terms, mixed_RD=mixed_RD, kl=kl)
    return BlockSums(loss, kl, hits, acceptance)


def _mix(
    q_RD: Tensor, *, log_q_RD: Tensor, target: Distributions, terms: TokenLoss, mixed_RD: Tensor | None, kl: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace q by the gradient of any mix of terms; their sum, and that of acceptance."""
    loss = terms.forward_kl * kl + _named_losses(log_q_RD, target=target, terms=terms)
    if terms.needs_log_p:
        assert mixed_RD is not None, "reverse KL and Jensen-Shannon need room"
        loss = loss + _add_log_ratios(mixed_RD.zero_(), q_RD, log_q_RD=log_q_RD, target=target, terms=terms)
        mixed_RD.sub_(torch.linalg.vecdot(q_RD, mixed_RD)[:, None]).mul_(q_RD)
    # log q is used up, and its room is free.
    if terms.needs_acceptance:
        acceptance_R = torch.minimum(q_RD, target.probability_CD, out=log_q_RD).sum(dim=-1)
        floored_R = acceptance_R.clamp_min(LEAST_ACCEPTANCE)
        loss = loss + terms.total_variation * (1 - acceptance_R).sum() - terms.log_acceptance * floored_R.log().sum()
        steepness_R = torch.where(acceptance_R < LEAST_ACCEPTANCE, 0.0, terms.log_acceptance / floored_R)
        slope_R1 = (terms.total_variation + steepness_R)[:, None]
        # q where q < p. With its sum B the gradient is slope (B q - q [q < p]).
        below_RD = torch.lt(q_RD, target.probability_CD, out=log_q_RD).mul_(q_RD)
        _to_linear_terms(q_RD, more_R1=slope_R1 * below_RD.sum(dim=-1, keepdim=True), target=target, terms=terms)
        q_RD.addcmul_(below_RD, slope_R1, value=-1.0)
        acceptance = acceptance_R.sum()
    else:
        acceptance = _accepted(torch.sub(q_RD, target.probability_CD, out=log_q_RD), spare_RD=log_q_RD)
        _to_linear_terms(q_RD, more_R1=None, target=target, terms=terms)
    if mixed_RD is not None:
        q_RD.add_(mixed_RD)
    return loss, acceptance


def _add_log_ratios(
    slopes_RD: Tensor, q_RD: Tensor, *, log_q_RD: Tensor, target: Distributions, terms: TokenLoss
) -> Tensor:
    """Add v of reverse KL and Jensen-Shannon to `slopes_RD`; the sum of their values."""
    assert target.log_CD is not None, "the terms asked for log p"
    p_RD, log_p_RD, loss = target.probability_CD, target.log_CD, log_q_RD.new_zeros(())
    if terms.reverse_kl > 0.0:
        ratio_RD = log_q_RD - log_p_RD
        loss = loss + terms.reverse_kl * _dot(q_RD, ratio_RD)
        slopes_RD.add_(ratio_RD, alpha=terms.reverse_kl)
    if terms.jensen_shannon > 0.0:
        log_m_RD = (p_RD + q_RD).mul_(0.5).clamp_min_(LEAST_P).log_()
        loss = loss + terms.jensen_shannon / 2 * _dot(p_RD, log_p_RD - log_m_RD)
        ratio_RD = torch.sub(log_q_RD, log_m_RD, out=log_m_RD)
        loss = loss + terms.jensen_shannon / 2 * _dot(q_RD, ratio_RD)
        slopes_RD.add_(ratio_RD, alpha=terms.jensen_shannon / 2)
    return loss


def _named_losses(log_q_RD: Tensor, *, target: Distributions, terms: TokenLoss) -> Tensor:
    """Sum of the weighted terms that name single tokens: cross-entropy and top-k."""
    loss = log_q_RD.new_zeros(())
    if terms.cross_entropy > 0.0:
        hard_R = log_q_RD.gather(1, target.best_C.clamp_min(0)[:, None])[:, 0]
        loss = loss - terms.cross_entropy * hard_R.masked_fill(target.best_C < 0, 0.0).sum()
    if target.likeliest_Ck is not None and target.likeliest_p_Ck is not None:
        loss = loss - terms.top_k * (target.likeliest_p_Ck * log_q_RD.gather(1, target.likeliest_Ck)).sum()
    return loss


def _to_linear_terms(q_RD: Tensor, *, more_R1: Tensor | None, target: Distributions, terms: TokenLoss) -> None:
    """Replace q by `more_R1` q plus the gradient of forward KL, cross-entropy and top-k."""
    known_R1 = (target.best_C >= 0).to(q_RD.dtype)[:, None]
    mass_R1 = terms.forward_kl + terms.cross_entropy * known_R1
    if more_R1 is not None:
        mass_R1 = mass_R1 + more_R1
    if target.likeliest_p_Ck is not None:
        mass_R1 = mass_R1 + terms.top_k * target.likeliest_p_Ck.sum(dim=-1, keepdim=True)
    q_RD.mul_(mass_R1)
    if terms.forward_kl > 0.0:
        q_RD.sub_(target.probability_CD, alpha=terms.forward_kl)
    if terms.cross_entropy > 0.0:
        q_RD.scatter_add_(1, target.best_C.clamp_min(0)[:, None], -terms.cross_entropy * known_R1)
    if target.likeliest_Ck is not None and target.likeliest_p_Ck is not None:
        q_RD.scatter_add_(1, target.likeliest_Ck, -terms.top_k * target.likeliest_p_Ck)


def _accepted(difference_RD: Tensor, *, spare_RD: Tensor) -> Tensor:
    """Sum over rows of sum min(p, q) from q - p: both add up to 1, so it is 1 - sum max(q - p, 0)."""
    return difference_RD.shape[0] - torch.clamp(difference_RD, min=0.0, out=spare_RD).sum()


def _hits(logits_RD: Tensor, *, best_R: Tensor) -> Tensor:
    """Rows whose logit of the teacher's best token is above all others: a maximum, far cheaper than an argmax."""
    best_R1 = best_R.clamp_min(0)[:, None]
    own_R1 = logits_RD.gather(1, best_R1)
    others_R = logits_RD.scatter_(1, best_R1, float("-inf")).amax(dim=-1)
    logits_RD.scatter_(1, best_R1, own_R1)
    return ((own_R1[:, 0] > others_R) & (best_R >= 0)).sum()


def _log_q_rest(log_q_RD: Tensor, *, outside_RD: Tensor) -> Tensor:
    """log of the head's mass of the bucket; 0 where no token is in it, since -inf times a p_rest of 0 is no number."""
    log_rest_R = torch.logsumexp(log_q_RD.masked_fill(~outside_RD, float("-inf")), dim=-1)
    return torch.where(log_rest_R.isfinite(), log_rest_R, 0.0)


def _spread(target: Distributions, *, log_q_RD: Tensor, log_q_rest_R: Tensor) -> Distributions:
    """The distributions with the bucket's mass spread as the head spreads it."""
    assert target.rest_C is not None and target.outside_CD is not None, "no bucket to spread"
    log_ratio_R1 = (target.rest_C.clamp_min(LEAST_P).log() - log_q_rest_R)[:, None]
    # Where p_rest = q_rest but for rounding, as where nothing else is known, q < p must not hold for some tokens of the
    # bucket and not for others: there p is q to the bit.
    equal_R1 = log_ratio_R1.abs() < 64 * torch.finfo(log_ratio_R1.dtype).eps
    log_ratio_R1 = log_ratio_R1.masked_fill(equal_R1, 0.0)
    log_spread_RD = log_q_RD + log_ratio_R1
    return replace(
        target,
        probability_CD=torch.where(target.outside_CD, log_spread_RD.exp(), target.probability_CD),
        log_CD=None if target.log_CD is None else torch.where(target.outside_CD, log_spread_RD, target.log_CD),
    )


def _dot(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    return torch.dot(a_RD.flatten(), b_RD.flatten())
