"""Joining the processes that a launcher started, and the engine that fits how it started them.

What cannot work is said before data is opened: a launcher whose processes do not know of each other would train as
many heads, and a setting of the launcher that the recipe has too would quietly win.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    is_deepspeed_available,
    parse_flag_from_env,
)
from torch import nn

from eyas.train.parallel.deepspeed import DeepSpeedEngine
from eyas.train.parallel.deepspeed_config import check_deepspeed
from eyas.train.parallel.engine import TrainingEngine
from eyas.train.parallel.fsdp import FsdpEngine, check_fsdp, shard
from eyas.train.parallel.plain import PlainEngine, replicate


@dataclass(frozen=True)
class Processes:
    """The processes of a training, joined and checked; at most one of the last two is set."""

    accelerator: Accelerator
    deepspeed: dict[str, Any] | None
    fsdp: bool


def join_processes() -> PartialState:
    """Make this process know of the others of its launch; may be called again.

    Raises:
        ValueError: they cannot find each other, or the launcher asks for what is not there.
    """
    backend: dict[str, Any] = {}
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        if not is_deepspeed_available():
            raise ValueError("the launcher asks for DeepSpeed, which is not installed: pip install 'eyas[deepspeed]'")
        _require_file(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
        if not torch.cuda.is_available():
            backend = {"backend": "gloo"}  # without a name accelerate makes a group of one process each
            _without_compiled_exchange()
    processes = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"), **backend)
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if processes.num_processes != asked:
        if parse_flag_from_env("ACCELERATE_USE_FSDP"):
            raise ValueError("the launcher asks for FSDP, which needs GPUs, and there are none; use DDP or DeepSpeed")
        raise ValueError(
            f"the launcher started {asked} processes and accelerate joined {processes.num_processes}; on CPU set "
            "ACCELERATE_USE_CPU=true for `accelerate launch --multi_gpu --num_processes N`"
        )
    return processes


def _require_file(deepspeed_file: str | None) -> None:
    """
    Raises:
        ValueError: the launcher names a DeepSpeed file that is not there.
    """
    if deepspeed_file is not None and deepspeed_file.endswith(".json") and not Path(deepspeed_file).is_file():
        raise ValueError(
            f"the DeepSpeed file {deepspeed_file} of the launcher does not exist, seen from {Path.cwd()}; name it with "
            "--deepspeed_config_file, by its absolute path"
        )


def _without_compiled_exchange() -> None:
    """Keep DeepSpeed from compiling its exchange through shared memory, which gloo does without.

    It takes a minute, and a start that is killed meanwhile leaves a lock on which every later one waits for ever.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start_processes(
    *,
    threads: int | None,
    max_grad_norm: float | None,
    max_grad_value: float | None,
    optimizer: Literal["adamw", "muon"],
) -> Processes:
    """Join the processes of the launch and check its settings against the recipe's.

    Args:
        threads: of each process on the CPU; None leaves them as they are.
        max_grad_norm: and the others: the recipe's train section.

    Raises:
        ValueError: launch and recipe do not fit together, with the mend.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise ValueError(
            f"accelerate's mixed_precision is {precision}; precision is the recipe's train.precision: "
            "set mixed_precision: 'no' (--mixed_precision no)"
        )
    join_processes()
    _check_unused()
    accelerator = Accelerator(
        mixed_precision="no",
        # The buffers are frozen weights of the target, equal everywhere: sending them at each step would cost gigabytes.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    kind = accelerator.distributed_type
    _check_taken("DeepSpeed", asked=parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"), taken=kind == "DEEPSPEED")
    _check_taken("FSDP", asked=parse_flag_from_env("ACCELERATE_USE_FSDP"), taken=kind == "FSDP")
    config = None
    if kind == DistributedType.DEEPSPEED:
        plugin: Any = accelerator.state.deepspeed_plugin
        config = check_deepspeed(plugin.deepspeed_config, max_grad_norm=max_grad_norm)
    if kind == DistributedType.FSDP:
        check_fsdp(accelerator)
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        _check_whole(kind.value, max_grad_value=max_grad_value, optimizer=optimizer)
    return Processes(accelerator=accelerator, deepspeed=config, fsdp=kind == DistributedType.FSDP)


def training_engine(
    processes: Processes,
    objective: Any,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float | None,
    max_grad_value: float | None,
) -> TrainingEngine:
    """The engine of `processes` around an objective on the CPU, the head's loss of a pack; collective.

    Args:
        objective: a module with a `head`, whose forward gives the loss first.
        optimizer: over trainable parameters of the head; its groups may carry "rate_scale".
    """
    assert isinstance(objective, nn.Module)
    accelerator: Accelerator = processes.accelerator
    head: Any = objective.head
    if processes.deepspeed is not None:
        assert processes.deepspeed["gradient_clipping"] == (max_grad_norm or 0.0)
        return DeepSpeedEngine(
            accelerator, objective=objective, head=head, optimizer=optimizer, config=processes.deepspeed
        )
    engine = FsdpEngine if processes.fsdp else PlainEngine
    model = shard(accelerator, objective, optimizer) if processes.fsdp else replicate(accelerator, objective)
    return engine(
        accelerator,
        model=model,
        head=head,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        max_grad_value=max_grad_value,
    )


def _check_unused() -> None:
    """Settings of accelerate that would do nothing, or change how gradients are added up."""
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") not in ("1", "auto"):
        raise ValueError(
            "accelerate's gradient_accumulation_steps is set; a step is train.batch_tokens whatever the number of processes, "
            "in packs of train.pack_tokens: remove it"
        )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        raise ValueError("accelerate's dynamo_backend is set; the head is not compiled: set dynamo_backend: 'no'")


def _check_taken(what: str, *, asked: bool, taken: bool) -> None:
    if asked and not taken:
        raise ValueError(
            f"the launcher asks for {what} and accelerate did not take it up: unset ACCELERATE_USE_CPU (use_cpu: false)"
            + ("; FSDP needs GPUs" if what == "FSDP" else "")
        )


def _check_whole(kind: str, *, max_grad_value: float | None, optimizer: str) -> None:
    """Settings that need whole gradients, which processes hold shards of."""
    if max_grad_value is not None:
        raise ValueError(f"train.max_grad_value does not work under {kind}: set it to null, or launch plain DDP")
    if optimizer == "muon":
        raise ValueError(f"train.optimizer muon does not work under {kind}: set it to adamw, or launch plain DDP")
