"""What one start of one arm does: the file a worker process reads, and the file its parent compares on resume."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.eval.records import AR
from eyas.eval.workload import Request
from eyas.heads.files import read_json


@dataclass(frozen=True)
class CellPlan:
    """One closed-loop measurement: these prompts, `batch_size` of them running at any time until too few are left."""

    dataset: str
    batch_size: int
    temperature: float
    max_tokens: int
    seed: int
    requests: list[Request]


@dataclass(frozen=True)
class StartPlan:
    """One process: an engine configuration and the cells it measures, in order.

    Arms of a comparison differ in `arm`, `start` and `speculative_config` only.
    """

    target_dir: str
    trust_remote_code: bool
    dtype: str
    max_model_len: int
    seed: int
    enforce_eager: bool
    stop_token_ids: list[int]
    warmup: list[int]
    cells: list[CellPlan]
    arm: str = AR
    start: int = 0
    speculative_config: dict[str, Any] | None = None

    @property
    def max_num_seqs(self) -> int:
        """What the engine is told to serve at once: the largest batch size of the cells."""
        return max(cell.batch_size for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_plan(path: Path) -> StartPlan:
    """Read a plan that `StartPlan.to_json` wrote."""
    raw = read_json(path)
    cells = [
        CellPlan(**{**cell, "requests": [Request(**request) for request in cell["requests"]]}) for cell in raw["cells"]
    ]
    return StartPlan(**{**raw, "cells": cells})
