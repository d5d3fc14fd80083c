"""One process, or several with a whole copy each whose gradients are averaged (DDP)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from eyas.heads.head import DraftHead
from eyas.train.parallel.engine import Group, check_weights, split_state


class PlainEngine(Group):
    """A TrainingEngine whose processes all hold the whole head and the whole optimiser state."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        model: nn.Module,
        head: DraftHead,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        max_grad_value: float | None,
    ) -> None:
        super().__init__(accelerator, head=head, optimizer=optimizer)
        self.model: Callable[..., Any] = model
        self.max_grad_norm, self.max_grad_value = max_grad_norm, max_grad_value

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients stay local until the last pack."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def backward(self, loss: Tensor, *, last: bool) -> None:  # noqa: ARG002  # `accumulate` has arranged for it
        """Add the gradients of `loss`."""
        loss.backward()

    def clip(self) -> float:
        """Clip each entry when asked to, then the global norm; the norm between the two."""
        parameters = list(self.trainable().values())
        if self.max_grad_value is not None:
            # Clamping would make an infinite entry a finite one.
            norm = float(get_total_norm([p.grad for p in parameters if p.grad is not None]))
            if not math.isfinite(norm):
                return norm
            clip_grad_value_(parameters, self.max_grad_value)
        if self.max_grad_norm is not None:
            return float(self._whole(clip_grad_norm_(parameters, self.max_grad_norm)))
        return float(self._whole(get_total_norm([p.grad for p in parameters if p.grad is not None])))

    def step(self) -> None:
        """Update the weights and forget the gradients."""
        self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """Whole trainable tensors on the main process; collective."""
        return self._gathered(self.trainable())

    def optimizer_state(self) -> dict[str, Tensor]:
        """Whole optimiser state on the main process; collective."""
        state = self.optimizer.state
        return self._gathered(
            {
                f"{name}/{key}": value
                for name, parameter in self.trainable().items()
                for key, value in state.get(parameter, {}).items()
            }
        )

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], optimizer_state: dict[str, Tensor] | None) -> None:
        """Take over whole weights and optimiser state; collective."""
        parameters = self.trainable()
        check_weights(weights, shapes={name: parameter.shape for name, parameter in parameters.items()})
        for name, parameter in parameters.items():
            parameter.copy_(self._like(weights[name], parameter))
        if optimizer_state is None:
            return
        indices = {p: i for i, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        state: dict[int, dict[str, Tensor]] = {}
        for name, key, value in split_state(optimizer_state):
            parameter = parameters[name]
            state.setdefault(indices[parameter], {})[key] = self._like(value, parameter)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    @contextmanager
    def whole_head(self) -> Iterator[DraftHead]:
        """The head itself."""
        yield self.head

    def end(self) -> None:
        """Leave together; no step after it."""
        del self.model  # `leave` says why
        super().end()

    def _gathered(self, tensors: dict[str, nn.Parameter] | dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the main process, one tensor after the other so that few are whole at a time."""
        copies = {name: self.kept(self._whole(tensor)) for name, tensor in tensors.items()}
        return {name: copy for name, copy in copies.items() if copy is not None}

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def _like(self, value: Tensor, parameter: nn.Parameter) -> Tensor:  # noqa: ARG002  # others place it as `parameter` is
        """The engine's own copy of a whole tensor, placed as `parameter` is."""
        return value.clone()


def replicate(accelerator: Accelerator, objective: nn.Module) -> nn.Module:
    """The objective on the device of this process, under DDP when there are several."""
    with warnings.catch_warnings():
        # The name that replaces `broadcast_buffers` in torch 2.13 is not known to accelerate.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return accelerator.prepare_model(objective)
