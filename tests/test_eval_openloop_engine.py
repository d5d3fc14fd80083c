"""The open loop against a real vLLM server: a tiny random target, plain and drafting by prompt lookup."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.openloop.client import Sampling
from eyas.eval.openloop.differences import read_servers, server_differences
from eyas.eval.openloop.load import Patience
from eyas.eval.openloop.plan import LoadPlan
from eyas.eval.openloop.records import LoadCell, read_cells, read_failed
from eyas.eval.openloop.rows import open_loop_rows
from eyas.eval.openloop.run import run_open_loop
from eyas.eval.serve_options import ServedEngine
from eyas.eval.workload import Request
from eyas.heads.serving import engine_environment
from tests import tiny

pytestmark = pytest.mark.engine

RATES = [4.0, 40.0]
REQUESTS, MAX_TOKENS = 16, 24
WARMUP = [[5, 6, 7]] * 2
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def make_plan(target_dir: Path) -> LoadPlan:
    generator = random.Random(0)
    prompts = [[generator.randrange(3, tiny.VOCAB_SIZE) for _ in range(6 + index)] for index in range(REQUESTS)]
    return LoadPlan(
        session="this",
        engine=ServedEngine(
            target_dir=str(target_dir),
            trust_remote_code=False,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            seed=0,
            enforce_eager=True,
            prefix_caching=False,
        ),
        requests=[Request("heldout", f"p{index}", prompt) for index, prompt in enumerate(prompts)],
        warmup=WARMUP,
        rates=RATES,
        seed=0,
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=MAX_TOKENS, seed=0, stop_token_ids=[2]),
        max_connections=64,
        patience=Patience(request_s=60.0, silence_s=30.0),
    )


def test_open_loop_on_a_real_server(tiny_target: Path, tmp_path: Path) -> None:
    plan, lines = make_plan(tiny_target), []
    broken = Arm("broken", "other", {"method": "ngram", "num_speculative_tokens": -1})
    environment = engine_environment(threads=1, kv_cache_gib=1)

    def run(arms: list[Arm], plan: LoadPlan) -> None:
        run_open_loop(
            tmp_path,
            plan=plan,
            arms=arms,
            starts_per_arm=1,
            wanted=REQUESTS,
            slo_ttft_ms=10_000.0,
            slo_tpot_ms=10_000.0,
            environment=environment,
            ready_timeout_s=300.0,
            relay=lines.append,
        )

    arms = [PLAIN, Arm("ngram", "other", NGRAM), broken]
    run(arms, plan)
    cells = read_cells(tmp_path, session="this")
    assert [(cell.arm, cell.rate) for cell in cells] == [("ar", 4.0), ("ar", 40.0), ("ngram", 4.0), ("ngram", 40.0)]
    for cell in cells:
        check_cell(cell)
    timetables = {tuple(request.t_scheduled * cell.rate for request in cell.requests) for cell in cells}
    assert len({tuple(round(t, 9) for t in times) for times in timetables}) == 1, (
        "one timetable for all, but for its scale"
    )
    assert len({tuple(tuple(request.token_ids) for request in cell.requests) for cell in cells}) == 1, (
        "greedy answers in float32 depend neither on load nor on drafting"
    )
    check_drafting(cells)
    failed = read_failed(tmp_path, session="this")
    assert [(cell.arm, cell.rate) for cell in failed] == [("broken", 4.0), ("broken", 40.0)]
    assert "ended" in failed[0].reason and failed[0].log_tail

    rows = open_loop_rows(tmp_path, session="this")
    assert [(row["rate"], row["arm"], row["starts"]) for row in rows] == [
        (rate, arm, starts) for rate in RATES for arm, starts in (("ar", 1), ("broken", 0), ("ngram", 1))
    ]
    for row in rows:
        if row["starts"]:
            assert row["goodput"]["share"] == 1.0
            assert row["void"] is None, server_differences(read_servers(tmp_path, session="this"))

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("000-ar/rate-*.jsonl")}
    run(arms[:1], replace(plan, rates=[*RATES, 8.0]))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/rate-*.jsonl")}
    assert before.items() <= after.items(), "complete cells are kept"
    assert sorted(path.name for path in after) == ["rate-4.jsonl", "rate-40.jsonl", "rate-8.jsonl"]
    assert not read_failed(tmp_path, session="this"), "what no longer belongs to the session is gone"


def check_cell(cell: LoadCell) -> None:
    assert len(cell.requests) == REQUESTS
    for request in cell.requests:
        assert request.failure is None
        assert request.t_sent is not None and request.t_finish is not None and request.completion_tokens is not None
        assert request.t_scheduled <= request.t_released <= request.t_sent <= request.chunk_times[0]
        assert request.chunk_times == sorted(request.chunk_times)
        assert request.chunk_times[-1] <= request.t_finish
        assert sum(request.chunk_sizes) == request.n_out == request.completion_tokens <= MAX_TOKENS
        assert request.finish_reason == ("stop" if request.token_ids[-1] == 2 else "length")
        assert request.queue_seconds is not None
    assert cell.counters["generation_tokens"] == sum(request.n_out for request in cell.requests)
    assert cell.counters["prompt_tokens"] == sum(request.n_in for request in cell.requests)
    assert cell.samples and cell.loop_lags
    assert max(sample.running for sample in cell.samples) <= 4


def check_drafting(cells: list[LoadCell]) -> None:
    for cell in cells:
        steps = [request.steps for request in cell.requests]
        if cell.arm == "ar":
            assert set(steps) == {None}
            assert cell.counters["num_drafts"] == 0
        else:
            assert sum(request.drafted or 0 for request in cell.requests) == cell.counters["num_draft_tokens"] > 0
            assert sum(request.accepted or 0 for request in cell.requests) == cell.counters["num_accepted_tokens"]
            assert sum(cell.accepted_per_position) == cell.counters["num_accepted_tokens"]


def kill_engine_in_the_second_cell(stop: threading.Event) -> None:
    """Kill the engine behind the first server when it has answered one request of the second cell; the API server stays."""
    answered = 0
    while answered < len(WARMUP) * 2 + REQUESTS + 1:
        if stop.wait(0.02):
            return
        answered = requests_answered()
    (engine,) = [pid for pid in own_processes() if name_of(pid).startswith("VLLM::EngineCor")]
    os.kill(engine, signal.SIGKILL)


def requests_answered() -> int:
    """What the server that this test started counts; 0 before it is ready."""
    for pid in own_processes():
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            port = words[words.index("--port") + 1]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                counts = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
            return int(sum(map(float, counts)))
    return 0


def own_processes() -> list[int]:
    """Processes that descend from this one."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def test_an_engine_that_dies_in_the_middle(tiny_target: Path, tmp_path: Path) -> None:
    plan, stop = replace(make_plan(tiny_target), rates=[2.0, 4.0, 40.0]), threading.Event()
    killer = threading.Thread(target=kill_engine_in_the_second_cell, args=(stop,))
    killer.start()
    try:
        run_open_loop(
            tmp_path,
            plan=plan,
            arms=[PLAIN],
            starts_per_arm=1,
            wanted=REQUESTS,
            slo_ttft_ms=10_000.0,
            slo_tpot_ms=10_000.0,
            environment=engine_environment(threads=1, kv_cache_gib=1),
            ready_timeout_s=300.0,
            relay=lambda _: None,
        )
    finally:
        stop.set()
        killer.join()
    assert [cell.rate for cell in read_cells(tmp_path, session="this")] == [2.0, 40.0]
    (failed,) = read_failed(tmp_path, session="this")
    assert failed.rate == 4.0
    assert "the server ended" in failed.reason or "not well after" in failed.reason
    assert (tmp_path / "000-ar" / "rate-4.partial").is_file(), "what had come is kept for whoever looks for the cause"
