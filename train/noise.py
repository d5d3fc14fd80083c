"""Noise on the input features of an EAGLE head while it trains.

The head is fed its own predictions when it drafts, and noise on the true features is the paper's answer to their errors.
The noise is uniform with zero mean. The paper (arXiv 2401.15077, section 4.1) uses a constant width of 0.2; the official
code scales it by 512 / L for a sequence of L tokens.

It is a function of (seed, step, document), so that a resumed run draws what the unbroken one would have drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

OFFICIAL_LENGTH = 512


@dataclass(frozen=True)
class FeatureNoise:
    """`width` is the whole width of the interval that noise is drawn from."""

    kind: Literal["none", "constant", "length"]
    width: float

    def apply(self, states_TX: Tensor, *, seed: int, step: int, document: int) -> Tensor:
        """The states, in float32 once there is noise in them."""
        if self.kind == "none":
            return states_TX
        scale = self.width * (OFFICIAL_LENGTH / states_TX.shape[0] if self.kind == "length" else 1.0)
        generator = torch.Generator().manual_seed(random.Random(f"{seed}/{step}/{document}").getrandbits(63))
        noise_TX = torch.rand(states_TX.shape, generator=generator).to(states_TX.device)
        # In float32: most of the noise would be rounded away beside a large bfloat16 feature.
        return states_TX.float() + (noise_TX - 0.5) * scale
