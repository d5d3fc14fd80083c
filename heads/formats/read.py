"""Reading a head directory of any layout."""

from __future__ import annotations

from pathlib import Path

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


def read_head(directory: Path, *, num_target_layers: int | None = None) -> DraftHead:
    """The head of a directory, in float32 and evaluation mode, its draft vocabulary in ascending order.

    Args:
        num_target_layers: layers of its target, which decide the captured layers when the files name none.

    Raises:
        ValueError: as `read_files`, or the files name no captured layers and the target is not known.
    """
    files = read_files(directory)
    config = files.config
    if config.capture_layers is None:
        if num_target_layers is None:
            raise ValueError(
                f"{directory} names no captured layers, so they depend on the target; name the target (--target DIR)"
            )
        config = config.with_layers_of(num_target_layers)
    target_ids_D, order_D = torch.sort(files.target_ids_D)
    tensors = {name: tensor.float() for name, tensor in files.tensors.items()}
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order_D]
    head = build_head(config, draft_to_target_D=target_ids_D).float()
    head.load_state_dict(tensors, strict=True)
    return head.eval()
