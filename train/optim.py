"""Optimiser and learning-rate schedule: AdamW, linear warm-up, then cosine, linear or constant.

The rate is a pure function of the step, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

Schedule = Literal["cosine", "linear", "constant"]


def adamw(
    module: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay applies to matrices, not to norms."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def learning_rate_at(
    step: int, *, peak: float, total_steps: int, warmup_steps: int, schedule: Schedule, final_share: float = 0.05
) -> float:
    """Rate of optimiser step `step` (0-based): up linearly to `peak`, then down to `final_share` of it."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    falling = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (final_share + (1.0 - final_share) * falling)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
