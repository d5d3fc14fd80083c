"""The EAGLE-3 draft head: fuse captured layers, run one decoder layer over (next token, feature), read out draft logits.

Parameter names are those of the head directory that vLLM loads (`fc`, `midlayer.*`, `norm`, `lm_head`), so that saving is
copying. The token embedding is the target's, frozen, and not part of the module.

The module offers the pieces of one step instead of one forward: training, chain drafting and the dense reference put
them together differently, and none of them may differ in what a step computes.

Shapes: T slots, A captured layers, H hidden, N query heads, M key-value heads, E head size, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.heads.config import HeadConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm in the dtype of its input, as the engine computes it; the weight stays in float32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return F.rms_norm(hidden_TH, self.weight.shape, self.weight.to(hidden_TH.dtype), self.eps)


class DraftAttention(nn.Module):
    """Projections of the draft layer's attention; its input is twice as wide as H (embedding and feature)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width = 2 * config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)


class DraftMLP(nn.Module):
    """Gated feed-forward network with SiLU, as in Llama."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(F.silu(self.gate_proj(hidden_TH)) * self.up_proj(hidden_TH))


class DraftLayer(nn.Module):
    """Weights of the one decoder layer, with a norm for each half of its input."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle3Head(nn.Module):
    """One EAGLE-3 head (arXiv 2503.01840). `draft_to_target_D` maps draft ids to target ids, ascending."""

    draft_to_target_D: Tensor

    def __init__(self, config: HeadConfig, *, draft_to_target_D: Tensor) -> None:
        super().__init__()
        assert draft_to_target_D.shape == (config.draft_vocab_size,)
        self.config = config
        self.fc = nn.Linear(len(config.capture_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_to_target_D", draft_to_target_D.long(), persistent=False)
        self.rotary = LlamaRotaryEmbedding(_rotary_config(config))

    def fuse(self, captured_TX: Tensor) -> Tensor:
        """First feature g^0 [T, H] from the captured layers, concatenated to [T, A*H]."""
        return self.fc(captured_TX)

    def layer_input(self, embedding_TH: Tensor, *, feature_TH: Tensor) -> Tensor:
        """What the layer attends with: norm(embedding of the next token) beside norm(feature), [T, 2H]."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embedding_TH), layer.hidden_norm(feature_TH)), dim=-1)

    def rotations(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, E] of the rotary embedding at `positions_T`, in the target's own rope variant."""
        cos_BTE, sin_BTE = self.rotary(self.fc.weight, positions_T[None])
        return cos_BTE[0], sin_BTE[0]

    def queries(self, input_TX: Tensor, *, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [T, N, E]."""
        attention = self.midlayer.self_attn
        query = attention.q_proj(input_TX).view(-1, attention.num_heads, attention.head_dim)
        return rotate(query, rotations=rotations)

    def keys_values(self, input_TX: Tensor, *, rotations: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [T, M, E] each."""
        attention = self.midlayer.self_attn
        key = attention.k_proj(input_TX).view(-1, attention.num_kv_heads, attention.head_dim)
        value = attention.v_proj(input_TX).view(-1, attention.num_kv_heads, attention.head_dim)
        return rotate(key, rotations=rotations), value

    def finish(self, attended_TNE: Tensor, *, feature_TH: Tensor) -> Tensor:
        """Output o [T, H] of the step, which is also the next step's feature; the residual is the raw feature."""
        layer = self.midlayer
        hidden_TH = feature_TH + layer.self_attn.o_proj(attended_TNE.flatten(1))
        return hidden_TH + layer.mlp(layer.post_attention_layernorm(hidden_TH))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Draft logits [T, D] of step outputs."""
        return self.lm_head(self.norm(hidden_TH))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids, any shape."""
        return self.draft_to_target_D[draft_ids]


def rotate(states_TNE: Tensor, *, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama (`rotate_half`)."""
    cos_TNE, sin_TNE = rotations[0].unsqueeze(1).to(states_TNE.dtype), rotations[1].unsqueeze(1).to(states_TNE.dtype)
    first, second = states_TNE.chunk(2, dim=-1)
    return states_TNE * cos_TNE + torch.cat((-second, first), dim=-1) * sin_TNE


def _rotary_config(config: HeadConfig) -> LlamaConfig:
    """The rotary embedding is transformers', so every rope type it knows works here."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,  # type: ignore[arg-type]  # transformers types it as its own TypedDict
    )
