"""The part of a config.json that describes the decoder layer, which all formats share, read as the engine reads it.

The engine builds transformers' config class of the `model_type` from the JSON. So does this module: defaults, old
spellings (`rope_theta`, `rope_scaling`) and refusals are the engine's own.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from eyas.heads.config import HeadConfig, LayerStyle

CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def parse_layer(values: dict[str, Any], *, path: Path) -> PreTrainedConfig:
    """The engine's view of the layer configuration `values`.

    Raises:
        ValueError: unknown `model_type`, or a value of the wrong type.
    """
    model_type = values.get("model_type")
    if model_type not in CONFIG_CLASSES:
        raise ValueError(
            f"{path}: model_type is {model_type!r}; eyas knows draft layers of {' and '.join(CONFIG_CLASSES)}"
        )
    whole_numbers(values, names=SIZES, path=path)
    try:
        config = CONFIG_CLASSES[model_type].from_dict(copy.deepcopy(values))
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: transformers, which the engine reads it with, refuses it: {error}") from error
    return config


def whole_numbers(values: dict[str, Any], *, names: tuple[str, ...], path: Path) -> None:
    """Raises ValueError unless each of the values that are there is a positive integer."""
    for name in names:
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{path}: {name} is {value!r}, and must be a whole number of at least 1")


def layer_ids(ids: Any, *, path: Path) -> tuple[int, ...] | None:
    """Captured layer ids of a config; None when there are none.

    Raises:
        ValueError: not a list of whole numbers of at least 1.
    """
    if not ids:
        return None
    if not isinstance(ids, list) or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in ids):
        raise ValueError(
            f"{path}: eagle_aux_hidden_state_layer_ids is {ids!r}, and must be a list of whole numbers of at least 1 "
            "(id k is the residual stream after k layers)"
        )
    return tuple(ids)


def layer_fields(layer: Any, *, style: LayerStyle) -> dict[str, Any]:
    """Fields of `HeadConfig` that the layer configuration decides."""
    heads = layer.num_attention_heads
    return {
        "layer": style,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_layers": layer.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": layer.num_key_value_heads or heads,
        "head_dim": layer.head_dim or layer.hidden_size // heads,
        "vocab_size": layer.vocab_size,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": rope_of(layer),
        "max_position_embeddings": layer.max_position_embeddings,
        "attention_bias": bool(layer.attention_bias),
        "sliding_window": window_of(layer),
    }


def rope_of(layer: Any) -> dict[str, Any]:
    """Rotary settings in the modern spelling alone; `type` is what `rope_type` was called before."""
    return {name: value for name, value in layer.rope_parameters.items() if name != "type"}


def window_of(layer: Any) -> int | None:
    """The sliding window of the layers; the engine asks `layer_types` first, and a window alone does nothing."""
    kinds = set(getattr(layer, "layer_types", None) or ())
    return getattr(layer, "sliding_window", None) if "sliding_attention" in kinds else None


def layer_json(config: HeadConfig) -> dict[str, Any]:
    """The layer part of a config.json, with every value written out."""
    values: dict[str, Any] = {
        "model_type": config.layer,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
    }
    if config.sliding_window is not None:
        values["sliding_window"] = config.sliding_window
        values["layer_types"] = ["sliding_attention"] * config.num_layers
        # Qwen3's config class drops the window without these two.
        values["use_sliding_window"], values["max_window_layers"] = True, 0
    return values


def variant_json(config: HeadConfig) -> dict[str, Any]:
    """What an EAGLE-3 head says about itself beside its layers, in the layouts that have a place for it."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as config files spell it."""
    return str(dtype).removeprefix("torch.")
