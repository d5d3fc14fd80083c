"""Reading a head directory of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.heads.build import build_head
from eyas.heads.formats.check import inspect_head
from eyas.heads.formats.files import HeadFiles
from eyas.heads.formats.findings import errors
from eyas.heads.head import DraftHead


def read_files(directory: Path) -> HeadFiles:
    """The content of a head directory, whichever layout it has.

    Raises:
        ValueError: the directory is no EAGLE or EAGLE-3 head that can be read unchanged; every problem is named.
    """
    findings, files = inspect_head(directory)
    if files is None:
        raise ValueError(f"{directory} is not a usable head: " + "; ".join(errors(findings)))
    return files


def read_head(directory: Path, *, target_config: Any | None = None) -> DraftHead:
    """The head of a directory, in float32 and evaluation mode, its draft vocabulary in ascending order.

    Args:
        target_config: transformers configuration of its target. The engine fills in from it what the files leave open:
            the captured layers, and a sliding window that the target passes on.

    Raises:
        ValueError: as `read_files`, or the files name no captured layers and the target is not known.
    """
    files = read_files(directory)
    config = files.config
    if target_config is not None:
        config = config.for_target(target_config)
    elif config.capture_layers is None:
        raise ValueError(
            f"{directory} names no captured layers, so they depend on the target; name the target (--target DIR)"
        )
    target_ids_D, order_D = torch.sort(files.target_ids_D)
    tensors = {name: tensor.float() for name, tensor in files.tensors.items()}
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order_D]
    head = build_head(config, draft_to_target_D=target_ids_D).float()
    head.load_state_dict(tensors, strict=True)
    return head.eval()
