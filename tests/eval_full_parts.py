"""The parts of a made-up session beside the grid: the losslessness ladder, instrumented starts, the open loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eyas.eval.lossless.cases import (
    DRAFT_LENGTH,
    MODEL_SEED,
    VOCABULARY,
    Case,
    Counts,
    reference_cases,
    run_reference,
)
from eyas.eval.lossless.laws import make_model
from eyas.eval.lossless.sampled import sample_id
from eyas.eval.lossless.stored import (
    LADDER,
    LOGITS,
    OFFLINE,
    SAMPLER,
    answers_fingerprint,
    read_ladder_starts,
    served_cells,
)
from eyas.eval.openloop.records import FailedCell, LoadCell, LoadRequest, Sample, cell_path, failure_path, write_cell
from eyas.eval.records import CellRecord, Kind, RequestRecord
from eyas.eval.timing.clock import ORDER
from eyas.heads.files import write_json
from tests import openloop_records
from tests.eval_records import SESSION, head_config, request, write_start

Configs = Mapping[str, tuple[Kind, int, dict[str, Any] | None]]
ROUNDS = 4000
LADDER_ARMS = {"k5": ["k5", "k3", "k1"], "ngram": ["ngram"]}
ANSWER = [(7 * index) % 50 for index in range(48)]
RATES = (0.5, 1.0, 2.0, 4.0)
SLO = {"slo_ttft_ms": 500.0, "slo_tpot_ms": 60.0}


def write_lossless(directory: Path, *, generator: np.random.Generator) -> None:
    """L0 by the reference samplers; L1 with one tie, L2 identical, L3 and L4 from one distribution."""
    served = {"ar": 0, "null": 0, "k5": 5, "ngram": 3}
    for number, (name, length) in enumerate(served.items()):
        cells = [_greedy("L1", 16, batch_size=8 if name == "null" else 16, tie=name == "k5")]
        cells += [] if name == "null" else [_greedy("L2", 8, batch_size=1, tie=False)]
        cells += [_sampled(generator, drafting=length > 0), _lengths(generator, drafting=length > 0)]
        arm = "ar" if name == "null" else name
        kind: Kind = "ar" if arm == "ar" else "other" if arm == "ngram" else "head"
        write_start(directory / "starts", number, arm, cells, draft_length=length, kind=kind)
    ladder = {
        "arms": LADDER_ARMS,
        "dtype": "float32",
        "temperature": 1.0,
        "max_tokens": 48,
        "top_p": 1.0,
        "top_k": 0,
        "positions": 7,
        "samples": 600,
    }
    of_session = {"session": SESSION}
    write_json(directory / LADDER, of_session | ladder)
    write_json(directory / SAMPLER, of_session | _sampler_counts())
    fact = {"prompt_id": "p3", "index": 20, "gaps": [0.0] * 48, "best": 17.0, "plain_gap": 0.0, "plain": ANSWER[20]}
    fact["gaps"][20] = 4e-5
    answers = answers_fingerprint(served_cells(read_ladder_starts(directory, session=SESSION)))
    facts = {"L1": {"k5": [fact], "ngram": [], "null": []}, "L2": {}}
    write_json(directory / LOGITS, of_session | {"answers": answers} | facts)
    offline = {
        "arm": "k5",
        "dtype": "float32",
        "draft_length": 5,
        "accepted": {f"p{index}": [2, 1, 0, 3] for index in range(16)},
    }
    write_json(directory / OFFLINE, of_session | offline)


def _greedy(level: str, count: int, *, batch_size: int, tie: bool) -> CellRecord:
    answers = [list(ANSWER) for _ in range(count)]
    if tie:
        answers[3][20] = 49
    requests = [request(f"p{index}", token_ids=tokens, accepted=[2, 1, 0, 3]) for index, tokens in enumerate(answers)]
    return _cell(level, 0.0, requests, batch_size=batch_size)


def _sampled(generator: np.random.Generator, *, drafting: bool) -> CellRecord:
    requests = [
        request(
            sample_id(f"p{prompt}", number),
            token_ids=generator.choice(6, 7, p=[0.4, 0.3, 0.15, 0.1, 0.03, 0.02]).tolist(),
            accepted=[1, 2, 0] if drafting else None,
        )
        for prompt in range(2)
        for number in range(300)
    ]
    return _cell("L3", 1.0, requests, batch_size=16)


def _lengths(generator: np.random.Generator, *, drafting: bool) -> CellRecord:
    requests = []
    for index in range(16):
        for number in range(4):
            length = int(min(48, generator.geometric(0.03)))
            reason = "length" if length == 48 else "stop"
            tokens = list(range(length))
            accepted = [0] * length if drafting else None
            name = sample_id(f"p{index}", number)
            requests.append(request(name, token_ids=tokens, accepted=accepted, finish_reason=reason))
    return _cell("L4", 1.0, requests, batch_size=16)


def _cell(level: str, temperature: float, requests: list[RequestRecord], *, batch_size: int) -> CellRecord:
    counters = {"preemptions": 0, "num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    return CellRecord(
        dataset=level,
        batch_size=batch_size,
        temperature=temperature,
        max_tokens=48,
        block=0,
        makespan=2.2,
        mean_running=1.0,
        counters=counters,
        requests=requests,
        steps=[],
        harness_seconds=0.0,
    )


def _sampler_counts() -> dict[str, Any]:
    model = make_model(vocabulary=VOCABULARY, draft_length=DRAFT_LENGTH, seed=MODEL_SEED)
    counted = [run_reference(model, case, rounds=ROUNDS, seed=seed) for seed, case in enumerate(reference_cases())]
    greedy = Counts(Case("all rows greedy", "vllm", "one-hot", greedy="all"), ROUNDS, [], [], greedy_rows=ROUNDS)
    return {
        "rounds": ROUNDS,
        "exercised": {"class": "made up"},
        "mends": [],
        "model": {"target": model.target.tolist(), "draft": model.draft.tolist()},
        "as_installed": [],
        "cases": [each.to_json() for each in [greedy, *counted]],
    }


def write_instrumented(
    directory: Path, *, sizes: tuple[int, ...], step_seconds: Callable[[int, int], float], configs: Configs
) -> None:
    """One instrumented start of every arm."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, (arm, (kind, length, config)) in enumerate(configs.items()):
        stem = directory / f"{number:03d}-{arm}"
        lines = [_timed_block(size, length, seconds=step_seconds(size, length)) for size in sizes]
        stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        description = {"session": SESSION, "arm": arm, "kind": kind, "speculative_config": config}
        write_json(stem.with_suffix(".json"), description)


def _timed_block(size: int, length: int, *, seconds: float) -> dict[str, Any]:
    """Every second pair of steps is timed, which makes it 0.4 % slower."""
    draft = 0.0022 * length + 0.0002 * size * length
    parts = {"draft": draft, "sample": 0.0006, "schedule": 0.0004, "runner": 0.0012}
    parts["verify"] = seconds - sum(parts.values()) - 0.001
    timed = {
        "decode": True,
        "running": size,
        "seconds": seconds,
        "parts": parts,
        "rest": 0.001,
        "drafted": length * size,
    }
    steps = [[(1.004 if clocked else 1.0) * seconds, size, size, 0] for clocked in ORDER * 20]
    report = {
        "clock": "perf_counter",
        "steps": [timed] * (20 * sum(ORDER)),
        "calls": {"forward": 40},
        "call_cost": 1e-6,
    }
    place = {"kind": "cell", "dataset": "heldout", "temperature": 0.0, "batch_size": size, "num_requests": size}
    return place | {"steps": steps, "timing": {"version": "0.32.0", "report": report}}


def write_open_loop(directory: Path, *, generator: np.random.Generator) -> None:
    """Three arms at four rates; the schedule has the lowest latency, and k=5 loses its highest rate."""
    speeds: dict[str, tuple[Kind, float, dict[str, Any] | None]] = {
        "ar": ("ar", 1.0, None),
        "k5": ("head", 0.8, head_config(5)),
        "k1": ("head", 1.15, head_config(1)),
    }
    plan = {"requests": [{"dataset": "heldout"}], "sampling": {"temperature": 0.0}, "rates": list(RATES), **SLO}
    write_json(directory / "plan.json", plan | {"session": SESSION, "wanted": 120})
    for start, (arm, (kind, speed, config)) in enumerate([*speeds.items(), *reversed(speeds.items())]):
        folder = directory / f"{start:03d}-{arm}"
        folder.mkdir(parents=True, exist_ok=True)
        server = openloop_records.server(arm, start=start, config=config)
        write_json(folder / "server-0.json", server | {"session": SESSION})
        for rate in RATES:
            path = cell_path(folder, rate=rate)
            if arm == "k5" and rate == RATES[-1] and start == 1:
                lost = FailedCell(SESSION, arm, kind, start, rate, "the server stopped answering", ["Engine core died"])
                write_json(failure_path(path), vars(lost))
                continue
            write_cell(path, _load_cell(arm, kind, start, rate, speed=speed, config=config, generator=generator))


def _load_cell(
    arm: str,
    kind: Kind,
    start: int,
    rate: float,
    *,
    speed: float,
    config: dict[str, Any] | None,
    generator: np.random.Generator,
) -> LoadCell:
    arrivals = np.cumsum(generator.exponential(1 / rate, 40))
    busy = min(0.97, rate / (3.2 * speed))
    requests = []
    for index, begin in enumerate(arrivals.tolist()):
        tpot = 0.03 / speed / (1 - busy) * float(np.exp(generator.normal(0, 0.1)))
        first = begin + 0.08 / (1 - busy)
        times = [first + tpot * token for token in range(40)]
        requests.append(_load_request(index, begin, times, drafts=config is not None))
    seconds = max(each.t_finish or 0.0 for each in requests)
    names = ("preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_hits")
    counters: dict[str, int] = dict.fromkeys((*names, "num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
    if config is not None:
        length = config["num_speculative_tokens"]
        counters |= {"num_drafts": 800, "num_draft_tokens": 800 * length, "num_accepted_tokens": 800}
    counters["generation_tokens"] = 40 * len(requests)
    samples = [Sample(float(t), 4 * busy * 4, float(busy > 0.9) * 3, 0.2) for t in np.arange(0, seconds, 1.0)]
    return LoadCell(
        session=SESSION,
        fingerprint="made up",
        arm=arm,
        kind=kind,
        start=start,
        rate=rate,
        dataset="heldout",
        temperature=0.0,
        max_tokens=64,
        fixed_length=False,
        max_num_seqs=32,
        max_connections=64,
        speculative_config=config,
        seconds=seconds,
        counters=counters,
        accepted_per_position=[] if config is None else [500, 300, 0, 0, 0][: config["num_speculative_tokens"]],
        samples=samples,
        loop_lags=[0.0005] * 100,
        load_average=0.5,
        requests=requests,
    )


def _load_request(index: int, begin: float, times: list[float], *, drafts: bool) -> LoadRequest:
    return LoadRequest(
        index=index,
        prompt_id=f"p{index}",
        conversation=None,
        n_in=30,
        t_scheduled=begin,
        t_released=begin + 0.0002,
        t_sent=begin + 0.0003,
        t_finish=times[-1],
        chunk_times=times,
        chunk_sizes=[1] * len(times),
        token_ids=list(range(len(times))),
        finish_reason="length",
        completion_tokens=len(times),
        queue_seconds=0.001,
        steps=20 if drafts else None,
        drafted=60 if drafts else None,
        accepted=20 if drafts else None,
        failure=None,
    )
