"""What the extract stage has stored of a document against what its target computes for that document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.heads.slots import teacher_positions
from eyas.train.data.tokens import SPLITS
from eyas.train.features.store import FeatureStore
from eyas.train.features.teacher import HiddenTeacher

STATES_LIMIT = 5e-2
"""Largest relative difference of a document's states in bfloat16: padding and the size of a batch change the rounding."""


def states_error(store: Path, model: Any, *, config: HeadConfig, device: torch.device) -> float:
    """Largest relative difference of a layer's states (norm of the difference over the norm); NaN where one is not finite.

    Looked at are the longest and the shortest document, which is padded most, and one between them.
    """
    found = FeatureStore(store, split=SPLITS[0])
    order = sorted(range(len(found)), key=lambda index: found.lengths[index])
    errors = []
    for document in found.load([order[0], order[len(order) // 2], order[-1]]):
        assert isinstance(document.teacher, HiddenTeacher)
        layers, last_TH = _alone(model, document.token_ids_T, config=config, device=device)
        stored = document.captured_TX.split(config.target_hidden_size, dim=-1)
        errors += [_error(kept_TH, state_TH) for kept_TH, state_TH in zip(stored, layers, strict=True)]
        errors.append(_error(document.teacher.hidden_PH, last_TH[teacher_positions(document.answer_mask_T)]))
    found.close()
    return max(errors, key=lambda error: error if error == error else float("inf"))


@torch.inference_mode()
def _alone(model: Any, token_ids_T: Tensor, *, config: HeadConfig, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """States of the captured layers and the last one, of a document without others and without padding, on the CPU."""
    output = model.model(input_ids=token_ids_T[None].to(device), use_cache=False, output_hidden_states=True)
    assert config.capture_layers is not None
    layers = [output.hidden_states[layer][0].cpu() for layer in config.capture_layers]
    return layers, output.last_hidden_state[0].cpu()


def _error(found_TH: Tensor, expected_TH: Tensor) -> float:
    found_TH, expected_TH = found_TH.double(), expected_TH.double()
    return float((found_TH - expected_TH).norm() / expected_TH.norm())
