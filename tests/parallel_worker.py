"""Trains a small model by each TrainingEngine; run by `accelerate launch` in test_train_parallel.py, one file per engine.

The model is the shape of a head: parameters used outside their submodules, one frozen, sizes that no number divides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.heads.files import read_json
from eyas.train.parallel import Processes, TrainingEngine, start_processes, training_engine
from eyas.train.parallel.deepspeed_config import check_deepspeed
from eyas.train.parallel.engine import leave
from tests.parallel_head_worker import head_curve

NUM_STEPS, SAVED_STEP, PACKS = 50, 25, 4
MAX_GRAD_NORM = 0.5
EXPORT = "export"
WIDTH = 13


class Head(nn.Module):
    """A layer, a readout used by its weight, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x_TX: Tensor) -> Tensor:
        hidden_TH = self.norm(torch.tanh(self.fc(x_TX)) @ self.frozen.weight.T)
        return hidden_TH.to(self.fc.weight.dtype) @ self.lm_head.weight.T


class Objective(nn.Module):
    """Loss of one pack, with a buffer that no checkpoint holds."""

    target_WD: Tensor

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = Head()
        with torch.no_grad():
            self.head.frozen.weight.copy_(torch.eye(WIDTH) + 0.1)
        generator = torch.Generator().manual_seed(9)
        self.register_buffer("target_WD", torch.randn(7, 11, generator=generator), persistent=False)

    def forward(self, x_TX: Tensor, row_weights: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
        squares_T = (self.head(x_TX) - x_TX @ self.target_WD).square().sum(-1)
        return row_weights[0] * squares_T.sum(), {"kl": squares_T.sum().detach()[None]}


def pack(step: int, place: int) -> Tensor:
    """Rows [T, 7] of one pack; T differs from pack to pack."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randn(2 + (step + place) % 4, 7, generator=generator)


def make_engine(processes: Processes, *, seed: int = 0) -> TrainingEngine:
    """A fresh model and optimiser of two groups."""
    objective = Objective(seed=seed)
    trainable = [p for p in objective.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1, "rate_scale": 1.0},
        {"params": [p for p in trainable if p.dim() == 1], "weight_decay": 0.0, "rate_scale": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, fused=True)
    return training_engine(processes, objective, optimizer, max_grad_norm=MAX_GRAD_NORM, max_grad_value=None)


def gradients(engine: TrainingEngine, *, step: int, factor: float = 1.0) -> Tensor:
    """Forward and backward over this process's packs of a step; the loss over all processes."""
    places = range(engine.rank, PACKS, engine.world_size)
    rows = sum(len(pack(step, place)) for place in range(PACKS))
    total = torch.zeros(1)
    for place in places:
        last = place == places[-1]
        with engine.accumulate(last=last):
            loss, sums = engine.model(pack(step, place), [factor * engine.world_size / rows])
            engine.backward(loss, last=last)
        total += sums["kl"] / rows
    return engine.sum(total)


def train(engine: TrainingEngine, *, first: int = 0, disturb: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Loss and norm of every step; weights and optimiser state after SAVED_STEP and at the end."""
    curve, kept = [], {}
    for step in range(first, NUM_STEPS):
        engine.set_learning_rate(0.02 / (1 + 0.1 * step))
        if disturb and step % 10 == 3:
            for factor in (1e30, 7.0, float("nan")):  # a norm of 1e60 is inf in float32
                gradients(engine, step=step, factor=factor)
                norm = engine.clip()
                assert (factor == 7.0) == bool(torch.isfinite(torch.tensor(norm)) and norm < 1e20), norm
                engine.drop()
        curve.append(float(gradients(engine, step=step)))
        curve.append(engine.clip())
        engine.step()
        if step + 1 in (SAVED_STEP, NUM_STEPS):
            name = "saved" if step + 1 == SAVED_STEP else "last"
            kept |= {f"{name}:{key}": tensor for key, tensor in snapshot(engine).items()}
    return curve, kept


def snapshot(engine: TrainingEngine) -> dict[str, Tensor]:
    """Weights by name, and optimiser state under "optimizer:"; {} but on the main process."""
    return engine.weights() | {f"optimizer:{key}": tensor for key, tensor in engine.optimizer_state().items()}


def resume(engine: TrainingEngine, kept: dict[str, Tensor]) -> None:
    """Load what `train` kept after SAVED_STEP."""
    saved = {key.removeprefix("saved:"): tensor for key, tensor in kept.items() if key.startswith("saved:")}
    state = {key.removeprefix("optimizer:"): tensor for key, tensor in saved.items() if key.startswith("optimizer:")}
    engine.load({key: tensor for key, tensor in saved.items() if not key.startswith("optimizer:")}, state)


def whole_output(engine: TrainingEngine) -> Tensor:
    """What the whole head says on this process."""
    with engine.whole_head() as head, torch.no_grad():
        return head(pack(0, 0)).clone()


def exercise(processes: Processes, *, out: Path, reference: dict[str, Tensor]) -> None:
    """From scratch; resumed from its own checkpoint; resumed from that of one process."""
    engine = make_engine(processes)
    assert engine.optimizer_state() == {}
    curve, kept = train(engine, disturb=True)
    output_TD = whole_output(engine)
    train(engine, first=NUM_STEPS - 1)  # still possible once the whole head was seen
    if engine.is_main:
        save_file(kept, out / "own.safetensors")
    engine.barrier()
    kept = load_file(out / "own.safetensors")
    again = make_engine(processes, seed=1)
    resume(again, kept)
    own_curve, own = train(again, first=SAVED_STEP, disturb=True)
    foreign = make_engine(processes, seed=2)
    resume(foreign, reference)
    foreign_curve, other = train(foreign, first=SAVED_STEP)
    real = head_curve(processes, max_grad_norm=MAX_GRAD_NORM, export=out / EXPORT)
    if engine.is_main:
        curves = {"curve": curve, "own_curve": own_curve, "foreign_curve": foreign_curve, "head_curve": real}
        results = {name: torch.tensor(values, dtype=torch.float64) for name, values in curves.items()}
        results |= {f"own:{key}": tensor for key, tensor in own.items()}
        results |= {f"foreign:{key}": tensor for key, tensor in other.items()}
        save_file(kept | results, out / "results.safetensors")
    save_file({"output": output_TD}, out / f"output-{engine.rank}.safetensors")
    assert bool(snapshot(engine)) == engine.is_main


def fake_accelerator_for_fsdp() -> None:
    """accelerate shards on accelerators only; here it takes the CPU for one, with gloo."""
    from accelerate import state

    state.PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"


def main(out: Path, *configs: str) -> None:
    """One folder of results, or one per DeepSpeed file."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        fake_accelerator_for_fsdp()
    processes = start_processes(threads=1, max_grad_norm=MAX_GRAD_NORM, max_grad_value=None, optimizer="adamw")
    reference = load_file(out / "reference.safetensors")
    cases: dict[str, Any] = {Path(config).stem: config for config in configs} or {"plain": None}
    for name, config in cases.items():
        folder = out / name
        folder.mkdir(exist_ok=True)
        if config is not None:
            filled = check_deepspeed(read_json(Path(config)), max_grad_norm=MAX_GRAD_NORM)
            processes = replace(processes, deepspeed={**filled, "steps_per_print": None})
        exercise(processes, out=folder, reference=reference)
    leave(processes.accelerator)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
