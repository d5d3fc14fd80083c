"""The EAGLE-3 draft head (Li et al., 2025, arXiv 2503.01840): fuse captured layers, run a decoder layer over (next
token, feature), read out draft logits.

Step i at slot t: u = [norm(e_{t+1+i}) ; norm(g^i_t)], o = layer(u) with the raw feature as residual, logits = lm_head(norm(o)),
g^{i+1} = o. The first feature is g^0 = fc(captured layers). EAGLE-3.1 norms each captured layer before fc (`fc_norm`) and
feeds back the normed output (`norm_output`).

Shapes: T slots, A captured layers, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from itertools import starmap

import torch
from torch import Tensor, nn

from eyas.heads.config import HeadConfig
from eyas.heads.head import DraftHead
from eyas.heads.layers import DraftLayer, RMSNorm


class Eagle3Head(DraftHead):
    """One EAGLE-3 head; the readout is its own."""

    feature_source = "captured"

    def __init__(self, config: HeadConfig, *, draft_to_target_D: Tensor) -> None:
        super().__init__(config, draft_to_target_D=draft_to_target_D)
        assert config.kind == "eagle3"
        width = config.num_captured * config.target_hidden_size
        self.input_norm = RMSNorm(width, eps=config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(config.num_captured)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def features(self, states_TX: Tensor) -> Tensor:
        """Captured layers, concatenated to [T, A*H] -> [T, H]."""
        if self.input_norm is not None:
            states_TX = self.input_norm(states_TX)
        if self.fc_norm is not None:
            chunks = states_TX.chunk(len(self.fc_norm), dim=-1)
            states_TX = torch.cat(list(starmap(_apply, zip(self.fc_norm, chunks, strict=True))), dim=-1)
        return self.fc(states_TX)

    @property
    def token_width(self) -> int:
        """H: the first layer's projections read [token side ; normed feature]."""
        return self.config.hidden_size

    def token_side(self, embedding_TH: Tensor) -> Tensor:
        """norm(embedding), [T, H]."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer.input_layernorm(embedding_TH)

    def enter(self, token_TH: Tensor, *, feature_TH: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002  # beside it
        """norm(feature), and the feature to add to."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        normed_TH = layer.hidden_norm(feature_TH)
        return normed_TH, normed_TH if self.config.norm_before_residual else feature_TH

    def feed_back(self, output_TH: Tensor) -> Tensor:
        """The raw output, or the normed one in EAGLE-3.1."""
        return self.norm(output_TH) if self.config.norm_output else output_TH

    def readout_input(self, output_TH: Tensor) -> Tensor:
        """The normed output."""
        return self.norm(output_TH)

    def readout(self, target_readout_DH: Tensor | None) -> Tensor:  # noqa: ARG002  # the head has its own
        """lm_head, [D, H]."""
        return self.lm_head.weight


def _apply(norm: nn.Module, chunk_TH: Tensor) -> Tensor:
    return norm(chunk_TH)
