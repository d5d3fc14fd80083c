"""Writing a head directory in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from eyas.heads.config import HeadConfig, load_target_config
from eyas.heads.files import read_json, write_bytes, write_json
from eyas.heads.formats import eagle_repo, speculators, vllm
from eyas.heads.formats.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Format,
    HeadFiles,
    expected_shapes,
    in_order,
    mapping_tensors,
)
from eyas.heads.formats.read import read_files
from eyas.heads.head import DraftHead


def write_head(
    directory: Path,
    head: DraftHead,
    *,
    dtype: torch.dtype,
    to: Format = "vllm",
    verifier: str | None = None,
    verifier_dir: Path | None = None,
    draft_tokens: int = speculators.DEFAULT_DRAFT_TOKENS,
) -> None:
    """Write `head` with its weights in `dtype`.

    Args:
        verifier: name or directory of the target, and `draft_tokens` to draft per step, for layouts that note them.
        verifier_dir: directory of the target when `verifier` is only a name.

    Raises:
        ValueError: the layout cannot hold this head.
    """
    tensors = {name: parameter.detach().to(dtype).cpu().contiguous() for name, parameter in head.named_parameters()}
    files = HeadFiles(
        format=to,
        config=head.config,
        tensors=tensors,
        target_ids_D=head.draft_to_target_D.cpu(),
        verifier=verifier,
        draft_tokens=draft_tokens,
        verifier_architectures=_architectures(verifier if verifier_dir is None else str(verifier_dir)),
    )
    write_files(directory, files, to=to)


def write_files(directory: Path, files: HeadFiles, *, to: Format) -> None:
    """Write a head's content in layout `to`, each weight as it is stored.

    The weights go first and the config last, so a half-written directory does not load.

    Raises:
        ValueError: the layout cannot hold this head.
    """
    files = in_order(files)
    if to != "eagle-repo":
        files = _without_zero_bias(files)
    values = _config_json(files, to=to)
    tensors = {_stored_name(name, files=files, to=to): tensor for name, tensor in files.tensors.items()}
    _require_readable(values, files=files, to=to, path=directory / CONFIG_FILE)
    tensors |= mapping_tensors(files)
    weights = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    write_bytes(directory / WEIGHTS_FILE, weights)
    write_json(directory / CONFIG_FILE, values)


def require_expressible(config: HeadConfig, *, to: Format) -> None:
    """Fail before anything is spent when layout `to` cannot hold a head of this configuration.

    Raises:
        ValueError: what the layout has no place for, and which has.
    """
    tensors = dict.fromkeys(expected_shapes(config), torch.empty(0))
    files = HeadFiles(format=to, config=config, tensors=tensors, target_ids_D=torch.empty(0))
    _require_readable(_config_json(files, to=to), files=files, to=to, path=Path(CONFIG_FILE))


def working_layout(config: HeadConfig) -> Format:
    """The layout that a head is kept in while it is trained: vLLM's, or the one that has a place for a bias in fc."""
    return "eagle-repo" if config.fc_bias else "vllm"


def convert_head(
    source: Path, destination: Path, *, to: Format, target: str | None, trust_remote_code: bool = False
) -> HeadFiles:
    """Write the head of `source` in layout `to`; every weight keeps its bits.

    Args:
        target: name or directory of the target. A directory also names captured layers that `source` leaves to the target.

    Returns:
        What was written.

    Raises:
        ValueError: `source` is not a head, `destination` is in use, or the layout cannot hold the head.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not empty; name another directory or remove it")
    files = read_files(source)
    if target is not None:
        files = replace(files, verifier=target, verifier_architectures=_architectures(target))
        if _is_model(target) and to != "eagle-repo":
            files = replace(files, config=files.config.for_target(_load(target, trust_remote_code)))
    write_files(destination, files, to=to)
    return replace(files, format=to)


def _load(target: str, trust_remote_code: bool) -> Any:
    return load_target_config(Path(target), trust_remote_code=trust_remote_code)


def _require_readable(values: dict[str, Any], *, files: HeadFiles, to: Format, path: Path) -> None:
    """Refuse a config that the engine would refuse or take for another head, such as a hidden size that the number of
    attention heads does not divide."""
    reader = {"vllm": vllm, "speculators": speculators, "eagle-repo": eagle_repo}[to]
    again = reader.head_config(values, tensor_names=set(files.tensors), path=path)
    layers = None if to == "eagle-repo" and again.kind == "eagle3" else files.config.capture_layers
    # Rotations are written as they are, and read with defaults filled in.
    if again != replace(files.config, capture_layers=layers, rope_parameters=again.rope_parameters):
        raise ValueError(f"{path}: the {to} layout would read back as another head; write --to another layout")


def _config_json(files: HeadFiles, *, to: Format) -> dict[str, Any]:
    floats = {tensor.dtype for tensor in files.tensors.values()}
    dtype = next(iter(floats)) if len(floats) == 1 else files.tensors["fc.weight"].dtype
    if to == "speculators":
        return speculators.config_json(files, dtype=dtype)
    return {"vllm": vllm, "eagle-repo": eagle_repo}[to].config_json(files.config, dtype=dtype)


def _stored_name(name: str, *, files: HeadFiles, to: Format) -> str:
    return name if to == "speculators" else vllm.stored_name(name, config=files.config)


def _without_zero_bias(files: HeadFiles) -> HeadFiles:
    """A bias of zeros in `fc` changes nothing, so a layout without one can hold the head."""
    bias_H: Tensor | None = files.tensors.get("fc.bias")
    if bias_H is None or bool(bias_H.any()):
        return files
    tensors = {name: tensor for name, tensor in files.tensors.items() if name != "fc.bias"}
    return replace(files, tensors=tensors, config=replace(files.config, fc_bias=False))


def _is_model(target: str) -> bool:
    return (Path(target) / CONFIG_FILE).is_file()


def _architectures(target: str | None) -> tuple[str, ...]:
    if target is None or not _is_model(target):
        return ()
    return tuple(read_json(Path(target) / CONFIG_FILE).get("architectures") or ())
