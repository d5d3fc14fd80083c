"""What a machine must have before the check begins: told in a line, since none of it says that the device is wrong."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

TARGET_BYTES = 20e9
"""Of the GPU: weights of a random target of Llama-3.1-8B's size, 16 GB, and what a batch needs beside them."""
TEMPORARY_BYTES = 15e9


def why_not(device: torch.device, *, work: Path, full: bool) -> str | None:
    """What is missing here; None when nothing is.

    Args:
        full: at the shapes of Llama-3.1-8B.
    """
    if device.type == "cuda":
        reason = _no_compiler() or (_no_room(torch.cuda.mem_get_info(device)[0]) if full else None)
        if reason is not None:
            return reason
    free = shutil.disk_usage(work).free
    if full and free < TEMPORARY_BYTES:
        return (
            f"{work.parent} has {free / 1e9:.1f} GB free, and {TEMPORARY_BYTES / 1e9:.0f} GB are needed; set TMPDIR=..."
        )
    return None


def _no_compiler() -> str | None:
    """Attention on CUDA is compiled: Triton builds a small C module against Python."""
    if importlib.util.find_spec("triton") is None:
        return "this Python has no triton, which torch.compile needs on a GPU; install it"
    compiler = os.environ.get("CC") or next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)
    if compiler is None:
        return "there is no C compiler, which Triton needs; install gcc, or name one: CC=..."
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python.h is not installed, which Triton needs; install Python's development files (python3-dev)"
    return None


def _no_room(free: int) -> str | None:
    if free >= TARGET_BYTES:
        return None
    return (
        f"the GPU has {free / 1e9:.1f} GB free, and {TARGET_BYTES / 1e9:.0f} GB are needed; end what else runs on it, take a "
        "larger one, or try --dry"
    )
