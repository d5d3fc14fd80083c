"""What a device can do, to say how much of it a training step uses.

Two measures that must not be mixed: the rate its maker names, which `mfu` is a share of, and the rate of a plain matrix
product measured on it, which `gemm_share` is a share of. The second is lower, so the share of it is higher.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MEASURED_SECONDS = 0.1
LONG_ENOUGH = 0.02
"""Seconds of a product that is large enough: its start no longer counts."""
SMALLEST, LARGEST = 256, 8192


@dataclass(frozen=True)
class Peak:
    """Floating-point operations a second of one device, and the metric that is a share of them."""

    flops: float
    metric: Literal["mfu", "gemm_share"]


def peak_flops(device: torch.device, *, dtype: torch.dtype, nominal: float | None = None) -> Peak:
    """The named rate of the device where there is one, else a measured one (takes about half a second)."""
    if nominal is not None:
        return Peak(nominal, metric="mfu")
    return Peak(measured_gemm_flops(device, dtype), metric="gemm_share")


def measured_gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second (a multiply-add is two) of the best of several square matrix products of this process.

    The matrices grow until one product takes 20 ms. Processes that share the processors of a node measure together
    what training will share in the same way, when they call this at the same time.
    """
    size = SMALLEST
    while size < LARGEST and _seconds(size, device=device, dtype=dtype, budget=0.0) < LONG_ENOUGH:
        size *= 2
    return 2.0 * size**3 / _seconds(size, device=device, dtype=dtype, budget=MEASURED_SECONDS)


def _seconds(size: int, *, device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Seconds of the fastest product of two [size, size] matrices in `budget` seconds; at least one product."""
    left = _matrix(size, device=device, dtype=dtype)
    out = torch.empty_like(left)
    torch.mm(left, left, out=out)  # the first product of a shape also prepares its kernel
    _synchronize(device)
    end, best = time.perf_counter() + budget, float("inf")
    while True:
        start = time.perf_counter()
        torch.mm(left, left, out=out)
        _synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def _matrix(size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers, since the clock of a GPU depends on what it multiplies: one tile repeated, as drawing is slow."""
    generator = torch.Generator().manual_seed(0)  # training may draw from the global one
    tile = torch.randn(SMALLEST, SMALLEST, generator=generator).to(device, dtype)
    return tile.repeat(size // SMALLEST, size // SMALLEST)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
