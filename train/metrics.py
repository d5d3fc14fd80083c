"""What the training log says: means over the steps since the last log line, and throughput.

Sums stay on the device; processes add them up, and the host waits for the device, once a logged window.

Shapes: K training-time-test steps.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.train.peak import Peak

SUM_NAMES = {"kl": "kl", "hits": "accuracy", "acceptance": "acceptance", "feature": "smooth_l1"}
"""Sums over rows that the objective gives, and the metrics that their means are."""


class Progress(Protocol):
    """Where a run stands, over all of its starts."""

    step: int
    skipped: int
    tokens: int
    slots: int


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step. The same on every process but for `loss`, `sums_K` and `flops`, which are this process's share.

    Attributes:
        loss: its mean over processes is the loss of the global batch; None where this process trained on nothing.
        rows_K: trained rows of the global batch at each TTT step. tokens: of the global batch.
        skipped: the weights stayed as they were, and loss and sums, which may not be finite, do not count.
    """

    loss: Tensor | None
    sums_K: dict[str, Tensor]
    flops: float
    rows_K: Sequence[int]
    tokens: int
    grad_norm: float
    learning_rate: float
    skipped: bool


class Window:
    """The steps since the last log line. Each step is some packs (`add_pack`), then `add_step`."""

    def __init__(self, *, device: torch.device, rank: int = 0, world_size: int = 1, peak: Peak | None = None) -> None:
        self.device, self.rank, self.world_size, self.peak = device, rank, world_size, peak
        self.losses: list[float] = []
        """Of each step of the window that was recorded last; NaN where it was skipped."""
        self._begin()

    def add_pack(self, loss: Tensor, sums_K: Mapping[str, Tensor], *, flops: float) -> None:
        """Take in one pack of this process: its detached loss, sums over rows, and floating-point operations."""
        self._loss = loss if self._loss is None else self._loss + loss
        for name, sum_K in sums_K.items():
            earlier_K = self._sums_K.get(name)
            self._sums_K[name] = sum_K if earlier_K is None else earlier_K + sum_K
        self._flops += flops

    def add_step(
        self, *, rows_K: Sequence[int], tokens: int, grad_norm: float, learning_rate: float, skipped: bool = False
    ) -> None:
        """End a step; see `StepMetrics`."""
        self._steps.append(
            StepMetrics(
                loss=self._loss,
                sums_K=self._sums_K,
                flops=self._flops,
                rows_K=rows_K,
                tokens=tokens,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                skipped=skipped,
            )
        )
        self._begin_step()

    @property
    def num_steps(self) -> int:
        """Steps since the last record."""
        return len(self._steps)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training, such as an evaluation: throughput leaves it out."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._idle += time.perf_counter() - started

    def record(self, add_up: Callable[[Tensor], Tensor], *, state: Progress, epoch: float) -> dict[str, float]:
        """Metrics of the window over all processes; the next window begins. Collective.

        `kl_i` in nats a row, `accuracy_i` (the head's likeliest token is the target's) and `acceptance_i` (sum of
        min(p, q)) are means over the rows of TTT step i, over the steps that had it. `tau_product` is 1 + the sum over i
        of the product of accuracies up to i: an estimate from marginals, other than the held-out prefix-joint tau.
        Throughput is a second of training, over all processes; `slots` counts the rows of every TTT step;
        `memory_bytes` is the peak of the process that used most. What has no finite steps to be a mean of is NaN.
        """
        assert self._steps, "a record of no step"
        counted = [step for step in self._steps if not step.skipped]
        losses, flops, memory, sums_K = self._totals(counted, add_up=add_up)
        self.losses = [float("nan") if step.skipped else losses.pop(0) / self.world_size for step in self._steps]
        loss = sum(value for value in self.losses if not math.isnan(value))
        seconds = max(time.perf_counter() - self._started - self._idle, 1e-9)
        record: dict[str, float] = {
            "step": state.step,
            "cursor": state.step,
            "epoch": round(epoch, 4),
            "learning_rate": self._steps[-1].learning_rate,
            "grad_norm": _mean([step.grad_norm for step in counted]),
            "loss": loss / len(counted) if counted else float("nan"),
            **_row_means(sums_K, rows_K=_rows(counted)),
            "tokens": state.tokens,
            "slots": state.slots,
            "tokens_per_second": sum(step.tokens for step in self._steps) / seconds,
            "slots_per_second": sum(sum(step.rows_K) for step in self._steps) / seconds,
            "flops_per_second": flops / seconds,
            "memory_bytes": memory,
            "skipped": state.skipped,
        }
        if self.peak is not None:
            record[self.peak.metric] = record["flops_per_second"] / (self.peak.flops * self.world_size)
        self._begin()
        return record

    def _totals(
        self, counted: list[StepMetrics], *, add_up: Callable[[Tensor], Tensor]
    ) -> tuple[list[float], float, int, dict[str, list[float]]]:
        """Loss of each step, operations, memory and row sums over all processes: one vector, one exchange.

        Its layout is the same everywhere: a process may have trained on nothing and have no sums.
        """
        width = max((len(step.rows_K) for step in counted), default=0)
        # MPS has no float64, which alone counts operations to the last one.
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        sums = torch.zeros(len(SUM_NAMES), width, dtype=dtype, device=self.device)
        losses = torch.zeros(len(counted), dtype=dtype, device=self.device)
        for number, step in enumerate(counted):
            if step.loss is not None:
                losses[number] = step.loss
            for place, name in enumerate(SUM_NAMES):
                if name in step.sums_K:
                    sums[place, : len(step.rows_K)] += step.sums_K[name]
        memory = [0.0] * self.world_size
        memory[self.rank] = float(peak_memory(self.device))
        numbers = [sum(step.flops for step in self._steps), *memory]
        vector = torch.cat([losses, torch.tensor(numbers, dtype=dtype, device=self.device), sums.flatten()])
        values = add_up(vector).tolist()
        totals, (flops, *rest) = values[: len(counted)], values[len(counted) :]
        memory, flat = rest[: self.world_size], rest[self.world_size :]
        sums_K = {name: flat[place * width :][:width] for place, name in enumerate(SUM_NAMES)}
        return totals, flops, int(max(memory)), sums_K

    def begin(self) -> None:
        """Forget what came before the first step: throughput is counted from here."""
        self._begin()

    def _begin(self) -> None:
        self._steps: list[StepMetrics] = []
        self._begin_step()
        self._idle = 0.0
        self._started = time.perf_counter()

    def _begin_step(self) -> None:
        self._loss: Tensor | None = None
        self._sums_K: dict[str, Tensor] = {}
        self._flops = 0.0


def peak_memory(device: torch.device) -> int:
    """Bytes this process has used at most: of the GPU's memory by tensors, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _rows(steps: list[StepMetrics]) -> list[int]:
    """Rows of each TTT step, over the steps that had it."""
    width = max((len(step.rows_K) for step in steps), default=0)
    return [sum(step.rows_K[i] for step in steps if i < len(step.rows_K)) for i in range(width)]


def _row_means(sums_K: dict[str, list[float]], *, rows_K: list[int]) -> dict[str, float]:
    means: dict[str, float] = {}
    for name, metric in SUM_NAMES.items():
        if name == "feature" and not any(sums_K[name]):
            continue  # no feature loss
        for i, rows in enumerate(rows_K):
            means[f"{metric}_{i + 1}"] = sums_K[name][i] / max(rows, 1)
    product, tau = 1.0, 1.0
    for i in range(len(rows_K)):
        product *= means[f"accuracy_{i + 1}"]
        tau += product
    return means | {"tau_product": tau} if rows_K else means


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
