"""The text of `eyas doctor`: the machine, the installed packages, and what is missing for a run, each with its mend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from eyas.heads.serving import require_vllm
from eyas.recipes.run import available_cores

REQUIRED = ("torch", "transformers", "accelerate")
OPTIONAL = {
    "wandb": "tracking.trackers=[wandb]",
    "tensorboard": "tracking.trackers=[tensorboard]",
    "deepspeed": "ZeRO on several GPUs",
}

Check = tuple[str, str | None]
"""A line to print, and what is missing with its mend, if something is."""


def checks() -> list[Check]:
    """Everything `eyas doctor` prints, in order."""
    return [*_machine(), *(_package(name) for name in REQUIRED), _vllm(), *_optional(), _gpu()]


def _machine() -> list[Check]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    mend = None if supported else "python: 3.11 to 3.13 is needed; make a new environment with one of them"
    return [
        (f"python        {platform.python_version()} ({sys.executable})", mend),
        (f"cores         {available_cores()}", None),
        (f"memory        {memory / 2**30:.1f} GiB", None),
        (f"free disk     {shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB in {Path.cwd()}", None),
    ]


def _package(name: str) -> Check:
    version = _version(name)
    mend = None if version else f"{name} is not installed; run `pip install eyas`, or `make venv` in a checkout"
    return f"{name:<13} {version or 'missing'}", mend


def _vllm() -> Check:
    try:
        return f"{'vllm':<13} {require_vllm()}", None
    except ValueError as error:
        return f"{'vllm':<13} missing", str(error)


def _optional() -> list[Check]:
    return [
        (f"{name:<13} {_version(name) or f'not installed (only for {use}): pip install eyas[{name}]'}", None)
        for name, use in OPTIONAL.items()
    ]


def _gpu() -> Check:
    """GPUs by torch, imported here because only this line needs it."""
    try:
        import torch
    except ImportError as error:
        return f"{'gpu':<13} unknown, torch does not import ({error})", None
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{'gpu':<13} {', '.join(names) or 'none seen by torch; everything runs on the CPU'}", None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
