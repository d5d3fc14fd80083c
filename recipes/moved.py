"""Keys that recipes of earlier versions have, and what took their place, for errors that say how to bring one up to date."""

from __future__ import annotations

MOVED = {
    "data.generation.self_prompts": "is now data.self_prompts.count",
    "data.generation.chitchat": "is now an entry of data.sources: {preset: chitchat, limit: N}",
    "data.generation.chatterbot": "is now an entry of data.sources: {preset: chatterbot, limit: N}",
    "data.generation.evals": "is now an entry of data.sources: {preset: evals, limit: N}",
    "data.generation.heldout_prompts": "is now data.max_heldout, and data.heldout_share the share of prompts held out",
    "head.init_from_target": "is now the section init: without it a head starts from the target; false was init.lm_head=random, "
    "init.layer=random",
    "train.tracker": "is now tracking.trackers=[wandb]; none is []",
    "train.token_loss_weight": "is now train.losses.forward_kl",
    "train.top_k_loss_weight": "is now train.losses.top_k",
    "train.top_k": "is now train.losses.top_k_tokens",
    "train.feature_loss_weight": "is now train.losses.feature",
    "score.temperature": "is now score.temperatures=[...]",
    "score.fidelity_requests": "is now score.lossless.requests",
    "score.fidelity_max_tokens": "is now score.lossless.max_tokens",
    "score.fidelity_dtype": "is now score.lossless.dtype",
}
"""Dotted path of a key that is gone -> what to write instead."""
