"""What one start of one arm does: the file a worker process reads, and the file its parent compares on resume."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.eval.records import AR, CellKey, Kind, Phase, Protocol
from eyas.eval.workload import Request
from eyas.heads.files import read_json


@dataclass(frozen=True)
class CellPlan:
    """One closed-loop measurement: these prompts, `batch_size` of them running at any time until too few are left.

    Sampling is explicit: request i is sampled with seed `seed + i` when `temperature` is above 0; `top_k` 0 and `top_p` 1
    cut nothing off. With `ignore_eos` every answer has exactly `max_tokens` tokens, which no user's answer has: such a
    cell needs a `dataset` name that says so.
    """

    dataset: str
    batch_size: int
    temperature: float
    max_tokens: int
    seed: int
    requests: list[Request]
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False

    @property
    def key(self) -> CellKey:
        return CellKey(self.dataset, self.temperature, self.batch_size)


@dataclass(frozen=True)
class StartPlan:
    """One process: an engine configuration and the cells it measures, in order.

    Arms of a comparison differ in `arm`, `kind`, `start`, `round`, `phase` and `speculative_config` only.

    Attributes:
        session: id of the scoring session; records of two sessions are never compared.
        blocks: how often each cell is measured in this start.
        prefix_caching: off by default; when on, the worker empties the cache before every block.
        instrument: time the parts of each step, which slows the engine down: never in a start that is compared.
        beside: the arm whose engine is loaded at the same time (protocol "side-by-side").
        slowed_by: share of each step's time that the worker waits after it; for calibration, 0 in every real arm.
        tensor_parallel_size: GPUs that the target is split over.
        gpu_memory_utilization: share of a GPU's memory; None = vLLM's default. An engine `beside` another takes half of it.
            Not passed on CPU.
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
    session: str = "none"
    arm: str = AR
    kind: Kind = "ar"
    start: int = 0
    round: int = 0
    protocol: Protocol = "starts"
    phase: Phase = "grid"
    speculative_config: dict[str, Any] | None = None
    blocks: int = 1
    prefix_caching: bool = False
    instrument: bool = False
    beside: str | None = None
    slowed_by: float = 0.0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None

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
