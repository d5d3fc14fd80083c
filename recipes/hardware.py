"""Hardware that `eyas plan` knows by name, and this machine as a short measurement finds it.

Peaks are the vendors' figures for dense bfloat16 matrix products. What share of them a run reaches is an assumption,
written beside every estimate that rests on it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

GIB = 2**30
HERE = "here"
GEMM_SIZE = 2048
GEMM_SECONDS = 1.0


def gib(num_bytes: float) -> str:
    """Bytes as plans print them."""
    return f"{num_bytes / GIB:,.2f} GiB"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device: dense matrix products per second, memory in bytes, and bytes per second from it.

    Attributes:
        cpu: a CPU and its memory, of which vLLM takes what the recipe tells it and no share.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    measured: bool = False
    cpu: bool = False


def _gpu(name: str, *, tflops: float, gigabytes: float, terabytes_per_second: float) -> Hardware:
    return Hardware(name=name, flops=tflops * 1e12, memory=gigabytes * 1e9, bandwidth=terabytes_per_second * 1e12)


NAMED = {
    device.name: device
    for device in (
        _gpu("a100-40gb", tflops=312, gigabytes=40, terabytes_per_second=1.555),
        _gpu("a100-80gb", tflops=312, gigabytes=80, terabytes_per_second=2.039),
        _gpu("l40s", tflops=362, gigabytes=48, terabytes_per_second=0.864),
        _gpu("rtx4090", tflops=165, gigabytes=24, terabytes_per_second=1.008),
        _gpu("h100", tflops=989, gigabytes=80, terabytes_per_second=3.35),
        _gpu("h200", tflops=989, gigabytes=141, terabytes_per_second=4.8),
        _gpu("b200", tflops=2250, gigabytes=180, terabytes_per_second=8.0),
        _gpu("mi300x", tflops=1307, gigabytes=192, terabytes_per_second=5.3),
    )
}


DEVICE_WORDS = {
    "a100-40gb": ("A100", "40GB"),
    "a100-80gb": ("A100", "80GB"),
    "l40s": ("L40S",),
    "rtx4090": ("RTX 4090",),
    "h200": ("H200",),
    "h100": ("H100",),
    "b200": ("B200",),
    "mi300x": ("MI300X",),
}
"""Words of the names that drivers give these devices."""


def nominal_flops(device_name: str) -> float | None:
    """The vendor's peak of a device by the name that its driver gives it; None when it is not known.

    A form with a lower clock that has the same name (H100 PCIe) is given the higher peak, so its share comes out lower.
    """
    for name, words in DEVICE_WORDS.items():
        if all(word in device_name for word in words):
            return NAMED[name].flops
    return None


def find_hardware(name: str, *, dtype: str) -> Hardware:
    """Hardware by name; `here` is measured for about a second in `dtype`.

    Raises:
        ValueError: no such name.
    """
    if name == HERE:
        return measure_here(dtype=dtype)
    if name not in NAMED:
        raise ValueError(f"--hardware {name}: not known; choose one of {', '.join([HERE, *NAMED])}")
    return NAMED[name]


def measure_here(*, dtype: str) -> Hardware:
    """Rate of square matrix products on this machine's first device, and its memory; the bandwidth by copying."""
    import torch

    from eyas.heads.target import DTYPES

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    matrix = torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.float32, device=device).to(DTYPES[dtype])
    out = torch.empty_like(matrix)
    products = _per_second(lambda: torch.mm(matrix, matrix, out=out), cuda=cuda)
    copies = _per_second(lambda: out.copy_(matrix), cuda=cuda)
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else _physical_memory()
    return Hardware(
        name=torch.cuda.get_device_name(0) if cuda else f"this CPU, {torch.get_num_threads()} threads",
        flops=2 * GEMM_SIZE**3 * products,
        memory=memory,
        bandwidth=2 * matrix.numel() * matrix.element_size() * copies,
        measured=True,
        cpu=not cuda,
    )


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _per_second(work: object, *, cuda: bool) -> float:
    """How often `work` runs in a second, after one call that warms up."""
    import torch

    assert callable(work)
    work()
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < GEMM_SECONDS / 2 or calls < 2:
        work()
        if cuda:
            torch.cuda.synchronize()
        calls += 1
    return calls / elapsed
