"""The module of a head's configuration."""

from __future__ import annotations

from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.heads.eagle import EagleHead
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.head import DraftHead


def build_head(config: HeadConfig, *, draft_to_target_D: Tensor) -> DraftHead:
    """A head of the configured kind, with fresh weights of torch's own initialisation."""
    module = EagleHead if config.kind == "eagle" else Eagle3Head
    return module(config, draft_to_target_D=draft_to_target_D)
