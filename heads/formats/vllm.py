"""The head directory that vLLM loads: config.json and model.safetensors in the raw EAGLE-3 layout.

The contract (read in vLLM 0.32 and checked by running it; a violated point often loads and drafts badly):
- `architectures: ["LlamaForCausalLMEagle3"]`; `midlayer.*` weights; no embedding (the target's is shared).
- `d2t` holds offsets, target id = draft id + d2t[draft id]; needed when the draft vocabulary is smaller.
- Layer ids: id k is the residual stream after k target layers; the engine sorts them, so they must be ascending.
- The residual of the layer is the raw feature (`norm_before_residual` false, the default of this layout).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from eyas.heads.config import HeadConfig, load_target_config
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import fingerprint_file, read_json, write_bytes, write_json

ARCHITECTURE = "LlamaForCausalLMEagle3"
METHOD = "eagle3"
NOT_TRAINED_HERE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of the layer that change what the weights mean; `Eagle3Head` is none of them."""


def write_head(directory: Path, head: Eagle3Head, *, dtype: torch.dtype) -> None:
    """Write `head` for vLLM. The weights go first and the config last, so a half-written directory does not load."""
    tensors = {name: parameter.detach().to(dtype).cpu().contiguous() for name, parameter in head.named_parameters()}
    target_ids_D = head.draft_to_target_D.cpu()
    tensors["d2t"] = target_ids_D - torch.arange(target_ids_D.shape[0])
    mask_V = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    mask_V[target_ids_D] = True
    tensors["t2d"] = mask_V
    write_bytes(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_json(directory / "config.json", _config_json(head.config, dtype=dtype))


def read_head(directory: Path) -> Eagle3Head:
    """The head in `directory`, in float32.

    Raises:
        ValueError: the directory is not a head of this layout; every problem is named.
    """
    problems = check_head(directory, target_dir=None)
    if problems:
        raise ValueError(f"{directory} is not a usable EAGLE-3 head: " + "; ".join(problems))
    config = _head_config(read_json(directory / "config.json"))
    tensors = load_file(directory / "model.safetensors")
    head = Eagle3Head(config, draft_to_target_D=_target_ids(tensors, size=config.draft_vocab_size)).float()
    head.load_state_dict({name: tensors[name].float() for name, _ in head.named_parameters()}, strict=False)
    return head.eval()


def export_head(out_dir: Path, *, head_dir: Path, target_dir: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Validate a trained head against the contract and its target, then write it for serving in `dtype`.

    Returns:
        Parameter count, bytes and fingerprint of the weights.

    Raises:
        ValueError: the head breaks the contract or does not fit the target.
    """
    problems = check_head(head_dir, target_dir=target_dir)
    if problems:
        raise ValueError(f"{head_dir} would be misread by vLLM: " + "; ".join(problems))
    head = read_head(head_dir)
    write_head(out_dir, head, dtype=dtype)
    weights = out_dir / "model.safetensors"
    return {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "bytes": weights.stat().st_size,
        "weights_fingerprint": fingerprint_file(weights),
    }


def check_head(directory: Path, *, target_dir: Path | None) -> list[str]:
    """Everything about a head directory that vLLM would refuse or misread, one sentence each; empty when it is fine."""
    for name in ("config.json", "model.safetensors"):
        if not (directory / name).is_file():
            return [f"{directory / name} is missing"]
    config = read_json(directory / "config.json")
    problems = _config_problems(config)
    if problems:
        return problems
    try:
        tensors = load_file(directory / "model.safetensors")
        shape = _head_config(config)
    except (SafetensorError, ValueError) as error:
        return [str(error)]
    problems += _tensor_problems(tensors, shape)
    if not problems:
        problems += _vocabulary_problems(tensors, shape)
    if target_dir is not None:
        problems += _target_problems(shape, target_dir)
    return problems


def _config_json(config: HeadConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope_parameters,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.capture_layers),
    }


def _head_config(config: dict[str, Any]) -> HeadConfig:
    return HeadConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=config["rope_parameters"],
        max_position_embeddings=config["max_position_embeddings"],
        capture_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
    )


def _config_problems(config: dict[str, Any]) -> list[str]:
    problems = []
    if config.get("architectures") != [ARCHITECTURE]:
        problems.append(f"config.json: architectures is {config.get('architectures')}, and must be ['{ARCHITECTURE}']")
    required = set(_CONFIG_TYPES) - set(config)
    if required:
        problems.append(f"config.json: {', '.join(sorted(required))} is missing, so the engine would guess")
    for key in set(_CONFIG_TYPES) & set(config):
        if not isinstance(config[key], _CONFIG_TYPES[key]):
            problems.append(f"config.json: {key} is {config[key]!r}, and must be of type {_CONFIG_TYPES[key].__name__}")
    if config.get("num_hidden_layers", 1) != 1:
        problems.append(
            f"config.json: num_hidden_layers is {config['num_hidden_layers']}; only one-layer heads are supported"
        )
    variants = [name for name in NOT_TRAINED_HERE if config.get(name)]
    if variants:
        problems.append(
            f"config.json: {', '.join(variants)} is set, a variant of the layer that this version does not support"
        )
    return problems


_CONFIG_TYPES: dict[str, type] = {
    "hidden_size": int,
    "intermediate_size": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "vocab_size": int,
    "draft_vocab_size": int,
    "rms_norm_eps": float,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "eagle_aux_hidden_state_layer_ids": list,
}


def _tensor_problems(tensors: dict[str, Tensor], config: HeadConfig) -> list[str]:
    with torch.device("meta"):
        expected_head = Eagle3Head(config, draft_to_target_D=torch.empty(config.draft_vocab_size))
    expected = {name: tuple(parameter.shape) for name, parameter in expected_head.named_parameters()}
    problems = [f"weight {name} is missing" for name in expected if name not in tensors]
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            problems.append(f"weight {name} has shape {tuple(tensors[name].shape)}, and config.json implies {shape}")
        elif name in tensors and not bool(torch.isfinite(tensors[name]).all()):
            problems.append(f"weight {name} holds NaN or infinity")
    unknown = sorted(set(tensors) - set(expected) - {"d2t", "t2d"})
    if unknown:
        problems.append(f"weights the engine does not know: {', '.join(unknown)}")
    return problems


def _vocabulary_problems(tensors: dict[str, Tensor], config: HeadConfig) -> list[str]:
    if "d2t" not in tensors:
        if config.draft_vocab_size < config.vocab_size:
            return ["d2t is missing, and the draft vocabulary is smaller than the target's"]
        return []
    if tensors["d2t"].shape != (config.draft_vocab_size,):
        return [f"d2t has shape {tuple(tensors['d2t'].shape)}, and draft_vocab_size is {config.draft_vocab_size}"]
    target_ids_D = _target_ids(tensors, size=config.draft_vocab_size)
    if int(target_ids_D.min()) < 0 or int(target_ids_D.max()) >= config.vocab_size:
        return ["d2t leads outside the target's vocabulary; it must hold offsets (target id minus draft id)"]
    if torch.unique(target_ids_D).numel() != config.draft_vocab_size:
        return ["d2t maps two draft ids to one target id; it must hold offsets (target id minus draft id)"]
    if "t2d" in tensors:
        mask_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask_V[target_ids_D] = True
        if not torch.equal(tensors["t2d"].bool(), mask_V):
            return ["t2d and d2t name different draft vocabularies"]
    return []


def _target_ids(tensors: dict[str, Tensor], *, size: int) -> Tensor:
    identity_D = torch.arange(size)
    return identity_D + tensors["d2t"].long() if "d2t" in tensors else identity_D


def _target_problems(config: HeadConfig, target_dir: Path) -> list[str]:
    target = load_target_config(target_dir)
    problems = []
    if config.hidden_size != target.hidden_size:
        problems.append(
            f"the head's hidden size is {config.hidden_size}, the target's {target.hidden_size}: not a head for this target"
        )
    if config.vocab_size != target.vocab_size:
        problems.append(f"the head's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}")
    if any(not 1 <= layer <= target.num_hidden_layers for layer in config.capture_layers):
        problems.append(
            f"captured layers {list(config.capture_layers)} do not all exist in a target of {target.num_hidden_layers} layers"
        )
    return problems
