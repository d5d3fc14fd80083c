"""Checkpoints of a training run: weights and optimiser state in safetensors, position and selection in JSON.

    checkpoints/step-00000200/   weights.safetensors  optimizer.safetensors  state.json
    heads/step-00000200/         a head directory, kept for the best step only

A checkpoint is written beside and renamed, and the newest complete one is what a resumed run starts from. Only the
head's own parameters are in it; the target's pieces are frozen and shared. There is no random state to keep: the order
of batches is a function of seed and epoch, and noise on features one of seed, step and document.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from eyas.heads.files import read_json, sync_directory, write_bytes, write_json

KEPT = 2


@dataclass
class TrainingState:
    """Where a run stands: optimiser steps done, and the best evaluation so far (step -1: none yet)."""

    step: int = 0
    best_step: int = -1
    best_tau: float = 0.0


def save_checkpoint(
    run_dir: Path, *, module: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Write the checkpoint of `state.step` atomically, then drop all but the newest `KEPT`."""
    final = run_dir / "checkpoints" / _name(state.step)
    temporary = final.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_bytes(temporary / "weights.safetensors", save(_contiguous(module.state_dict())))
    write_bytes(temporary / "optimizer.safetensors", save(_optimizer_tensors(optimizer)))
    write_json(temporary / "state.json", asdict(state))
    sync_directory(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    sync_directory(final.parent)
    for old in _complete(run_dir)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load_latest(run_dir: Path, *, module: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Put the newest checkpoint into `module` and `optimizer`; a fresh state when there is none."""
    complete = _complete(run_dir)
    if not complete:
        return TrainingState()
    directory = complete[-1]
    module.load_state_dict(load_file(directory / "weights.safetensors"))
    _load_optimizer(optimizer, load_file(directory / "optimizer.safetensors"))
    return TrainingState(**read_json(directory / "state.json"))


def head_directory(run_dir: Path, step: int) -> Path:
    """Where the head of an evaluated step is kept."""
    return run_dir / "heads" / _name(step)


def prune_heads(run_dir: Path, *, keep: set[int]) -> None:
    """Remove the kept heads of all steps but `keep`."""
    kept = {_name(step) for step in keep}
    for directory in (run_dir / "heads").glob("step-*"):
        if directory.name not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def saved_best_step(run_dir: Path) -> int:
    """Best step that the newest checkpoint refers to; -1 without one."""
    complete = _complete(run_dir)
    return read_json(complete[-1] / "state.json")["best_step"] if complete else -1


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _complete(run_dir: Path) -> list[Path]:
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if path.suffix != ".tmp")


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, values in state.items()
        for name, value in values.items()
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
