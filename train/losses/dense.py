"""Reference of the chunked loss: the definitions of the terms, whole tensors, plain autograd.

A bucket becomes one more column of p and q, and the tokens that it covers are 0 in their own columns.

Shapes: R rows of a step, P teacher rows, D draft vocabulary, E outcomes: D, or D + 1 with a bucket, K steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eyas.train.features.teacher import LEAST_P, Distributions
from eyas.train.losses.rows import DistillationResult, JudgedBy, StepRows
from eyas.train.losses.terms import LEAST_ACCEPTANCE, TokenLoss
from eyas.train.matmul import wide_dtype


def dense_distillation(
    steps: Sequence[StepRows], *, readout_DH: Tensor, judge: JudgedBy, terms: TokenLoss
) -> DistillationResult:
    """What `chunked_distillation` computes, by the definitions."""
    # log p is asked for whatever the terms.
    target = judge.distributions(slice(None), terms=replace(terms, reverse_kl=1.0))
    losses, kl_sums, hits, acceptance_sums = [], [], [], []
    for step in steps:
        logits_RD = step.hidden_RH @ readout_DH.T
        log_q_RD = torch.log_softmax(logits_RD.to(wide_dtype(logits_RD.dtype)), dim=-1)
        rows = target.rows(step.targets_R)
        kl_R, acceptance_R, loss_R = _row_losses(log_q_RD, target=rows, terms=terms)
        losses.append(step.weight * loss_R.sum())
        kl_sums.append(kl_R.sum().detach())
        acceptance_sums.append(acceptance_R.sum().detach())
        hits.append((log_q_RD.argmax(dim=-1) == rows.best_C).sum())
    return DistillationResult(
        torch.stack(losses).sum(), torch.stack(kl_sums), torch.stack(hits), torch.stack(acceptance_sums)
    )


def _row_losses(log_q_RD: Tensor, *, target: Distributions, terms: TokenLoss) -> tuple[Tensor, Tensor, Tensor]:
    """Forward KL, acceptance and the weighted sum of terms of each row."""
    p_RE, log_p_RE, q_RE, log_q_RE = _outcomes(log_q_RD, target=target)
    # Where p = q, min(p, q) has no derivative; written so, the one from above is taken.
    acceptance_R = torch.where(q_RE < p_RE, q_RE, p_RE).sum(dim=-1)
    kl_R = (torch.xlogy(p_RE, p_RE) - p_RE * log_q_RE).sum(dim=-1)
    reverse_R = (q_RE * (log_q_RE - log_p_RE)).sum(dim=-1)
    log_m_RE = ((p_RE + q_RE) / 2).clamp_min(LEAST_P).log()
    js_R = (p_RE * (log_p_RE - log_m_RE) + q_RE * (log_q_RE - log_m_RE)).sum(dim=-1) / 2
    best_R1 = target.best_C[:, None]
    hard_R = -log_q_RD.gather(1, best_R1.clamp_min(0))[:, 0].masked_fill(best_R1[:, 0] < 0, 0.0)
    likeliest_Rk = target.probability_CD.topk(min(terms.top_k_tokens, log_q_RD.shape[1]), dim=-1)
    top_R = -(likeliest_Rk.values * log_q_RD.gather(1, likeliest_Rk.indices)).sum(dim=-1)
    loss_R = (
        terms.forward_kl * kl_R
        + terms.reverse_kl * reverse_R
        + terms.jensen_shannon * js_R
        + terms.total_variation * (1 - acceptance_R)
        - terms.log_acceptance * acceptance_R.clamp_min(LEAST_ACCEPTANCE).log()
        + terms.cross_entropy * hard_R
        + terms.top_k * top_R
    )
    return kl_R, acceptance_R, loss_R


def _outcomes(log_q_RD: Tensor, *, target: Distributions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, log p, q and log q of the outcomes."""
    assert target.log_CD is not None, "log p was asked for"
    if target.rest_C is None or target.outside_CD is None:
        return target.probability_CD, target.log_CD, log_q_RD.exp(), log_q_RD
    outside_RD, rest_R1 = target.outside_CD, target.rest_C[:, None]
    q_rest_R1 = torch.where(outside_RD, log_q_RD.exp(), 0.0).sum(dim=-1, keepdim=True)
    q_RE = torch.cat((torch.where(outside_RD, 0.0, log_q_RD.exp()), q_rest_R1), dim=-1)
    log_q_RE = torch.cat((log_q_RD, q_rest_R1.clamp_min(LEAST_P).log()), dim=-1)
    p_RE = torch.cat((target.probability_CD, rest_R1), dim=-1)
    log_p_RE = torch.cat((target.log_CD, rest_R1.clamp_min(LEAST_P).log()), dim=-1)
    return p_RE, log_p_RE, q_RE, log_q_RE
