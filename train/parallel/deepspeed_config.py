"""The DeepSpeed configuration of a run: what the recipe decides must not be decided there again."""

from __future__ import annotations

import copy
from typing import Any

_WHOSE = {
    "optimizer": "the recipe's train section makes the optimizer",
    "scheduler": "the recipe's train section has the schedule",
}
_PRECISIONS = ("bf16", "bfloat16", "fp16", "amp", "torch_autocast")
_ONE = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_deepspeed(config: dict[str, Any], *, max_grad_norm: float | None) -> dict[str, Any]:
    """A copy of `config` with every "auto" filled in.

    Args:
        max_grad_norm: of the recipe; None does not clip.

    Raises:
        ValueError: a key that the recipe decides, or one that a head cannot be trained with; names it and the mend.
    """
    filled = copy.deepcopy(config)
    for key, reason in _WHOSE.items():
        if key in filled:
            raise _conflict(key, f"{reason}: remove it")
    for key in _PRECISIONS:
        section = filled.pop(key, None) or {}
        if section.get("enabled") is True:
            raise _conflict(f"{key}.enabled", "precision is the recipe's train.precision: set it to false")
    _fill_batch(filled)
    _fill_clipping(filled, max_grad_norm=max_grad_norm)
    _fill_zero(filled)
    return filled


def _fill_batch(config: dict[str, Any]) -> None:
    """One pack is one micro-batch; the loop decides how many make a step."""
    for key in (*_ONE, "train_batch_size"):
        if config.get(key, "auto") not in ("auto", 1):
            raise _conflict(key, 'the recipe\'s train.batch_tokens and train.pack_tokens decide: set it to "auto"')
    config |= dict.fromkeys(_ONE, 1)
    config.setdefault("steps_per_print", None)  # the run has its own log
    config.pop("train_batch_size", None)  # the two and the number of processes give it


def _fill_clipping(config: dict[str, Any], *, max_grad_norm: float | None) -> None:
    asked, recipe = config.get("gradient_clipping", "auto"), max_grad_norm or 0.0
    if asked != "auto" and float(asked) != recipe:
        raise _conflict(
            "gradient_clipping",
            f'it is {asked} and the recipe\'s train.max_grad_norm is {max_grad_norm}: set it to "auto"',
        )
    config["gradient_clipping"] = recipe


def _fill_zero(config: dict[str, Any]) -> None:
    zero = config.get("zero_optimization", {})
    if zero.get("stage") not in (1, 2, 3):
        raise _conflict("zero_optimization.stage", "it must be 1, 2 or 3; for plain DDP launch without DeepSpeed")
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device", "none") not in ("none", "cpu"):
            raise _conflict(f"zero_optimization.{key}.device", 'heads are small enough for memory: set it to "cpu"')
    if config.get("zero_force_ds_cpu_optimizer") is True:
        raise _conflict(
            "zero_force_ds_cpu_optimizer", "it would replace the recipe's optimizer by another one: set it to false"
        )
    config["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    # DeepSpeed's own linear layer for stage 3 replaces torch's in the whole process.
    config["zero_optimization"].setdefault("memory_efficient_linear", False)
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def _conflict(key: str, mend: str) -> ValueError:
    return ValueError(f"the DeepSpeed configuration sets {key}; {mend}")
