"""DeepSpeed ZeRO: optimiser state (stage 1), gradients (2) and parameters (3) in shards on all processes.

The engine is called directly and not through accelerate, whose backward also steps. With one accumulation step nothing
is divided; which pack is the last of a step is said by the boundary. Names of DeepSpeed that its documentation does not
have are confined to the functions below the class (deepspeed 0.19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eyas.heads.head import DraftHead
from eyas.train.parallel.engine import Group, check_weights, split_state


class DeepSpeedEngine(Group):
    """A TrainingEngine on DeepSpeed's; `config` is one that `check_deepspeed` gave."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        objective: nn.Module,
        head: DraftHead,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
    ) -> None:
        import deepspeed

        super().__init__(accelerator, head=head, optimizer=optimizer)
        self.stage: int = config["zero_optimization"]["stage"]
        model = WholeUnit(objective) if self.stage == 3 else objective
        self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self._zero: Any = self._engine.optimizer
        self._norm: Tensor | None = None
        self.model: Callable[..., Any] = self._engine
        if self.stage == 3:
            anchor = torch.zeros((), device=self.device, requires_grad=True)
            self.model = lambda *inputs: self._engine(anchor, inputs)

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Say whether this pack is the last of the step."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:  # noqa: ARG002  # `accumulate` has said so
        """Add the gradients of `loss`."""
        self._engine.backward(loss)

    def clip(self) -> float:
        """The norm; DeepSpeed clips by it in `step`."""
        self._norm = gradient_norm(self._zero, stage=self.stage)
        return float(self._norm)

    def step(self) -> None:
        """Clip and update, as DeepSpeed does in one."""
        assert self._norm is not None, "clip comes before step"
        self._step(self._norm)

    def drop(self) -> None:
        """A step with an infinite norm is one that DeepSpeed leaves out, cleaning up by itself."""
        self._step(torch.full((), float("inf"), device=self.device))

    def weights(self) -> dict[str, Tensor]:
        """Whole trainable tensors on the main process; collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        whole: Any = (lambda p: p) if self.stage < 3 else safe_get_full_fp32_param
        copies = {name: self.kept(whole(parameter)) for name, parameter in self.trainable().items()}
        return {name: copy for name, copy in copies.items() if copy is not None}

    def optimizer_state(self) -> dict[str, Tensor]:
        """Whole optimiser state on the main process; collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        state = self.optimizer.state.get(flat_parameters(self._zero, stage=self.stage)[0], {})
        if state:
            link_state(self._zero, stage=self.stage)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trainable().items():
            for key, value in state.items():
                # One step count serves all tensors that are updated together.
                whole: Any = value if value.dim() == 0 else safe_get_full_optimizer_state(parameter, key)
                copy = self.kept(whole)
                if copy is not None:
                    tensors[f"{name}/{key}"] = copy
        return tensors

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], optimizer_state: dict[str, Tensor] | None) -> None:
        """Take over whole weights and optimiser state; collective."""
        from deepspeed.runtime.zero import GatheredParameters

        parameters = self.trainable()
        check_weights(weights, shapes={name: whole_shape(parameter) for name, parameter in parameters.items()})
        for name, parameter in parameters.items():
            with GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3):
                parameter.copy_(weights[name])
        self._zero.refresh_fp32_params()
        if optimizer_state:
            prepare_state(self._zero, stage=self.stage, tensors=optimizer_state)
            for name, key, value in split_state(optimizer_state):
                if value.dim() > 0:
                    set_state(parameters[name], value, key=key, stage=self.stage, rank=self.rank)

    @contextmanager
    def whole_head(self) -> Iterator[DraftHead]:
        """The head itself, with its shards gathered in stage 3."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self.head.parameters()), enabled=self.stage == 3):
            yield self.head

    def _step(self, norm: Tensor) -> None:
        with known_norm(self._zero, norm, stage=self.stage):
            self._engine.step()
        self._norm = None


class WholeUnit(nn.Module):
    """Around the objective in stage 3, so that DeepSpeed gathers and releases all parameters together (a leaf module).

    A head's parameters are used without calling the submodules they belong to, which hooks of submodules would not see.
    DeepSpeed reduces a leaf's gradients once those of its inputs are there; a pack needs none, hence `anchor`: a zero
    that is added to the loss. It must be on the device of the loss, whose backward then comes to it last.
    """

    def __init__(self, objective: nn.Module) -> None:
        from deepspeed.utils import set_z3_leaf_module

        super().__init__()
        self.objective = objective
        set_z3_leaf_module(self, True)

    def forward(self, anchor: Tensor, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the objective gives for `inputs`, its loss first."""
        loss, *others = self.objective(*inputs)
        return (loss + anchor, *others)


def gradient_norm(zero: Any, *, stage: int) -> Tensor:
    """Global norm of the gradients in shards, as DeepSpeed's own step computes it; inf when one is not finite."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    return combine_grad_norm_groups(zero._get_norm_groups()) if stage == 3 else zero.scaled_global_norm()


@contextmanager
def known_norm(zero: Any, norm: Tensor, *, stage: int) -> Iterator[None]:
    """Inside, DeepSpeed's step takes `norm` instead of computing it a second time."""
    name, value = ("_get_norm_groups", [norm]) if stage == 3 else ("scaled_global_norm", norm)
    setattr(zero, name, lambda: value)
    try:
        yield
    finally:
        delattr(zero, name)


def flat_parameters(zero: Any, *, stage: int) -> list[Tensor]:
    """What the optimiser updates in this process: flat shards of many parameters each."""
    return zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of a parameter, whether or not it is in shards."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def prepare_state(zero: Any, *, stage: int, tensors: dict[str, Tensor]) -> None:
    """Make the optimiser state that its first step would make, of the kinds in `tensors`, with their step counts."""
    kinds = {key: value for _, key, value in split_state(tensors)}
    for group, flats in zip(zero.optimizer.param_groups, _by_group(zero, stage=stage), strict=True):
        on_device = group.get("fused") or group.get("capturable")
        for flat in flats:
            state = zero.optimizer.state[flat]
            for key, value in kinds.items():
                if value.dim() > 0:
                    state.setdefault(key, torch.zeros_like(flat))
                else:
                    state[key] = value.to(flat.device if on_device else "cpu", copy=True)
    link_state(zero, stage=stage)


def link_state(zero: Any, *, stage: int) -> None:
    """Let every parameter of stage 1 and 2 find its part of the optimiser's flat state.

    DeepSpeed does so by itself, but when its first group has made a step, and then for that group only.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    if stage < 3:
        for parameters, flat in zip(zero.bit16_groups, flat_parameters(zero, stage=stage), strict=True):
            lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)


def set_state(parameter: nn.Parameter, value: Tensor, *, key: str, stage: int, rank: int) -> None:
    """Put this process's shard of a whole state tensor in its place."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if stage < 3:
        safe_set_full_optimizer_state(parameter, value, key)
        return
    # The last shard is padded, which DeepSpeed's setter for whole tensors does not expect.
    size: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    shard = value.new_zeros(size)
    part = value.flatten()[rank * size : (rank + 1) * size]
    shard[: part.numel()] = part
    safe_set_local_optimizer_state(parameter, shard, key)


def _by_group(zero: Any, *, stage: int) -> list[list[Tensor]]:
    flats = flat_parameters(zero, stage=stage)
    if stage < 3:
        return [[flat] for flat in flats]
    groups: list[list[Tensor]] = [[] for _ in zero.optimizer.param_groups]
    for index, flat in enumerate(flats):
        groups[zero.sub_group_to_group_id[index]].append(flat)
    return groups
