"""What of a launch is refused, and what the shipped launch files say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from eyas.heads.files import read_json
from eyas.train.parallel import start
from eyas.train.parallel.deepspeed_config import check_deepspeed

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
ZERO_FILES = sorted((RECIPES / "deepspeed").glob("*.json"))
LAUNCH_FILES = sorted((RECIPES / "accelerate").glob("*.yaml"))
ZERO2: dict[str, Any] = {"zero_optimization": {"stage": 2}}


def start_plain(**changes: Any) -> start.Processes:
    arguments: dict[str, Any] = {
        "threads": None,
        "max_grad_norm": 1.0,
        "max_grad_value": None,
        "optimizer": "adamw",
    }
    return start.start_processes(**(arguments | changes))


@pytest.mark.parametrize("path", ZERO_FILES, ids=lambda path: path.stem)
def test_shipped_deepspeed_files_leave_decisions_to_the_recipe(path: Path) -> None:
    assert check_deepspeed(read_json(path), max_grad_norm=None)["gradient_clipping"] == 0.0
    filled = check_deepspeed(read_json(path), max_grad_norm=0.7)
    assert filled["gradient_clipping"] == 0.7
    assert filled["train_micro_batch_size_per_gpu"] == filled["gradient_accumulation_steps"] == 1
    assert filled["zero_force_ds_cpu_optimizer"] is False
    assert "auto" not in str(filled)


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_shipped_launch_files_load(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.mixed_precision in (None, "no")
    named = getattr(config, "deepspeed_config", {}).get("deepspeed_config_file")
    if named is not None:
        assert (RECIPES.parent / named).is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "sets optimizer; the recipe's train section"),
        ({"scheduler": {"type": "WarmupLR"}}, "sets scheduler; the recipe's train section"),
        ({"bf16": {"enabled": True}}, "sets bf16.enabled; precision is the recipe's train.precision"),
        ({"fp16": {"enabled": True}}, "sets fp16.enabled"),
        ({"gradient_clipping": 0.5}, r"it is 0.5 and the recipe's train.max_grad_norm is 1.0: set it to \"auto\""),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu; the recipe's train.batch_tokens"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"train_batch_size": 8}, "train_batch_size"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer; it would replace"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage; it must be 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
        ),
    ],
)
def test_deepspeed_keys_of_the_recipe_are_refused(changes: dict[str, Any], message: str) -> None:
    config = ZERO2 | changes
    before = copy.deepcopy(config)
    with pytest.raises(ValueError, match=message):
        check_deepspeed(config, max_grad_norm=1.0)
    assert config == before


def test_what_agrees_with_the_recipe_is_taken() -> None:
    config = ZERO2 | {"gradient_clipping": 1.0, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    assert check_deepspeed(config, max_grad_norm=1)["gradient_clipping"] == 1.0


def test_precision_of_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match=r"mixed_precision is bf16; precision is the recipe's train\.precision"):
        start_plain()


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start_plain()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="started 2 processes and accelerate joined 1"):
        start_plain()


def test_fsdp_without_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start_plain()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="asks for FSDP, which needs GPUs, and there are none"):
        start.join_processes()


def test_a_deepspeed_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "recipes/deepspeed/zero9.json")
    with pytest.raises(ValueError, match=r"zero9\.json of the launcher does not exist, seen from /"):
        start.join_processes()


def test_deepspeed_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(start, "is_deepspeed_available", lambda: False)
    with pytest.raises(ValueError, match=r"pip install 'eyas\[deepspeed\]'"):
        start.join_processes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_grad_value": 1.0}, "train.max_grad_value does not work under FSDP: set it to null"),
        ({"optimizer": "muon"}, "train.optimizer muon does not work under FSDP: set it to adamw"),
    ],
)
def test_what_needs_whole_gradients_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start._check_whole("FSDP", **({"max_grad_value": None, "optimizer": "adamw"} | changes))
