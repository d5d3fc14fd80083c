"""Fabricated raw records of open-loop cells with known answers, and a plan whose prompts are one token each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.eval.openloop.client import Sampling, new_record
from eyas.eval.openloop.load import Patience
from eyas.eval.openloop.plan import LoadPlan
from eyas.eval.openloop.records import PLAN, SERVER, LoadCell, LoadRequest, Sample, cell_path, write_cell
from eyas.eval.records import Kind
from eyas.eval.serve_options import ServedEngine
from eyas.eval.workload import Request
from eyas.heads.files import write_json

SESSION = "this"


def plan(
    *, requests: int = 10, rates: Sequence[float] = (50.0,), silence_s: float = 29.0, request_s: float = 30.0
) -> LoadPlan:
    """Request i has the prompt [i] (from 1); the warm-up has [0]."""
    engine = ServedEngine(
        target_dir="/nowhere",
        trust_remote_code=False,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        seed=0,
        enforce_eager=True,
        prefix_caching=False,
    )
    return LoadPlan(
        session=SESSION,
        engine=engine,
        requests=[Request("heldout", f"p{number}", [number]) for number in range(1, requests + 1)],
        warmup=[[0], [0]],
        rates=list(rates),
        seed=3,
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=6, seed=0, stop_token_ids=[2]),
        max_connections=32,
        patience=Patience(request_s=request_s, silence_s=silence_s),
    )


def request(
    index: int, *, arrives: float, first: float = 1.0, finish: float = 3.0, tokens: int = 5, failure: str | None = None
) -> LoadRequest:
    """Arrives at `arrives`, is sent 0.1 s later, and has its first and last token `first` and `finish` s after arriving."""
    asked = Request("heldout", f"p{index}", [1, 2, 3, 4])
    record = new_record(index, asked, t_scheduled=arrives, t_released=arrives + 0.02)
    answer: dict[str, Any] = {
        "chunk_times": [arrives + first, arrives + finish],
        "chunk_sizes": [1, tokens - 1],
        "token_ids": list(range(tokens)),
        "finish_reason": "length",
        "completion_tokens": tokens,
        "queue_seconds": 0.5,
    }
    known = {} if failure is not None else answer
    return replace(record, t_sent=arrives + 0.1, t_finish=arrives + finish, failure=failure, **known)


def cell(
    requests: list[LoadRequest],
    *,
    arm: str = "ar",
    kind: Kind = "ar",
    start: int = 0,
    rate: float = 1.0,
    counters: dict[str, int] | None = None,
    speculative_config: dict[str, Any] | None = None,
) -> LoadCell:
    names = ("preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_hits", "num_drafts")
    zero = dict.fromkeys([*names, "num_draft_tokens", "num_accepted_tokens"], 0)
    return LoadCell(
        session=SESSION,
        fingerprint="f",
        arm=arm,
        kind=kind,
        start=start,
        rate=rate,
        dataset="heldout",
        temperature=0.0,
        max_tokens=5,
        fixed_length=False,
        max_num_seqs=4,
        max_connections=32,
        speculative_config=speculative_config,
        seconds=max(request.t_finish or 0.0 for request in requests),
        counters=zero | (counters or {}),
        accepted_per_position=[],
        samples=[Sample(0.5, 2.0, 0.0, 0.1), Sample(1.0, 4.0, 3.0, 0.3)],
        loop_lags=[0.001] * 99 + [0.5],
        load_average=0.0,
        requests=requests,
    )


def write_session(
    directory: Path, cells: Sequence[LoadCell], *, slo_ttft_ms: float = 2000.0, slo_tpot_ms: float = 600.0
) -> None:
    """An open-loop directory that holds these cells, each of a server like all others."""
    objectives = {"wanted": 10, "slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms}
    write_json(directory / PLAN, plan().to_json() | objectives | {"arms": ["ar"]})
    for each in cells:
        start = directory / f"{each.start:03d}-{each.arm}"
        write_cell(cell_path(start, rate=each.rate), each)
        write_json(start / f"{SERVER}0.json", server(each.arm, start=each.start, config=each.speculative_config))


def server(arm: str, *, start: int, config: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """The description of a server; `settings` replaces sections of its resolved engine."""
    engine = {
        "scheduler_config": {"max_num_seqs": 4, "async_scheduling": True},
        "cache_config": {"num_gpu_blocks": 1000},
    }
    return {
        "session": SESSION,
        "arm": arm,
        "kind": "ar" if arm == "ar" else "head",
        "start": start,
        "speculative_config": config,
        "command": ["serve"],
        "environment": {"OMP_NUM_THREADS": "2"},
        "settings": {"engine": engine | settings, "environment": {}, "machine": {"vllm_version": "0.32.0"}},
    }
