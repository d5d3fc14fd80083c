"""The end of a training in several processes: in which order models and process group go."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eyas.train.parallel.plain import PlainEngine


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class OneProcess:
    """An accelerator of one process that wraps in DDP all the same, and keeps what it wrapped as accelerate does."""

    process_index, num_processes, is_main_process, device = 0, 1, True, torch.device("cpu")

    def __init__(self, model: nn.Module) -> None:
        self.models = [DistributedDataParallel(model)]
        self.reducer = weakref.ref(self.models[0].reducer)
        self.alive_at_the_end: bool | None = None

    def wait_for_everyone(self) -> None:
        dist.barrier()

    def free_memory(self) -> None:
        self.models.clear()

    def end_training(self) -> None:
        self.alive_at_the_end = self.reducer() is not None
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_the_reducer_goes_before_the_process_group() -> None:
    """Seen once in about 40 launches of two processes: `~Reducer` joined gloo's thread, which waited for Python's lock."""
    head = nn.Linear(3, 2)
    accelerator: Any = OneProcess(head)
    engine = PlainEngine(
        accelerator,
        model=accelerator.models[0],
        head=head,  # type: ignore[arg-type]
        optimizer=torch.optim.SGD(head.parameters(), lr=0.1),
        max_grad_norm=None,
        max_grad_value=None,
    )
    engine.backward(engine.model(torch.ones(1, 3)).sum(), last=True)
    engine.step()
    engine.end()
    assert accelerator.alive_at_the_end is False
    assert not dist.is_initialized()
