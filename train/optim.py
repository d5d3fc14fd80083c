"""Optimiser and learning-rate schedule.

AdamW for everything, or Muon for the matrices of the layers and of `fc` with AdamW for the rest (muon.py). The rate is a
pure function of the step, so a resumed run needs no scheduler state; one scheduled rate drives all parameter groups,
each of which multiplies it by its "rate_scale".
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eyas.train.muon import MuonAdamW

Schedule = Literal["cosine", "linear", "constant", "wsd"]

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Where torch has a fused AdamW, in every floating-point type."""

VOCABULARY_MODULES = frozenset({"embed_tokens", "lm_head"})
"""Matrices with a row for each token: what Muon leaves to AdamW."""


def make_optimizer(
    module: nn.Module,
    *,
    kind: Literal["adamw", "muon"],
    learning_rate: float,
    muon_learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Optimiser over the trainable parameters of `module`, in the order of `module.named_parameters()`.

    With "muon", `fc` and the matrices of the layers are updated by Muon: they map dense vectors to dense vectors, which
    is what a step of equal size in all singular directions is made for. Embedding and `lm_head` select or score single
    tokens, and rare tokens would be moved as far as frequent ones; they stay with AdamW, as do norms and biases (Jordan
    et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982; speculators 0.9 divides alike).

    Args:
        learning_rate: peak rate of AdamW. muon_learning_rate: of Muon, as a root-mean-square step: a step of Muon is as
            long as one of AdamW at the same rate (arXiv 2502.16982, eq. 4), so AdamW's rate is a place to start.
        weight_decay: decoupled, of matrices only.
    """
    fused = all(_fusable(parameter) for parameter in module.parameters() if parameter.requires_grad)
    adamw: dict[str, Any] = {"betas": betas, "fused": True} if fused else {"betas": betas, "foreach": True}
    groups = _groups(module, muon=kind == "muon")
    for group in groups:
        group["rate_scale"] = muon_learning_rate / learning_rate if group["part"] == "muon" else 1.0
        group["lr"] = learning_rate * group["rate_scale"]
        group["weight_decay"] = weight_decay if group.pop("decays") else 0.0
    if kind == "muon":
        return MuonAdamW(groups, adamw=adamw)
    return torch.optim.AdamW(groups, lr=learning_rate, **adamw)


def _groups(module: nn.Module, *, muon: bool) -> list[dict[str, Any]]:
    """Neighbouring parameters that are treated alike make a group, so that groups keep the module's order."""

    def treatment(named: tuple[str, Tensor]) -> tuple[str, bool]:
        name, parameter = named
        matrix = parameter.dim() >= 2
        return "muon" if muon and matrix and _is_hidden(name, parameter) else "adamw", matrix

    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for _, parameter in members], "part": part, "decays": decays}
        for (part, decays), members in groupby(trainable, key=treatment)
    ]


def _is_hidden(name: str, parameter: Tensor) -> bool:
    """Whether a matrix maps hidden vectors to hidden vectors. One with a single row or column is a vector."""
    return min(parameter.shape) > 1 and VOCABULARY_MODULES.isdisjoint(name.split("."))


def _fusable(parameter: Tensor) -> bool:
    return parameter.device.type in FUSED_DEVICES and parameter.is_floating_point()


def learning_rate_at(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    schedule: Schedule,
    decay_share: float = 0.2,
    final_share: float = 0.05,
) -> float:
    """Rate of optimiser step `step` (0-based): up linearly to `peak`, then along the schedule to `final_share` of it.

    cosine and linear fall from the end of warm-up on. constant never falls. wsd stays at `peak` and falls over the last
    `decay_share` of all steps, linearly (Hägele et al. 2024, arXiv 2405.18392).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    start = warmup_steps
    if schedule == "wsd":
        start = max(start, total_steps - max(1, round(decay_share * total_steps)))
    progress = min(1.0, max(0, step - start) / max(1, total_steps - start))
    if schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        left = 1.0 - progress
    return peak * (final_share + (1.0 - final_share) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group `rate` times its "rate_scale"."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_scale", 1.0)
