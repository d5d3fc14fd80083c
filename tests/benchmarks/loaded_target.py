"""A target that is loaded already, run over the same batches bare and by the extract stage: seconds of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eyas.heads.target_source import target_fingerprint
from eyas.train.features import extract as extract_module
from eyas.train.features.encoding import StoreForm


@torch.inference_mode()
def bare_seconds(model: Any, batches: Sequence[torch.Tensor], *, device: torch.device) -> float:
    """Seconds of the decoder alone, nothing kept."""
    begin = time.perf_counter()
    for token_ids_BT in batches:
        model.model(input_ids=token_ids_BT.to(device), use_cache=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def extract_seconds(
    store: Path,
    *,
    model: Any,
    tokens_dir: Path,
    target_dir: Path,
    capture_layers: Sequence[int] | None,
    dtype: str,
    form: StoreForm,
    batch_tokens: int,
) -> float:
    """Seconds of the extract stage from the tokens on disk to closed shards; hashing the target's weights is not among them."""
    fingerprint = target_fingerprint(target_dir)
    with (
        mock.patch.object(extract_module, "load_target_model", return_value=model),
        mock.patch.object(extract_module, "target_fingerprint", return_value=fingerprint),
    ):
        begin = time.perf_counter()
        extract_module.extract(
            store,
            tokens_dir=tokens_dir,
            target_dir=target_dir,
            capture_layers=capture_layers,
            dtype=dtype,
            form=form,
            batch_tokens=batch_tokens,
            threads=None,
            device_map=None,
            trust_remote_code=False,
            generated_states=None,
        )
        seconds = time.perf_counter() - begin
    for layer in model.get_decoder().layers:
        layer._forward_hooks.clear()
    return seconds
