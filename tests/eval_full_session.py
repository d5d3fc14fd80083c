"""A made-up scoring session in which everything was measured, as raw records: what a report of a whole session is tested on.

Step times follow a cost model with known constants and starts that scatter by 2 %, so that speculative decoding pays at small
batches and costs at large ones, as on a real machine. Nothing here is a measurement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eyas.eval.cost.schedule import Schedule, choose_schedule
from eyas.eval.cost.serving import write_schedule
from eyas.eval.records import CellRecord, Kind, RequestRecord, StepRecord, arms_of, cells_by_arm, read_starts
from eyas.eval.serve_options import ServedEngine
from eyas.heads.files import write_json
from tests.eval_full_parts import write_instrumented, write_lossless, write_open_loop
from tests.eval_records import HARNESS_SHARE, SESSION, head_config, protocol_of, write_start

SIZES = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 1.0)
STARTS = 3
TOKENS = 33
PROMPT_SECONDS = 0.004
START_SD = 0.02
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
GRID: dict[str, tuple[Kind, int, dict[str, Any] | None]] = {
    "ar": ("ar", 0, None),
    "k5": ("head", 5, head_config(5)),
    "k3": ("head", 3, head_config(3)),
    "k1": ("head", 1, head_config(1)),
    "ngram": ("other", 3, NGRAM),
}
SCHEDULED = ("ar", "k3", "k1", "schedule")
RATES_OF_ACCEPTANCE = {("heldout", 0.0): 0.6, ("heldout", 1.0): 0.5, ("humaneval", 0.0): 0.35, ("humaneval", 1.0): 0.3}


def step_seconds(running: int, draft_length: int) -> float:
    """Seconds of a decode step: linear in tokens and in drafted positions."""
    return 0.026 + 0.0022 * running * (draft_length + 1) + 0.0008 * running + 0.0022 * draft_length


def prompts_of(batch_size: int) -> int:
    """Prompts of a cell: whole batches, 12 prompts at least."""
    return -(-12 // batch_size) * batch_size


def write_full_session(score_dir: Path, *, seed: int = 0, name: str = "a made-up session") -> None:
    """A whole score directory: grid, schedule phase, ladder, instrumented starts, open loop."""
    generator = np.random.default_rng(seed)
    arms = list(GRID)
    order = [arm for turn in range(STARTS) for arm in (arms if turn % 2 == 0 else arms[::-1])]
    for number, arm in enumerate(order):
        kind, length, config = GRID[arm]
        cells = _cells(arm, length, generator=generator)
        place = {"draft_length": length, "kind": kind, "round": number // len(arms), "speculative_config": config}
        write_start(score_dir / "starts", number, arm, cells, **place)
    schedule = _write_schedule(score_dir)
    _write_schedule_phase(score_dir, schedule, generator=generator)
    write_json(score_dir / "context.json", _context(name))
    write_json(score_dir / "protocol.json", _protocol(order))
    write_lossless(score_dir / "lossless", generator=np.random.default_rng(1))
    write_instrumented(score_dir / "instrument", sizes=SIZES, step_seconds=step_seconds, configs=GRID)
    write_open_loop(score_dir / "open_loop", generator=generator)


def _cells(
    arm: str, draft_length: int, *, generator: np.random.Generator, schedule: Schedule | None = None
) -> list[CellRecord]:
    """All cells of one start, at this start's own speed."""
    speed = float(np.exp(generator.normal(0, START_SD)))
    plans = [("heldout", temperature, size) for temperature in TEMPERATURES for size in SIZES]
    plans += [("humaneval", temperature, 8) for temperature in TEMPERATURES]
    cells = []
    for dataset, temperature, size in plans:
        rate = RATES_OF_ACCEPTANCE[dataset, temperature] * (0.5 if arm == "ngram" else 1.0)
        k = draft_length if schedule is None else schedule.draft_length_at(size)
        block = _block(size, k, rate=rate, speed=speed, drafting=arm != "ar", generator=generator)
        cells.append(_record(block, dataset=dataset, temperature=temperature, batch_size=size, k=k))
    return cells


def _block(
    batch_size: int, k: int, *, rate: float, speed: float, drafting: bool, generator: np.random.Generator
) -> tuple[list[RequestRecord], list[StepRecord], float]:
    """Waves of `batch_size` requests that begin together and thin out as their answers end."""
    count = prompts_of(batch_size)
    served: list[RequestRecord] = []
    steps: list[StepRecord] = []
    now = 0.0
    while len(served) < count:
        size = min(batch_size, count - len(served))
        traces = [_trace(k, rate=rate, generator=generator) for _ in range(size)]
        prefill = speed * (0.03 + PROMPT_SECONDS * size)
        begin, now = now, now + prefill
        steps.append(StepRecord(prefill, size, size, size))
        times: list[list[float]] = [[now] for _ in traces]
        for number in range(max(map(len, traces))):
            active = [index for index, trace in enumerate(traces) if number < len(trace)]
            seconds = speed * step_seconds(len(active), k) * float(np.exp(generator.normal(0, 0.01)))
            now += seconds
            steps.append(StepRecord(seconds, len(active), sum(traces[index][number][1] for index in active), 0))
            for index in active:
                times[index].append(now)
        for trace, moments in zip(traces, times, strict=True):
            served.append(
                _request(len(served), trace, moments, begin=begin, k=k, drafting=drafting, generator=generator)
            )
    return served, steps, now


def _trace(k: int, *, rate: float, generator: np.random.Generator) -> list[tuple[int, int]]:
    """(accepted, tokens given out) of each step of one answer; the last step may be cut at the answer's end."""
    left, trace = TOKENS - 1, []
    own = min(0.95, rate * float(np.exp(generator.normal(0, 0.15))))
    while left > 0:
        accepted = 0
        while accepted < k and generator.random() < own:
            accepted += 1
        given = min(accepted + 1, left)
        trace.append((accepted, given))
        left -= given
    return trace


def _request(
    index: int,
    trace: list[tuple[int, int]],
    moments: list[float],
    *,
    begin: float,
    k: int,
    drafting: bool,
    generator: np.random.Generator,
) -> RequestRecord:
    return RequestRecord(
        prompt_id=f"p{index}",
        n_in=20 + index,
        n_out=TOKENS,
        t_submit=begin,
        t_first=moments[0],
        t_finish=moments[-1],
        chunk_times=moments,
        chunk_sizes=[1, *(given for _, given in trace)],
        token_ids=generator.integers(0, 1000, TOKENS).tolist(),
        finish_reason="stop" if index % 3 else "length",
        per_step_accepted=[accepted for accepted, _ in trace] if drafting and k else ([] if drafting else None),
        per_step_drafted=[k] * len(trace) if drafting and k else ([] if drafting else None),
    )


def _record(
    block: tuple[list[RequestRecord], list[StepRecord], float],
    *,
    dataset: str,
    temperature: float,
    batch_size: int,
    k: int,
) -> CellRecord:
    requests, steps, seconds = block
    accepted = [count for request in requests for count in request.per_step_accepted or []]
    counters = {
        "preemptions": 0,
        "held_back_steps": 0,
        "num_drafts": len(accepted),
        "num_draft_tokens": k * len(accepted),
        "num_accepted_tokens": sum(accepted),
    }
    makespan = seconds * (1 + HARNESS_SHARE)
    return CellRecord(
        dataset=dataset,
        batch_size=batch_size,
        temperature=temperature,
        max_tokens=TOKENS,
        block=0,
        makespan=makespan,
        mean_running=sum(request.t_finish - request.t_submit for request in requests) / makespan,
        counters=counters,
        requests=requests,
        steps=steps,
        harness_seconds=makespan * HARNESS_SHARE,
    )


def _write_schedule(score_dir: Path) -> Schedule:
    starts = read_starts(score_dir / "starts")
    schedule = choose_schedule(cells_by_arm(starts), arms_of(starts), max_num_seqs=SIZES[-1])
    engine = ServedEngine(
        target_dir="a-target",
        trust_remote_code=False,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=SIZES[-1],
        seed=0,
        enforce_eager=True,
        prefix_caching=False,
    )
    write_schedule(score_dir, schedule, base=head_config(3), engine=engine, environment={}, on_cpu=False)
    return schedule


def _write_schedule_phase(score_dir: Path, schedule: Schedule, *, generator: np.random.Generator) -> None:
    """Fresh starts of AR, of the schedule and of arms it is made of, after the grid."""
    config = schedule.speculative_config(head_config(3))
    order = [arm for turn in range(STARTS) for arm in (SCHEDULED if turn % 2 == 0 else SCHEDULED[::-1])]
    for number, arm in enumerate(order, start=500):
        kind, length, own = ("schedule", config["num_speculative_tokens"], config) if arm == "schedule" else GRID[arm]
        cells = _cells(arm, length, generator=generator, schedule=schedule if arm == "schedule" else None)
        place = {"draft_length": length, "kind": kind, "round": (number - 500) // len(SCHEDULED)}
        write_start(
            score_dir / "starts", number, arm, cells, phase="schedule", speculative_config=own, session=SESSION, **place
        )


def _context(name: str) -> dict[str, Any]:
    metrics: list[dict[str, float]] = [{"step": step, "kl_1": 3 / (1 + step / 50)} for step in range(0, 200, 10)]
    metrics += [{"step": step, "heldout/tau": 1.2 + step / 300} for step in range(0, 200, 50)]
    heldout = {
        "chain_length": 5,
        "heldout_tau": 2.31,
        "heldout_marginal": [0.57, 0.34, 0.2, 0.12, 0.08],
        "estimator": "step-weighted",
    }
    return {
        "name": name,
        "head": "runs/made-up/export",
        "target": {"directory": "models/a-target", "fingerprint": "ab" * 32},
        "recipe": {"train": {"ttt_steps": 3, "learning_rate": 0.0015}, "head": {"kind": "eagle3"}},
        "training": {"metrics": metrics, "heldout": heldout},
    }


def _protocol(order: list[str]) -> dict[str, Any]:
    plans = [("heldout", temperature, size) for temperature in TEMPERATURES for size in SIZES]
    plans += [("humaneval", temperature, 8) for temperature in TEMPERATURES]
    requests = [
        {
            "dataset": name,
            "temperature": temperature,
            "batch_size": size,
            "requests": prompts_of(size),
            "prompts": prompts_of(size),
            "wanted": prompts_of(size),
        }
        for name, temperature, size in plans
    ]
    arms = {arm: length for arm, (_, length, _) in GRID.items()}
    own = {"starts_per_arm": STARTS, "temperatures": list(TEMPERATURES), "requests": requests, "arms": arms}
    return protocol_of(order) | own | {"max_tokens": TOKENS, "batch_sizes": list(SIZES), "max_num_seqs": SIZES[-1]}
