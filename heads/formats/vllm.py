"""vLLM's own layout of a head directory, which SGLang reads too for EAGLE-3.

Read in vLLM 0.32 (llama_eagle3.py, qwen3_eagle3.py, llama_eagle.py, gpu_model_runner.py) and checked by running it:
- Captured layer id k is the residual stream after k layers of the target. SGLang's ids, in `eagle_config`, name the layer
  whose output is read, so they are one less; vLLM looks at the top-level ids first and never at those.
- The Llama class takes the number of captured layers from `num_aux_hidden_states`, not from the ids.
- The norm flags default to false, and `norm_before_fc` is looked up in `eagle_config` first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.heads.config import DEFAULT_CAPTURED, HeadConfig, LayerStyle
from eyas.heads.formats.layer_json import (
    dtype_name,
    layer_fields,
    layer_ids,
    layer_json,
    parse_layer,
    variant_json,
    whole_numbers,
)

EAGLE_ARCHITECTURES = ("EagleLlamaForCausalLM",)
EAGLE3_ARCHITECTURES: dict[str, LayerStyle] = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
"""Names that vLLM's registry maps to its two EAGLE-3 classes, with the layers that the class has."""

WRITTEN: dict[LayerStyle, str] = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
OWN_SIZES = ("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "num_aux_layers")
FLAGS = ("norm_before_residual", "fc_norm", "norm_output")


def head_config(values: dict[str, Any], *, tensor_names: set[str], path: Path) -> HeadConfig:
    """The head that vLLM builds from `values`; the weights say whether it has an embedding of its own.

    Raises:
        ValueError: not an architecture of this layout, or values that no head can have.
    """
    architecture = (values.get("architectures") or [None])[0]
    if architecture in EAGLE_ARCHITECTURES:
        return eagle_config(values, tensor_names=tensor_names, path=path)
    if architecture not in EAGLE3_ARCHITECTURES:
        raise ValueError(f"{path}: architecture {architecture!r} is not one of vLLM's EAGLE or EAGLE-3 heads")
    return eagle3_config(
        values,
        style=EAGLE3_ARCHITECTURES[architecture],
        flags={name: bool(values.get(name, False)) for name in FLAGS},
        tensor_names=tensor_names,
        path=path,
    )


def eagle_config(values: dict[str, Any], *, tensor_names: set[str], path: Path) -> HeadConfig:
    """An EAGLE head; shared with the original repository's layout, whose `fc` may have a bias."""
    fields = layer_fields(parse_layer(values, path=path), style="llama")
    return HeadConfig(
        kind="eagle",
        **fields,
        target_hidden_size=fields["hidden_size"],
        draft_vocab_size=fields["vocab_size"],
        capture_layers=(),
        fc_bias="fc.bias" in tensor_names,
        own_embedding="embed_tokens.weight" in tensor_names,
    )


def eagle3_config(
    values: dict[str, Any], *, style: LayerStyle, flags: dict[str, Any], tensor_names: set[str], path: Path
) -> HeadConfig:
    """An EAGLE-3 head; shared with the original repository's layout, which has no flags and no layer ids."""
    whole_numbers(values, names=OWN_SIZES, path=path)
    fields = layer_fields(parse_layer(values, path=path), style=style)
    return HeadConfig(
        kind="eagle3",
        **fields,
        **flags,
        target_hidden_size=values.get("target_hidden_size") or fields["hidden_size"],
        draft_vocab_size=values.get("draft_vocab_size") or fields["vocab_size"],
        capture_layers=layer_ids(capture_ids(values), path=path),
        norm_before_fc=bool(nested_config(values).get("norm_before_fc", values.get("norm_before_fc", False))),
        own_embedding="embed_tokens.weight" in tensor_names,
    )


def nested_config(values: dict[str, Any]) -> dict[str, Any]:
    """`eagle_config`, empty when there is none."""
    nested = values.get("eagle_config") or {}
    return nested if isinstance(nested, dict) else {}


def capture_ids(values: dict[str, Any]) -> Any:
    """Captured layer ids in the order that the engine looks for them; None when none are named."""
    name = "eagle_aux_hidden_state_layer_ids"
    return values.get(name) or nested_config(values).get(name) or None


def engine_captured(values: dict[str, Any], *, style: LayerStyle) -> int:
    """How many captured layers the engine makes `fc` for, which is not always how many are named."""
    names = ("num_aux_layers", "num_aux_hidden_states") if style == "qwen3" else ("num_aux_hidden_states",)
    for name in names:
        if values.get(name) is not None:
            return values[name]
    ids = capture_ids(values) if style == "qwen3" else nested_config(values).get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if ids else DEFAULT_CAPTURED


def config_json(config: HeadConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a head, with every variant written out.

    Raises:
        ValueError: `fc` has a bias, which vLLM's EAGLE does not have.
    """
    if config.kind == "eagle":
        if config.fc_bias:
            raise ValueError(
                "fc has a bias, and vLLM's EAGLE head has none: it would be dropped and the head draft other tokens; "
                "write --to eagle-repo, or train with head.fc_bias=false"
            )
        return {"architectures": list(EAGLE_ARCHITECTURES), "dtype": dtype_name(dtype), **layer_json(config)}
    values: dict[str, Any] = {
        "architectures": [WRITTEN[config.layer]],
        "dtype": dtype_name(dtype),
        **layer_json(config),
        **variant_json(config),
        "num_aux_hidden_states": config.num_captured,
    }
    if config.capture_layers is not None:
        values["eagle_aux_hidden_state_layer_ids"] = list(config.capture_layers)
        values["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.capture_layers],
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        }
    return values


def stored_name(name: str, *, config: HeadConfig) -> str:
    """Name in the files of the module's tensor `name`: EAGLE-3's first layer is called `midlayer` there."""
    if config.kind == "eagle3" and name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return name


def canonical_name(name: str) -> str:
    """The module's name of a stored tensor; the engine replaces `midlayer.` in the same way."""
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
