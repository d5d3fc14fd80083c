"""Muon and AdamW as one optimiser, so that wrappers, checkpoints and schedules see a single object.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest matrix whose singular values are all near 1, found
with five Newton-Schulz steps in bfloat16. The update is scaled by 0.2 sqrt(max(rows, columns)), which gives its entries
the root-mean-square size that AdamW's have (Liu et al. 2025, arXiv 2502.16982, eq. 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Group = dict[str, Any]

MOMENTUM = 0.95


class MuonAdamW(torch.optim.Optimizer):
    """Parameter groups whose "part" is "muon" are updated by torch's Muon, those with "adamw" by its AdamW.

    State and groups are those of this object; the two optimisers inside only bring their arithmetic. Every process
    orthogonalises every matrix it holds, so parameters must be whole (plain or DDP).
    """

    def __init__(self, groups: list[Group], *, adamw: dict[str, Any]) -> None:
        """Take over `groups`: each holds "params", "part", "lr" and "weight_decay". `adamw`: options of AdamW."""
        assert all(group["part"] in ("muon", "adamw") for group in groups)
        parts: dict[str, torch.optim.Optimizer] = {}
        # Each constructor writes its defaults into the groups that it is given, which then are this object's too.
        if of_muon := [group for group in groups if group["part"] == "muon"]:
            parts["muon"] = torch.optim.Muon(of_muon, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        if of_adamw := [group for group in groups if group["part"] == "adamw"]:
            parts["adamw"] = torch.optim.AdamW(of_adamw, **adamw)
        super().__init__(groups, defaults={})
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self._parts.items():
            # Loading a state and accelerate replace these, so they are handed over anew.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["part"] == name]
            part.step()
        return loss
