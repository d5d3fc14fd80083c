"""The decoder layer of a draft head: weights and the pieces of one step, for every variant that the engine knows.

A layer is called with what it attends from (`input_TX`) and what it adds to (`residual_TH`), because the first layer of
either kind of head makes the two in its own way, and only training and drafting know which slots need which piece.

Shapes: T slots, H hidden, X input width (H, or 2H in the first EAGLE-3 layer), N query heads, M key-value heads, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.heads.config import HeadConfig
from eyas.heads.fused import gated_silu, rms_norm, rotate

Rotations = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm in the dtype of its input, as the engine computes it; the weight stays in float32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return rms_norm(hidden_TH, weight_H=self.weight, eps=self.eps)


class DraftAttention(nn.Module):
    """Projections of a draft layer's attention; Qwen3 layers norm each query and key head."""

    def __init__(self, config: HeadConfig, *, input_width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.layer == "qwen3":
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def queries(self, input_TX: Tensor, *, rotations: Rotations) -> Tensor:
        """Rotated queries [T, N, E]."""
        return self.finish_queries(self.q_proj(input_TX), rotations=rotations)

    def keys_values(self, input_TX: Tensor, *, rotations: Rotations) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [T, M, E] each."""
        return self.finish_keys(self.k_proj(input_TX), rotations=rotations), self.heads(self.v_proj(input_TX))

    def finish_queries(self, query_TQ: Tensor, *, rotations: Rotations) -> Tensor:
        """Rotated queries [T, N, E] from projected ones, [T, N*E]."""
        query_TNE = self.heads(query_TQ)
        return rotate(query_TNE if self.q_norm is None else self.q_norm(query_TNE), rotations=rotations)

    def finish_keys(self, key_TK: Tensor, *, rotations: Rotations) -> Tensor:
        """Rotated keys [T, M, E] from projected ones, [T, M*E]."""
        key_TME = self.heads(key_TK)
        return rotate(key_TME if self.k_norm is None else self.k_norm(key_TME), rotations=rotations)

    def heads(self, projected: Tensor) -> Tensor:
        """[T, heads*E] -> [T, heads, E]."""
        return projected.unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    """Gated feed-forward network with SiLU, as in Llama."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(gated_silu(self.gate_proj(hidden_TH), self.up_proj(hidden_TH)))


class DraftLayer(nn.Module):
    """One decoder layer. The first layer of an EAGLE head has no input norm; that of an EAGLE-3 head has two, one for
    the embedding (`input_layernorm`) and one for the feature (`hidden_norm`)."""

    def __init__(self, config: HeadConfig, *, first: bool) -> None:
        super().__init__()
        eagle3_first = first and config.kind == "eagle3"
        self.self_attn = DraftAttention(config, input_width=(2 if eagle3_first else 1) * config.hidden_size)
        self.mlp = DraftMLP(config)
        if eagle3_first:
            self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if not (first and config.kind == "eagle"):
            self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def finish(self, attended_TNE: Tensor, *, residual_TH: Tensor) -> Tensor:
        """Output [T, H] of the layer from what its queries attended to."""
        hidden_TH = residual_TH + self.self_attn.o_proj(attended_TNE.flatten(1))
        return hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH))
