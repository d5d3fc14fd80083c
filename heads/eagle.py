"""The EAGLE draft head (Li et al., 2024, arXiv 2401.15077): predict the target's next hidden state, read it out with the
target's own lm_head.

Step i at slot t: x = fc([e_{t+1+i} ; f^i_t]), f^{i+1}_t = layer(x) with x as residual and no norm before the attention;
logits = lm_head of the target on f^{i+1}. The first feature f^0_t is the target's last hidden state after its final norm,
and f^{i+1}_t is trained to equal that of token t+1+i.

Shapes: T slots, H hidden, V the target's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.heads.config import HeadConfig
from eyas.heads.head import DraftHead


class EagleHead(DraftHead):
    """One EAGLE head; embedding and readout are the target's."""

    feature_source = "last"

    def __init__(self, config: HeadConfig, *, draft_to_target_D: Tensor) -> None:
        super().__init__(config, draft_to_target_D=draft_to_target_D)
        assert config.kind == "eagle"
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)

    def features(self, states_TX: Tensor) -> Tensor:
        """The target's last hidden state as it is, [T, H]."""
        return states_TX

    @property
    def token_width(self) -> int:
        """0: fc mixes the token in."""
        return 0

    def token_side(self, embedding_TH: Tensor) -> Tensor:
        """The embedding's columns of fc, with its bias, [T, H]."""
        weight_HH = self.fc.weight[:, : self.config.hidden_size]
        return F.linear(embedding_TH, weight_HH, self.fc.bias)

    def enter(self, token_TH: Tensor, *, feature_TH: Tensor) -> tuple[Tensor, Tensor]:
        """fc([embedding ; feature]) [T, H], which is also what the layer adds to."""
        weight_HH = self.fc.weight[:, self.config.hidden_size :]
        mixed_TH = torch.addmm(token_TH, feature_TH.to(token_TH.dtype), weight_HH.T)
        return mixed_TH, mixed_TH

    def feed_back(self, output_TH: Tensor) -> Tensor:
        """The predicted hidden state."""
        return output_TH

    def readout_input(self, output_TH: Tensor) -> Tensor:
        """The predicted hidden state; it stands where the target's final norm has already been."""
        return output_TH

    def readout(self, target_readout_DH: Tensor | None) -> Tensor:
        """The target's lm_head, [V, H]."""
        assert target_readout_DH is not None, "an EAGLE head reads out with the target's lm_head"
        return target_readout_DH
