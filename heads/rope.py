"""Rotary position embedding of a head, in the variant that the engine will use for it.

transformers computes the frequencies of every type. One differs: for `dynamic`, transformers changes the base once a
sequence is longer than `max_position_embeddings`, while vLLM fixes it at start-up, and with its defaults at the
unchanged base. A head follows the engine, so `dynamic` is the default type here.

Shapes: T positions, N heads, E head size.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.heads.config import HeadConfig


class Rotary(nn.Module):
    """Cosine and sine of positions; holds no weights."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.embedding = LlamaRotaryEmbedding(_rotary_config(config))

    def forward(self, positions_T: Tensor, *, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, E], in dtype and on the device of `like`."""
        cos_BTE, sin_BTE = self.embedding(like, positions_T[None])
        return cos_BTE[0], sin_BTE[0]


def _rotary_config(config: HeadConfig) -> LlamaConfig:
    parameters = dict(config.rope_parameters)
    if parameters.get("rope_type") == "dynamic":
        parameters = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    return LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim,  # only the head size matters for the rotation
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,  # type: ignore[arg-type]  # transformers types it as its own TypedDict
    )
