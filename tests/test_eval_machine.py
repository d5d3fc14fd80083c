"""What is written down about a machine and about the configuration that an engine resolved."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.eval.configs import MACHINE
from eyas.eval.machine import describe_machine, gpu_limits
from eyas.eval.resolved import plain, resolved_engine


class Mode(enum.Enum):
    FULL = (2, 1)


@dataclass
class Inner:
    backend: str = "auto"
    modes: list[Mode] = field(default_factory=lambda: [Mode.FULL])


class Quantisation:
    """Like vLLM's: an object that is no dataclass, at another address in every process."""

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "SOME_ATTN")


@dataclass
class Part:
    inner: Inner = field(default_factory=Inner)
    dtype: torch.dtype = torch.bfloat16
    limit: float = float("inf")
    sizes: set[int] = field(default_factory=lambda: {8, 4})
    options: dict[Any, Any] = field(default_factory=lambda: {2: None, "b": Inner()})
    override: Any = describe_machine
    quantisation: Quantisation = field(default_factory=Quantisation)
    hf_token: str = "secret"
    instance_id: str = "12345"
    static_forward_context: dict[str, Any] = field(default_factory=lambda: {"layer": Quantisation()})


PLAIN_INNER = {"backend": "auto", "modes": ["FULL"]}


def test_a_configuration_is_written_down_to_its_last_field_without_secrets_and_addresses() -> None:
    written = plain(Part())
    assert written == {
        "inner": PLAIN_INNER,
        "dtype": "torch.bfloat16",
        "limit": "inf",
        "sizes": [4, 8],
        "options": {"2": None, "b": PLAIN_INNER},
        "override": "eyas.eval.machine.describe_machine",
        "quantisation": f"{__name__}.Quantisation",
    }
    json.dumps(written, allow_nan=False)
    assert written == plain(Part()), "two engines of the same settings"


def test_every_part_of_an_engine_is_there_whatever_its_name() -> None:
    @dataclass
    class Config:
        compilation_config: Part = field(default_factory=Part)
        a_part_of_the_future: Inner = field(default_factory=Inner)
        additional_config: dict[str, Any] = field(default_factory=lambda: {"mine": 1})

    engine = resolved_engine(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=Config())))
    assert engine["a_part_of_the_future"] == PLAIN_INNER
    assert engine["additional_config"] == {"mine": 1}
    assert engine["attention_backends"] == ["SOME_ATTN"]
    assert engine["model_runner_v2"] is False


def fake_nvidia_smi(directory: Path, script: str) -> str:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_driver_clocks_and_power_of_each_gpu(tmp_path: Path) -> None:
    told = "580.65.06, 1980 MHz, 2619 MHz, 700.00 W, 143771 MiB"
    smi = fake_nvidia_smi(tmp_path, f'test "$2" = "--format=csv,noheader" && echo "{told}" && echo "{told}"')
    one = {
        "driver_version": "580.65.06",
        "clocks.max.sm": "1980 MHz",
        "clocks.max.memory": "2619 MHz",
        "power.limit": "700.00 W",
        "memory.total": "143771 MiB",
    }
    assert gpu_limits(smi) == [one, one]


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "true"])
def test_a_machine_that_does_not_tell_is_no_error(tmp_path: Path, script: str) -> None:
    assert gpu_limits(fake_nvidia_smi(tmp_path, script)) is None
    assert gpu_limits(str(tmp_path / "missing")) is None


def test_a_machine_is_described_by_what_must_be_equal_and_not_by_its_name() -> None:
    machine = describe_machine(load_before=(1.0, 2.0, 3.0))
    assert machine.keys() >= set(MACHINE)
    assert machine["memory_gib"] is None or machine["memory_gib"] > 0
    assert machine["load_average_before"] == [1.0, 2.0, 3.0]
    assert not {"host", "hostname", "node"} & machine.keys()
