"""The configuration that an engine resolved, as plain values.

It is walked as vLLM defines it (every field of every part, however deep) and not by a list of names, so that a
difference between two engines shows even in a field nobody thought of.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

LEFT_OUT = frozenset(
    {
        "hf_token",
        "instance_id",
        "data_parallel_rpc_port",
        "data_parallel_master_port",
        "_data_parallel_master_port_list",
        "_coord_store_port",
        "static_forward_context",
        "static_all_moe_layers",
    }
)
"""Fields that are no settings: secrets, what differs between any two processes, and the model's own layers."""


def resolved_engine(llm: Any) -> dict[str, Any]:
    """Every part of the engine's configuration, and the attention backends its layers chose."""
    config = llm.llm_engine.vllm_config
    engine = plain(config)
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if "get_attn_backend" in dir(layer)}
    engine["attention_backends"] = sorted(backends)
    # Its second model runner has a sampler of its own; vLLM chooses by what the arm needs, and versions without it use the first.
    engine["model_runner_v2"] = "use_v2_model_runner" in dir(config) and bool(config.use_v2_model_runner)
    return engine


def plain(value: Any) -> Any:
    """`value` in JSON: dataclasses by their fields, enumerations by name, other objects and functions by what they are called.

    An object's own values are not looked into: a quantisation or a Hugging Face configuration comes from the target's
    files, whose fingerprint is known.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if type(value).__module__ == "torch":
        return str(value)
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    named = value if isinstance(value, type) or "__qualname__" in dir(value) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _fields(part: Any) -> dict[str, Any]:
    values = vars(part)
    names = sorted(field.name for field in dataclasses.fields(part) if field.name in values)
    return {name: plain(values[name]) for name in names if name not in LEFT_OUT}
