"""The layout of the original EAGLE repository (SafeAILab/EAGLE): the weights that EAGLE and EAGLE-3 were published with.

Read in its cnets.py (EAGLE-3) and cnets1.py (EAGLE). It names no captured layers (always 2, L//2 and L-3) and no variants;
`fc` of an EAGLE head has a bias unless the config says `"bias": false`; an EAGLE-3 head has `draft_vocab_size`.
vLLM reads such a directory: it turns `LlamaForCausalLM` into the name of its head for the method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.heads.config import HeadConfig
from eyas.heads.formats.layer_json import dtype_name, layer_json
from eyas.heads.formats.vllm import eagle3_config, eagle_config

ARCHITECTURE = "LlamaForCausalLM"
REPO_ROPE_BASE = 10_000.0
"""Base of the repository's scaled rotary embeddings; it reads `rope_theta` only without scaling."""


def is_eagle3(values: dict[str, Any], *, tensor_names: set[str]) -> bool:
    """Whether the directory is an EAGLE-3 head; the repository tells by the code that loads it."""
    return "draft_vocab_size" in values or any(name.startswith("midlayer.") for name in tensor_names)


def head_config(values: dict[str, Any], *, tensor_names: set[str], path: Path) -> HeadConfig:
    """The head of a repository directory.

    Raises:
        ValueError: values that no head can have.
    """
    if is_eagle3(values, tensor_names=tensor_names):
        flags = {name: bool(values.get(name, False)) for name in ("norm_before_residual", "fc_norm", "norm_output")}
        return eagle3_config(values, style="llama", flags=flags, tensor_names=tensor_names, path=path)
    return eagle_config(values, tensor_names=tensor_names, path=path)


def config_json(config: HeadConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a head.

    Raises:
        ValueError: a variant, or captured layers, that the repository's code does not have.
    """
    _refuse_what_does_not_fit(config)
    values = layer_json(config)
    rope = values.pop("rope_parameters")
    for key in ("attention_bias", "mlp_bias"):
        values.pop(key)
    values |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if rope.get("rope_type", "default") != "default":
        values["rope_scaling"] = {"type": rope["rope_type"], "factor": rope["factor"]}
    # The repository's own configs spell the dtype in the old way.
    values = {"architectures": [ARCHITECTURE], "torch_dtype": dtype_name(dtype), **values}
    if config.kind == "eagle":
        return values if config.fc_bias else {**values, "bias": False}
    values["draft_vocab_size"] = config.draft_vocab_size
    if config.target_hidden_size != config.hidden_size:
        # Its loader takes the mere presence of the key as a sign that the head has an embedding of its own.
        values["target_hidden_size"] = config.target_hidden_size
    return values


def _refuse_what_does_not_fit(config: HeadConfig) -> None:
    switches = ("attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    variants = [name for name in switches if getattr(config, name)]
    if config.layer != "llama":
        variants.append(f"layer={config.layer}")
    if config.sliding_window is not None:
        variants.append("sliding_window")
    if config.kind == "eagle3" and config.num_layers != 1:
        variants.append(f"num_layers={config.num_layers}")
    if config.kind == "eagle" and config.head_dim * config.num_attention_heads != config.hidden_size:
        variants.append(f"head_dim={config.head_dim}")
    if variants:
        raise ValueError(
            f"the EAGLE repository's code has no {', '.join(variants)}, so the head would be another one there; "
            "write --to vllm"
        )
    _refuse_rope(config.rope_parameters)
    if config.kind == "eagle3" and not _are_default_layers(config.capture_layers):
        raise ValueError(
            f"the head reads layers {list(config.capture_layers or ())}, and the EAGLE repository's code always reads 2, L//2 "
            "and L-3 of a target of L layers; write --to vllm"
        )


def _refuse_rope(rope: dict[str, Any]) -> None:
    kind = rope.get("rope_type", "default")
    scaled = kind in ("linear", "dynamic") and float(rope["rope_theta"]) == REPO_ROPE_BASE
    known = {"rope_type", "rope_theta", "factor"} if scaled else {"rope_type", "rope_theta"}
    if (kind != "default" and not scaled) or set(rope) - known:
        raise ValueError(
            f"the EAGLE repository's code cannot rotate with {rope}: it knows a base, or linear and dynamic scaling of base "
            f"{REPO_ROPE_BASE:g}; write --to vllm"
        )


def _are_default_layers(layers: tuple[int, ...] | None) -> bool:
    """Whether the layers are 2, L//2 and L-3 for some L; None is that default already."""
    if layers is None:
        return True
    return len(layers) == 3 and layers[0] == 2 and layers[1] == (layers[2] + 3) // 2
