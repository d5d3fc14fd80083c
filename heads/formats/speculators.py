"""The speculators library's layout of an EAGLE-3 head directory.

Read in speculators 0.9 and in vLLM 0.32 (transformers_utils/configs/speculators). Two defaults matter: vLLM takes
`norm_before_residual` as true when the key is missing, the library as false; and vLLM builds the layer from
`transformer_layer_config` alone, without the defaults of transformers' config class. So everything is written out.
`num_aux_hidden_states` goes into `transformer_layer_config`, because vLLM's Llama class looks for it and the library passes
it through.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.heads.config import HeadConfig, LayerStyle
from eyas.heads.formats.files import HeadFiles
from eyas.heads.formats.layer_json import (
    SIZES,
    dtype_name,
    layer_fields,
    layer_ids,
    layer_json,
    parse_layer,
    variant_json,
    whole_numbers,
)

MODEL_TYPE = "eagle3"
DEFAULT_DRAFT_TOKENS = 3
QWEN3_DEFAULT_THETA = 1_000_000.0
STYLES: dict[str, LayerStyle] = {"llama": "llama", "qwen3": "qwen3"}
VERSION = "0.9.0"
"""Version of the library whose classes read what is written here."""


def head_config(values: dict[str, Any], *, tensor_names: set[str], path: Path) -> HeadConfig:
    """The head that vLLM builds from a speculators config.

    Raises:
        ValueError: no `transformer_layer_config`, or values that no head can have.
    """
    whole_numbers(values, names=("draft_vocab_size", "target_hidden_size"), path=path)
    layer_values = engine_layer(layer_config(values, path=path), path=path)
    fields = layer_fields(parse_layer(layer_values, path=path), style=STYLES[layer_values["model_type"]])
    return HeadConfig(
        kind="eagle3",
        **fields,
        target_hidden_size=values.get("target_hidden_size") or fields["hidden_size"],
        draft_vocab_size=values.get("draft_vocab_size") or fields["vocab_size"],
        capture_layers=layer_ids(values.get("eagle_aux_hidden_state_layer_ids"), path=path),
        norm_before_residual=bool(values.get("norm_before_residual", True)),
        norm_before_fc=bool(values.get("norm_before_fc", False)),
        fc_norm=bool(values.get("fc_norm", False)),
        norm_output=bool(values.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in tensor_names,
    )


def layer_config(values: dict[str, Any], *, path: Path) -> dict[str, Any]:
    """`transformer_layer_config`; the engine takes a missing `model_type` as Llama."""
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{path}: transformer_layer_config is missing or not an object; it describes the draft layer")
    return {"model_type": "llama", **layer}


def engine_layer(layer: dict[str, Any], *, path: Path) -> dict[str, Any]:
    """The layer config with what vLLM falls back on, where that differs from transformers' Qwen3 config class."""
    layer = dict(layer)
    whole_numbers(layer, names=SIZES, path=path)
    if layer["model_type"] != "qwen3":
        return layer
    if not (layer.get("rope_parameters") or layer.get("rope_scaling") or layer.get("rope_theta")):
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": QWEN3_DEFAULT_THETA}
    if not layer.get("head_dim") and layer.get("hidden_size") and layer.get("num_attention_heads"):
        layer["head_dim"] = layer["hidden_size"] // layer["num_attention_heads"]
    # The engine does not ask for use_sliding_window here; the config class would drop the window without it.
    layer["use_sliding_window"] = bool(layer.get("layer_types"))
    return layer


def serving_fields(values: dict[str, Any]) -> tuple[str | None, tuple[str, ...], int | None]:
    """Verifier, its architectures, and the number of draft tokens; None where the config does not say."""
    section = values.get("speculators_config")
    section = section if isinstance(section, dict) else {}
    verifier = section.get("verifier")
    verifier = verifier if isinstance(verifier, dict) else {}
    methods = section.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    name, tokens = verifier.get("name_or_path"), first.get("speculative_tokens")
    return name, tuple(verifier.get("architectures") or ()), tokens if isinstance(tokens, int) else None


def config_json(files: HeadFiles, *, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a head.

    Raises:
        ValueError: the head is of a kind or variant that the library has no place for.
    """
    config = files.config
    _refuse_what_does_not_fit(config)
    layer = {**layer_json(config), "num_aux_hidden_states": config.num_captured}
    values: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": files.draft_tokens or DEFAULT_DRAFT_TOKENS}
            ],
            "verifier": {"name_or_path": files.verifier, "architectures": list(files.verifier_architectures)},
        },
        "dtype": dtype_name(dtype),
        **variant_json(config),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
    if config.capture_layers is not None:
        values["eagle_aux_hidden_state_layer_ids"] = list(config.capture_layers)
    return values


def _refuse_what_does_not_fit(config: HeadConfig) -> None:
    if config.kind != "eagle3":
        raise ValueError("vLLM reads only EAGLE-3 heads from the speculators format; write an EAGLE head --to vllm")
    if config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"the head's hidden size {config.hidden_size} differs from the target's {config.target_hidden_size}, and the "
            "speculators library makes fc from the head's alone; write --to vllm"
        )
    if config.norm_before_fc and config.fc_norm:
        raise ValueError(
            "the speculators library refuses norm_before_fc together with fc_norm; write --to vllm, which knows both"
        )
