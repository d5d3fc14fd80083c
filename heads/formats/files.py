"""A head as its files hold it, whatever their format: the one form that readers produce and writers take.

Tensors carry the names of the module (heads/head.py), so a format differs from another in its config and in a few names.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eyas.heads.build import build_head
from eyas.heads.config import HeadConfig
from eyas.heads.files import read_json

Format = Literal["vllm", "speculators", "eagle-repo"]
FORMATS: tuple[Format, ...] = get_args(Format)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAPPING = ("d2t", "t2d")
"""Tensors about the draft vocabulary. d2t holds offsets (target id minus draft id), t2d marks the target ids in use."""


@dataclass(frozen=True)
class HeadFiles:
    """Content of a head directory.

    Attributes:
        config: `capture_layers` is None when the files name none: then they are the engine's default for its target.
        tensors: weights by the module's names, in the dtypes they are stored in.
        target_ids_D: target token id of each draft id.
        verifier: name or directory of the target, where the format has a place for it.
        draft_tokens: tokens to draft per step, where the format has a place for it.
        verifier_architectures: the target's, as the speculators format notes them.
    """

    format: Format
    config: HeadConfig
    tensors: dict[str, Tensor]
    target_ids_D: Tensor
    verifier: str | None = None
    draft_tokens: int | None = None
    verifier_architectures: tuple[str, ...] = ()


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a head directory by its name in the files.

    Raises:
        ValueError: no safetensors file, or one that cannot be read. Pickle files are refused.
    """
    paths = _weight_paths(directory)
    if not paths:
        pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickles:
            raise ValueError(
                f"{directory} holds its weights as pickle ({', '.join(pickles)}), which can run code when it is opened; "
                "convert it to safetensors in a sandbox, as docs/formats.md shows, and name the result"
            )
        raise ValueError(f"{directory / WEIGHTS_FILE} is missing; a head directory holds its weights there")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}); copy or download it again") from error
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise ValueError(
                f"{path} repeats {', '.join(twice)} of another file of the directory; remove one of the two"
            )
        tensors.update(found)
    return tensors


def stored_names(directory: Path) -> set[str]:
    """Names of the tensors of a directory that `stored_tensors` can read."""
    names: set[str] = set()
    for path in _weight_paths(directory):
        with safe_open(path, framework="pt") as weights:
            names.update(weights.keys())
    return names


def _weight_paths(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to files; repair it")
    names = sorted(set(entries.values()))
    if any(Path(name).name != name for name in names):
        raise ValueError(f"{index} names files outside its directory; repair it")
    return [directory / name for name in names]


def expected_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a head of this configuration has."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = build_head(config, draft_to_target_D=torch.empty(config.draft_vocab_size))
    return {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}


def in_order(files: HeadFiles) -> HeadFiles:
    """The content with a whole-vocabulary mapping resolved: no layout keeps one, so the readout's rows take its place."""
    config = files.config
    if config.draft_vocab_size < config.vocab_size or "lm_head.weight" not in files.tensors:
        return files
    target_ids_D, order_D = torch.sort(files.target_ids_D)
    if torch.equal(target_ids_D, files.target_ids_D):
        return files
    readout_DH = files.tensors["lm_head.weight"][order_D]
    return replace(files, tensors={**files.tensors, "lm_head.weight": readout_DH}, target_ids_D=target_ids_D)


def mapping_tensors(files: HeadFiles) -> dict[str, Tensor]:
    """d2t and t2d, or nothing when the head proposes the whole vocabulary: the engine has no place for them then."""
    config = files.config
    if config.draft_vocab_size == config.vocab_size:
        return {}
    mask_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask_V[files.target_ids_D] = True
    return {"d2t": files.target_ids_D - torch.arange(config.draft_vocab_size), "t2d": mask_V}
