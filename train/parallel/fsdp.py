"""Parameters, gradients and optimiser state in shards on all processes, by PyTorch's fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from eyas.heads.head import DraftHead
from eyas.train.parallel.plain import PlainEngine


class FsdpEngine(PlainEngine):
    """A TrainingEngine whose processes hold a shard of every tensor each.

    The whole objective is one unit: a head's parameters are used without calling the submodules they belong to
    (`lm_head.weight` in the chunked loss), and hooks of submodules would not see that.
    """

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients stay whole and local until the last pack."""
        self._module.set_requires_gradient_sync(last)
        self._module.set_is_last_backward(last)
        return nullcontext()

    @contextmanager
    def whole_head(self) -> Iterator[DraftHead]:
        """The head with its shards gathered."""
        self._module.unshard()
        try:
            yield self.head
        finally:
            self._module.reshard()

    def trainable(self) -> dict[str, nn.Parameter]:
        """The shards that are trained; the head shows whole tensors between forward and backward only."""
        self._module.reshard()
        return super().trainable()

    @property
    def _module(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _like(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        if value.dim() == 0 or not isinstance(parameter, DTensor):
            return value.clone()
        return distribute_tensor(value.to(self.device, copy=True), parameter.device_mesh, parameter.placements)


def shard(accelerator: Accelerator, objective: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The objective in shards; the optimiser's groups hold the shards afterwards."""
    model, _ = accelerator.prepare(objective, optimizer)
    return model


def check_fsdp(accelerator: Accelerator) -> None:
    """Refuse settings of accelerate that a head cannot be trained with.

    Raises:
        ValueError: one of them, with the mend.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version is {plugin.fsdp_version}; eyas trains under FSDP2: set fsdp_version: 2")
    if plugin.auto_wrap_policy is not None:
        raise ValueError("fsdp_auto_wrap_policy cuts the head into units; the whole head is one: set it to NO_WRAP")
    if plugin.activation_checkpointing:
        raise ValueError("fsdp_activation_checkpointing is set, which needs units: set it to false")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            "fsdp_offload_params is set; set it to false, or use recipes/deepspeed/zero3-offload.json with DeepSpeed"
        )
    # Every process has built the whole head already.
    plugin.cpu_ram_efficient_loading = False
