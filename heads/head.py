"""What training and drafting need of a draft head, whichever kind it is.

A head offers the pieces of one step instead of one forward: training, chain drafting and the dense reference put them
together differently (heads/chain.py), and none of them may differ in what a step computes. Parameter names are those
of the engine's module (`fc`, `layers.N.*`, `norm`, `lm_head`), so that saving is copying.

Shapes: T slots, H the head's hidden size, X width of the target's features, D draft vocabulary, V the target's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from eyas.heads.config import HeadConfig
from eyas.heads.layers import DraftLayer, Rotations
from eyas.heads.rope import Rotary

FeatureSource = Literal["captured", "last"]


class DraftHead(nn.Module, ABC):
    """Base of both kinds. `draft_to_target_D` maps draft ids to target ids, ascending."""

    feature_source: FeatureSource
    """Which of the target's states the head reads: captured layers, or the last state after the final norm."""

    draft_to_target_D: Tensor
    fc: nn.Linear

    def __init__(self, config: HeadConfig, *, draft_to_target_D: Tensor) -> None:
        super().__init__()
        assert draft_to_target_D.shape == (config.draft_vocab_size,)
        self.config = config
        self.layers = nn.ModuleList(DraftLayer(config, first=index == 0) for index in range(config.num_layers))
        self.embed_tokens: nn.Embedding | None = None
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config)
        self.register_buffer("draft_to_target_D", draft_to_target_D.long(), persistent=False)

    def embed(self, token_ids: Tensor, *, embedding_VH: Tensor | None) -> Tensor:
        """Embeddings [..., H] of tokens: the head's own when it has one, else rows of the target's `embedding_VH`."""
        dtype = self.fc.weight.dtype
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids).to(dtype)
        assert embedding_VH is not None, "a head without an embedding reads the target's"
        return look_up(embedding_VH, token_ids).to(dtype)

    def rotations(self, positions_T: Tensor) -> Rotations:
        """Cosine and sine [T, E] of the rotary embedding at `positions_T`."""
        return self.rotary(positions_T, like=self.fc.weight)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids, any shape."""
        return self.draft_to_target_D[draft_ids]

    @abstractmethod
    def features(self, states_TX: Tensor) -> Tensor:
        """First feature g^0 [T, H] from the target's states of `feature_source`."""

    @abstractmethod
    def token_side(self, embedding_TH: Tensor) -> Tensor:
        """What the first layer reads of the next token alone [T, H]: the same at whichever step a token is read."""

    @abstractmethod
    def enter(self, token_TH: Tensor, *, feature_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer attends from besides a token side of its own, and what it adds to: ([T, H], [T, H]).

        Args:
            token_TH: rows of `token_side`.
        """

    @property
    @abstractmethod
    def token_width(self) -> int:
        """Columns of the first layer's projections that multiply the token side: H, or 0 where `enter` mixes it in."""

    @abstractmethod
    def feed_back(self, output_TH: Tensor) -> Tensor:
        """The next step's feature [T, H] from the last layer's output."""

    @abstractmethod
    def readout_input(self, output_TH: Tensor) -> Tensor:
        """What the readout multiplies, [T, H], from the last layer's output."""

    @abstractmethod
    def readout(self, target_readout_DH: Tensor | None) -> Tensor:
        """The readout [D, H]: the head's own, or the target's rows of the draft vocabulary."""

    def logits(self, output_TH: Tensor, *, target_readout_DH: Tensor | None) -> Tensor:
        """Draft logits [T, D] of step outputs."""
        readout_DH = self.readout(target_readout_DH)
        return self.readout_input(output_TH) @ readout_DH.to(output_TH.dtype).T


def later_input(layer: nn.Module, *, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Input and residual of every layer but the first."""
    assert isinstance(layer, DraftLayer)
    return layer.input_layernorm(hidden_TH), hidden_TH


def whole_input(head: DraftHead, token_TH: Tensor, *, input_TH: Tensor) -> Tensor:
    """What the first layer's projections multiply: [token side ; input], [T, 2H], or the input where it is mixed in."""
    return torch.cat((token_TH, input_TH), dim=-1) if head.token_width else input_TH


def look_up(embedding_VH: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of a table on the tokens' device, wherever the table is: a target's may stay on the CPU."""
    return embedding_VH[token_ids.to(embedding_VH.device)].to(token_ids.device)
