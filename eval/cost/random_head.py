"""A head of random weights in a target's sizes: it costs what a trained one costs, and knows nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.heads.build import build_head
from eyas.heads.config import HeadConfig, Kind, default_capture_layers, head_config_for_target, load_target_config
from eyas.heads.formats.write import write_head
from eyas.heads.target import DTYPES

VOCABULARY_SHARE = 4
"""The draft vocabulary is this fraction of the target's unless one is given: published EAGLE-3 heads of Llama-3 have 32,000
of 128,256 tokens."""


def write_random_head(
    directory: Path,
    *,
    target_dir: Path,
    kind: Kind,
    draft_vocab_size: int | None,
    capture_layers: tuple[int, ...] | None,
    dtype: str,
    trust_remote_code: bool,
    seed: int = 0,
) -> HeadConfig:
    """Write a one-layer head in vLLM's layout.

    Args:
        draft_vocab_size: None is the target's vocabulary over `VOCABULARY_SHARE`; an EAGLE head has all of it.
        capture_layers: None is the engine's default, or layers spread evenly where the target is too shallow for that.
        dtype: name of the weights' type.

    Raises:
        ValueError: the sizes do not fit together.
    """
    target_config = load_target_config(target_dir, trust_remote_code=trust_remote_code)
    vocab_size = target_config.vocab_size
    if kind == "eagle":
        config = head_config_for_target(target_config, kind=kind, draft_vocab_size=vocab_size, capture_layers=())
    else:
        config = head_config_for_target(
            target_config,
            draft_vocab_size=draft_vocab_size or max(1, vocab_size // VOCABULARY_SHARE),
            capture_layers=capture_layers or spread_layers(target_config.num_hidden_layers),
        )
    torch.manual_seed(seed)
    head = build_head(config, draft_to_target_D=torch.arange(config.draft_vocab_size))
    write_head(directory, head, dtype=DTYPES[dtype])
    return config


def spread_layers(num_layers: int) -> tuple[int, ...]:
    """Layer ids to capture: the usual three, or as many of first, middle and last as a shallow target has."""
    try:
        return default_capture_layers(num_layers)
    except ValueError:
        return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))
