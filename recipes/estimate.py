"""What a run will take, by arithmetic, before anything is spent: tokens, disk of the features, memory of training.

Times are left out on purpose: they depend on the machine, and no formula here was measured on the reader's.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.heads.files import read_json

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TRAINED_BYTES = 16
"""Bytes per trained parameter: fp32 weight, gradient and AdamW's two moments."""

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """The sizes of a target that an estimate needs, from its config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


def read_target_shape(target_dir: Path) -> TargetShape:
    """Shape of the text model described by `target_dir/config.json`.

    Raises:
        ValueError: the file is missing or lacks one of the sizes.
    """
    config: dict[str, Any] = read_json(target_dir / "config.json")
    config = config.get("text_config", config)
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return TargetShape(
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=config["vocab_size"],
        )
    except KeyError as error:
        raise ValueError(
            f"{target_dir}/config.json has no {error.args[0]}; is it the config of a decoder-only language model?"
        ) from error


def feature_bytes(tokens: int, *, hidden_size: int, captured: int, dtype: str) -> int:
    """Disk of a feature store: every captured layer and the last hidden state of every token."""
    return tokens * (captured + 1) * hidden_size * DTYPE_BYTES[dtype]


def training_bytes(parameters: int, *, target: TargetShape) -> int:
    """Memory of training without activations: trained state, and the target's embedding and lm_head in fp32."""
    return parameters * TRAINED_BYTES + 2 * target.vocab_size * target.hidden_size * 4


def checkpoint_bytes(parameters: int) -> int:
    """Disk of training: the newest checkpoint and the one being written (fp32 weight and two moments), and the head."""
    return parameters * (2 * 12 + 4)


def weight_bytes(target_dir: Path) -> int:
    """Size of the target's weight files."""
    return sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))


def rough_tokens(conversations: Path) -> int:
    """Tokens of a conversation file, guessed from its characters (JSON keys included, so rather too many)."""
    open_binary = gzip.open if conversations.suffix == ".gz" else open
    with open_binary(conversations, "rb") as stream:
        characters = sum(len(chunk) for chunk in iter(lambda: stream.read(1 << 20), b""))
    return characters // CHARACTERS_PER_TOKEN
