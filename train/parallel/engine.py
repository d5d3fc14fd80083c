"""What the training loop asks of the way that a head is spread over processes.

One loop runs in one process, under DDP (plain.py), DeepSpeed ZeRO (deepspeed.py) and FSDP2 (fsdp.py). Weights and
optimiser state leave and enter an engine whole, in float32 and by parameter name, so that a checkpoint of one engine
and number of processes continues under another. Parameters are float32 everywhere (lower precision is autocast inside
the model), and every engine averages gradients over processes.

Methods called *collective* must be called by all processes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from eyas.heads.head import DraftHead
from eyas.train.optim import set_learning_rate


class TrainingEngine(Protocol):
    """A head, its optimiser and the processes that share them."""

    model: Callable[..., Any]
    """The wrapped objective: call this one, never the bare module."""

    rank: int
    world_size: int
    is_main: bool
    device: torch.device

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one pack; gradients are synchronised at the last pack of a step only."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`, inside `accumulate`."""
        ...

    def clip(self) -> float:
        """Clip as set up; collective.

        Returns:
            The global norm before it was clipped, the same on every process; inf or nan when a gradient is.
        """
        ...

    def step(self) -> None:
        """Update the weights and forget the gradients; after `clip`; collective."""
        ...

    def drop(self) -> None:
        """Forget the gradients of this step: weights and optimiser state stay as they are; after `clip`; collective."""
        ...

    def set_learning_rate(self, rate: float) -> None:
        """Give every parameter group `rate` times its "rate_scale"."""
        ...

    def trainable(self) -> dict[str, nn.Parameter]:
        """What this process holds of the trainable parameters, by the head's names."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Copies on the CPU of the whole trainable tensors, by the head's names; {} but on the main process; collective."""
        ...

    def optimizer_state(self) -> dict[str, Tensor]:
        """Optimiser state, "<parameter>/<name>", as `weights`; {} before the first step; collective."""
        ...

    def load(self, weights: dict[str, Tensor], optimizer_state: dict[str, Tensor] | None) -> None:
        """Take over what `weights` and `optimizer_state` gave, under any engine; collective, the same on every process.

        Raises:
            ValueError: names or shapes are not those of the head.
        """
        ...

    def whole_head(self) -> AbstractContextManager[DraftHead]:
        """A head to evaluate and export, with whole weights on every process; read only; collective."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """`value` added up over processes, on the engine's device; collective."""
        ...

    def barrier(self) -> None:
        """Wait for every process."""
        ...

    def end(self) -> None:
        """Leave together: a process that ends while another still talks to it takes both down."""
        ...


class Group:
    """What all engines share: the processes, the head and its bare optimiser. The base of every engine."""

    def __init__(self, accelerator: Accelerator, *, head: DraftHead, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator, self.head, self.optimizer = accelerator, head, optimizer
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process
        self.device: torch.device = accelerator.device

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by the head's names."""
        return {name: parameter for name, parameter in self.head.named_parameters() if parameter.requires_grad}

    def set_learning_rate(self, rate: float) -> None:
        """Give every parameter group `rate` times its "rate_scale"."""
        set_learning_rate(self.optimizer, rate)

    def kept(self, tensor: Tensor) -> Tensor | None:
        """A copy on the CPU on the main process, None elsewhere."""
        return tensor.detach().to("cpu", copy=True).contiguous() if self.is_main else None

    def sum(self, value: Tensor) -> Tensor:
        """`value` added up over processes; the caller's tensor stays as it is."""
        total = value.detach().to(self.device, copy=True)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def barrier(self) -> None:
        """Wait for every process."""
        self.accelerator.wait_for_everyone()

    def end(self) -> None:
        """Leave together."""
        leave(self.accelerator)


def leave(accelerator: Accelerator) -> None:
    """Wait for the other processes and end the process group; the caller lets go of its models before.

    DDP's Reducer must not be the last that knows of the process group: it ends gloo's threads without giving up Python's
    lock, for which a thread that drops the tensors of the last exchange may wait, and the process would never end.
    """
    accelerator.wait_for_everyone()
    accelerator.free_memory()  # its own references to models
    accelerator.end_training()


def split_state(optimizer_state: dict[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, name, tensor) of "<parameter>/<name>" entries."""
    for key, tensor in optimizer_state.items():
        parameter, _, name = key.rpartition("/")
        yield parameter, name, tensor


def check_weights(weights: dict[str, Tensor], *, shapes: dict[str, torch.Size]) -> None:
    """Refuse weights of another head.

    Raises:
        ValueError: a name is missing, unknown or has another shape.
    """
    names = sorted(weights.keys() ^ shapes.keys())
    if names:
        raise ValueError(
            f"the checkpoint and the head differ in what is trained: {', '.join(names)}; was the recipe's head changed? "
            "Train it in another run directory"
        )
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"{name} is {list(weights[name].shape)} in the checkpoint and {list(shape)} in the head; was the recipe's "
                "head changed? Train it in another run directory"
            )
