"""What a training step is reported by: sums of one step, and means over the steps since the last log line."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """Sums over all processes of one step; vectors have one entry a TTT step."""

    rows_K: Tensor
    kl_sums_K: Tensor
    hits_K: Tensor
    feature_sums_K: Tensor
    grad_norm: float
    learning_rate: float
    tokens: int


class Window:
    """Metrics of the steps since the last log line."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.steps: list[StepMetrics] = []
        self.num_steps = 0

    def add(self, metrics: StepMetrics, *, num_steps: int) -> None:
        """Take in one step; when the number of TTT steps changes, only the steps both have are reported."""
        self.num_steps = min(self.num_steps, num_steps) if self.steps else num_steps
        self.steps.append(metrics)

    def record(self) -> dict[str, float]:
        """Mean KL (nats a row), teacher agreement and feature distance of each TTT step; speed in tokens a second."""
        record: dict[str, float] = {
            "learning_rate": self.steps[-1].learning_rate,
            "grad_norm": sum(step.grad_norm for step in self.steps) / len(self.steps),
            "tokens_per_second": sum(step.tokens for step in self.steps) / (time.perf_counter() - self.started),
        }
        for i in range(self.num_steps):
            rows = max(1, sum(int(step.rows_K[i]) for step in self.steps))
            record[f"kl_{i + 1}"] = sum(float(step.kl_sums_K[i]) for step in self.steps) / rows
            record[f"accuracy_{i + 1}"] = sum(int(step.hits_K[i]) for step in self.steps) / rows
            distance = sum(float(step.feature_sums_K[i]) for step in self.steps) / rows
            if distance > 0.0:
                record[f"smooth_l1_{i + 1}"] = distance
        return record
