"""Sizes of a target from its config alone: the model is built on torch's meta device, where weights take no memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")

MXFP4_BYTES = (4 + 8 / 32) / 8
"""Per weight: four bits, and eight bits of scale for every 32."""


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """What estimates need to know of a target. Parameters are counts, `active` those a token meets in the decoder.

    `weight_bytes` are of the type that the features are made in. `packed_parameters` are those that are published in MXFP4.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    parameters: int
    active_parameters: int
    weight_bytes: int
    packed_parameters: int

    def served_bytes(self, dtype: str) -> int:
        """Bytes of the weights as vLLM keeps them when it runs the target in `dtype`: what is packed stays so."""
        from eyas.heads.target import DTYPES

        plain = (self.parameters - self.packed_parameters) * DTYPES[dtype].itemsize
        return plain + round(self.packed_parameters * MXFP4_BYTES)


def read_target_size(target_dir: Path, *, dtype: str, trust_remote_code: bool) -> TargetSize:
    """Sizes of the target described by `target_dir/config.json`; its weights take what they take in `dtype`.

    Raises:
        ValueError: transformers does not know the model, or its config lacks a size.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from eyas.heads.config import load_target_config
    from eyas.heads.target import DTYPES

    config = load_target_config(target_dir, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{target_dir}/config.json: transformers cannot build this model ({error}); is it a decoder-only language model?"
        ) from error
    values: dict[str, Any] = config.to_dict()
    total = sum(parameter.numel() for parameter in model.parameters())
    missing = [name for name in SIZES if not isinstance(values.get(name), int)]
    if missing:
        raise ValueError(
            f"{target_dir}/config.json has no {' and no '.join(missing)}; is it the config of a decoder-only language model?"
        )
    heads = values["num_attention_heads"]
    return TargetSize(
        hidden_size=values["hidden_size"],
        vocab_size=values["vocab_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        parameters=total,
        active_parameters=_active(model, values),
        weight_bytes=total * DTYPES[dtype].itemsize,
        packed_parameters=_packed(model, values),
    )


def _packed(model: Any, values: dict[str, Any]) -> int:
    """Weights that are published in MXFP4, the one quantised form that is known here: the matrices of experts."""
    if (values.get("quantization_config") or {}).get("quant_method") != "mxfp4":
        return 0
    return sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name and parameter.dim() > 2
    )


def _active(model: Any, values: dict[str, Any]) -> int:
    """Decoder parameters that one token is multiplied with: of experts, only those it is routed to."""
    decoder = model.get_decoder()
    embedding = {id(parameter) for parameter in decoder.get_input_embeddings().parameters()}
    experts = values.get("num_local_experts") or values.get("num_experts") or values.get("n_routed_experts") or 0
    share = values.get("num_experts_per_tok", experts) / experts if experts else 1.0
    count = 0.0
    for name, parameter in decoder.named_parameters():
        if id(parameter) not in embedding:
            count += parameter.numel() * (share if ".experts." in name else 1.0)
    return round(count)
