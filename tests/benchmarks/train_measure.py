"""Measuring one arm of the training benchmark: time and memory of its steps, and the machine's matrix products beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

GEMM_SHAPES = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 2048, 2048), (2048, 8192, 2048))
GEMM_SHAPES_CUDA = ((8192, 8192, 8192), (16384, 8192, 8192), (8192, 4096, 14336))


@dataclass(frozen=True)
class Steps:
    """Times of the counted steps, and memory in bytes: before the first step, and the most that was held until the last.

    On CPU memory is the process's resident set, on CUDA what the allocator handed out.
    """

    seconds: list[float]
    loss: float
    bytes_before: int
    bytes_peak: int

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Gemm:
    """The fastest of several large matrix products."""

    flops_per_second: float
    shape: tuple[int, int, int]


def measure_steps(step: Callable[[], float], *, device: torch.device, warmup: int, repeats: int) -> Steps:
    """Run `step`, which returns its loss, `warmup + repeats` times; the warm-up counts for memory and not for time."""
    _synchronize(device)
    _forget_peak(device)
    before = _bytes_now(device)
    seconds, loss = [], float("nan")
    for index in range(warmup + repeats):
        begin = time.perf_counter()
        loss = step()
        _synchronize(device)
        if index >= warmup:
            seconds.append(time.perf_counter() - begin)
    return Steps(seconds=seconds, loss=loss, bytes_before=before, bytes_peak=_bytes_peak(device))


def measure_gemm(dtype: torch.dtype, *, device: torch.device, seconds_each: float) -> Gemm:
    """Best rate of a product of matrices, each shape as often as `seconds_each` holds and at least three times.

    0 seconds is for trying the script: small products, which say little.
    """
    best = Gemm(flops_per_second=0.0, shape=(0, 0, 0))
    shapes = GEMM_SHAPES_CUDA if device.type == "cuda" else GEMM_SHAPES
    for rows, inner, columns in shapes if seconds_each > 0 else ((256, 256, 256),):
        a, b = torch.randn(rows, inner, device=device).to(dtype), torch.randn(columns, inner, device=device).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype, device=device)
        torch.mm(a, b.T, out=out)
        _synchronize(device)
        begun, times = time.perf_counter(), []
        while len(times) < 3 or time.perf_counter() - begun < seconds_each:
            begin = time.perf_counter()
            torch.mm(a, b.T, out=out)
            _synchronize(device)
            times.append(time.perf_counter() - begin)
        rate = 2.0 * rows * inner * columns / min(times)
        best = max(best, Gemm(rate, (rows, inner, columns)), key=lambda gemm: gemm.flops_per_second)
    return best


@contextmanager
def autocast(device: torch.device, *, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to `dtype`; None is none."""
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # some containers do not allow it; the peak then includes what was needed to get ready
        Path("/proc/self/clear_refs").write_text("5")


def _bytes_now(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS:")


def _bytes_peak(device: torch.device) -> int:
    # Not getrusage, whose figure a child takes over from the process that started it.
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM:")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(name)[2].split()[0]) * 1024
