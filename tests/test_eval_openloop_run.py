"""The open loop against servers that misbehave: what is lost, what is kept, and that nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.openloop import server as server_module
from eyas.eval.openloop.client import completion_body
from eyas.eval.openloop.plan import LoadPlan
from eyas.eval.openloop.records import LoadCell, read_cells, read_failed
from eyas.eval.openloop.rows import open_loop_rows
from eyas.eval.openloop.run import run_open_loop
from eyas.eval.openloop.server import Command, ServerFailed, serving
from eyas.eval.serve_options import ServedEngine
from eyas.heads.files import read_json
from tests import openloop_records as made
from tests import openloop_servers

PROGRAM = Path(openloop_servers.__file__)
ROOT = PROGRAM.parent.parent


def program(behaviour: str, *memory: Path) -> Command:
    return lambda port, name: [sys.executable, str(PROGRAM), behaviour, str(port), name, *map(str, memory)]


def run(
    directory: Path,
    plan: LoadPlan,
    behaviour: str,
    *memory: Path,
    arms: tuple[Arm, ...] = (PLAIN,),
    relay: Callable[[str], None] = lambda _: None,
) -> list[LoadCell]:
    def serve(_engine: ServedEngine) -> Command:
        return program(behaviour, *memory)

    run_open_loop(
        directory,
        plan=plan,
        arms=list(arms),
        starts_per_arm=1,
        wanted=20,
        slo_ttft_ms=5000.0,
        slo_tpot_ms=5000.0,
        environment=dict(os.environ),
        ready_timeout_s=60.0,
        relay=relay,
        serve=serve,
    )
    return read_cells(directory, session=made.SESSION)


def until(what: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited too long"
        os.sched_yield()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked about does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_well_server(tmp_path: Path) -> None:
    lines: list[str] = []
    arms = (
        PLAIN,
        Arm("other", "other", {"method": "ngram", "num_speculative_tokens": 1}),
        Arm("slow", "other", None, 0.1),
    )
    plan = made.plan(requests=12, rates=(60.0, 200.0))
    cells = run(tmp_path, plan, "well", arms=arms, relay=lines.append)
    told = read_json(tmp_path / "000-ar" / "server-0.json")["settings"]["machine"]
    assert (told["vllm_version"], told["cpu"]) == ("0.32.0", "Some: Processor")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000-ar", "001-other", "plan.json"], "a server cannot be slowed down"
    assert len(lines) == len(cells) == 4
    for cell in cells:
        for number, request in enumerate(cell.requests, start=1):
            assert (request.prompt_id, request.failure) == (f"p{number}", None)
            assert request.token_ids == list(range(6))
            assert request.chunk_sizes == [2, 2, 2]
            assert request.queue_seconds == 0.25
        assert cell.counters["generation_tokens"] == 12 * 6, "the warm-up is not counted"
        assert cell.samples[0].running == 2.0
    row = open_loop_rows(tmp_path, session=made.SESSION)[1]
    assert (row["rate"], row["arm"], row["starts"], row["answered"], row["void"]) == (60.0, "other", 1, 12, None)
    assert (row["wanted"], row["prompts"]) == (20, 12)
    assert row["ratio_to_ar"]["ttft"]["ratio"] > 0


def test_another_session_leaves_nothing_of_the_earlier_one(tmp_path: Path) -> None:
    other = Arm("other", "other", {"method": "ngram", "num_speculative_tokens": 1})
    before = run(tmp_path, made.plan(requests=3, rates=(100.0,)), "well", arms=(PLAIN, other))
    after = run(tmp_path, made.plan(requests=3, rates=(100.0, 200.0)), "well")
    assert [(cell.arm, cell.rate) for cell in after] == [("ar", 100.0), ("ar", 200.0)]
    assert after[0] == before[0]
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*"))
    assert files == [
        *("000-ar/rate-100.jsonl", "000-ar/rate-200.jsonl"),
        *("000-ar/server-0.json", "000-ar/server-0.log", "000-ar/server-1.json", "000-ar/server-1.log"),
    ]


def test_every_sampling_setting_is_sent() -> None:
    sampling = replace(made.plan().sampling, temperature=0.7, top_p=0.9, top_k=40, seed=100)
    body = completion_body("n", [1, 2], index=5, sampling=sampling)
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 105, "max_tokens": 6, "stop_token_ids": [2]}
    assert body.items() >= (neutral | given | {"prompt": [1, 2], "ignore_eos": False}).items()
    assert completion_body("n", [1], index=5, sampling=replace(sampling, temperature=0.0))["seed"] is None
    fixed = completion_body("n", [1], index=5, sampling=replace(sampling, ignore_eos=True))
    assert (fixed["ignore_eos"], fixed["stop_token_ids"]) == (True, [])


def test_each_broken_answer_is_a_failure_of_its_own(tmp_path: Path) -> None:
    (cell,) = run(tmp_path, made.plan(requests=12, rates=(100.0,)), "odd")
    reasons = {request.prompt_id: request.failure for request in cell.requests}
    words = {
        "p1": "no JSON: {broken",
        "p2": "ended before its answer",
        "p3": "HTTP 500: oops",
        "p4": "reports an error",
        "p5": "2 tokens came, the server counts 3",
        "p6": "ended the answer with None",
        "p7": "no chunk of vLLM",
        "p8": "ServerDisconnectedError",
        "p9": "no token",
    }
    for prompt_id, reason in reasons.items():
        if prompt_id in words:
            assert reason is not None and words[prompt_id] in reason, (prompt_id, reason)
        else:
            assert reason is None
    assert all(request.t_finish is not None for request in cell.requests)
    (row,) = open_loop_rows(tmp_path, session=made.SESSION)
    assert (row["requests"], row["answered"], sum(row["failures"].values())) == (12, 3, 9)
    assert row["goodput"]["share"] == pytest.approx(3 / 12)


def test_a_request_that_takes_too_long_fails_alone(tmp_path: Path) -> None:
    plan = made.plan(requests=3, rates=(100.0,), request_s=2.0, silence_s=1.9)
    (cell,) = run(tmp_path, plan, "trickle")
    assert {request.failure for request in cell.requests} == {"no complete answer within 2 s"}
    assert all(request.n_out > 1 for request in cell.requests), "what had come is kept"
    (row,) = open_loop_rows(tmp_path, session=made.SESSION)
    assert (row["ttft"], row["client"]["too_slow"], row["goodput"]["share"]) == (None, None, 0.0)


@pytest.mark.parametrize("behaviour", ["hang", "keep_open"])
def test_a_server_that_stops_answering_at_the_end_costs_its_cell(tmp_path: Path, behaviour: str) -> None:
    """All requests have arrived, the server is healthy, and sends at most comments: so many failures are no result."""
    plan = made.plan(requests=3, rates=(100.0,), request_s=20.0, silence_s=0.5)
    assert run(tmp_path, plan, behaviour) == []
    (failed,) = read_failed(tmp_path, session=made.SESSION)
    assert "stopped answering" in failed.reason
    kept = (tmp_path / "000-ar" / "rate-100.partial").read_text().splitlines()[1:]
    assert [json.loads(line)["failure"] for line in kept] == ["given up with its cell"] * 3


def test_a_prefix_cache_that_is_not_emptied_costs_the_cell(tmp_path: Path) -> None:
    plan = made.plan(requests=1)
    cached = replace(plan, engine=replace(plan.engine, prefix_caching=True))
    assert len(run(tmp_path / "well", cached, "well")) == 1
    assert run(tmp_path / "odd", cached, "odd") == []
    (failed,) = read_failed(tmp_path / "odd", session=made.SESSION)
    assert "did not empty its prefix cache" in failed.reason


def test_a_server_that_stops_answering_costs_its_cell(tmp_path: Path) -> None:
    plan = made.plan(requests=4, rates=(50.0, 60.0, 70.0), silence_s=0.5)
    cells = run(tmp_path, plan, "hang_once", tmp_path / "memory")
    assert [cell.rate for cell in cells] == [60.0, 70.0], "the next rates get a fresh server"
    (failed,) = read_failed(tmp_path, session=made.SESSION)
    assert (failed.arm, failed.rate) == ("ar", 50.0)
    assert "stopped answering" in failed.reason
    assert [row["rate"] for row in open_loop_rows(tmp_path, session=made.SESSION) if row["failed_cells"]] == [50.0]
    kept = {cell.rate: cell for cell in cells}
    again = {cell.rate: cell for cell in run(tmp_path, plan, "well")}
    assert sorted(again) == [50.0, 60.0, 70.0]
    assert all(again[rate] == kept[rate] for rate in kept), "only what was lost is measured again"
    assert not read_failed(tmp_path, session=made.SESSION)


def test_a_server_that_dies_costs_its_cell_and_a_hopeless_one_the_start(tmp_path: Path) -> None:
    plan = made.plan(requests=4, rates=(50.0, 60.0, 70.0))
    assert run(tmp_path, plan, "die") == []
    failed = read_failed(tmp_path, session=made.SESSION)
    assert [cell.reason for cell in failed] == [
        *["the server ended with exit code 7"] * 2,
        "not tried: 2 cells in a row were lost on fresh servers",
    ]
    rows = open_loop_rows(tmp_path, session=made.SESSION)
    assert [(row["starts"], row["dataset"], len(row["failed_cells"])) for row in rows] == [(0, "heldout", 1)] * 3


def test_a_server_that_is_found_broken_before_a_cell_costs_none(tmp_path: Path) -> None:
    lines: list[str] = []
    plan = made.plan(requests=4, rates=(50.0, 60.0, 70.0))
    cells = run(tmp_path, plan, "wear_out", relay=lines.append)
    assert [cell.rate for cell in cells] == [50.0, 60.0, 70.0]
    assert ["on a fresh server: 2 of 2 warm-up requests failed: HTTP 503" in line for line in lines] == [0, 1, 0, 1, 0]
    assert len(list(tmp_path.glob("000-ar/server-*.log"))) == 3


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    run(tmp_path, made.plan(rates=(1.0,)), "broken")
    (failed,) = read_failed(tmp_path, session=made.SESSION)
    assert "exit code 3 before it was ready" in failed.reason
    assert "cannot load the model: no such file" in failed.log_tail[-1]


def test_another_plan_measures_again(tmp_path: Path) -> None:
    plan = made.plan(requests=3, rates=(100.0,))
    (first,) = run(tmp_path, plan, "well")
    (same,) = run(tmp_path, plan, "well")
    (other,) = run(tmp_path, replace(plan, seed=plan.seed + 1), "well")
    assert same == first
    assert other.requests[0].t_scheduled != first.requests[0].t_scheduled


def test_few_connections_make_requests_wait_and_say_so(tmp_path: Path) -> None:
    plan = replace(made.plan(requests=3, rates=(1000.0,), request_s=1.0, silence_s=0.95), max_connections=1)
    (cell,) = run(tmp_path, plan, "trickle")
    waits = [(request.t_sent or 0.0) - request.t_released for request in cell.requests]
    for place, wait in enumerate(waits):
        assert wait == pytest.approx(place, abs=0.4)


def test_a_lost_port_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as somebody:
        somebody.bind((server_module.HOST, 0))
        somebody.listen()
        taken = somebody.getsockname()[1]
        real, ports = server_module.free_port, Counter()

        def unlucky() -> int:
            ports["asked"] += 1
            return taken if ports["asked"] == 1 else real()

        monkeypatch.setattr(server_module, "free_port", unlucky)
        with serving(
            program("well"), environment=dict(os.environ), log_path=tmp_path / "log", ready_timeout_s=60.0
        ) as server:
            assert server.serves()
            assert str(taken) not in server.url
    assert ports["asked"] == 2


def test_ports_that_are_always_lost(tmp_path: Path) -> None:
    settings = {"environment": dict(os.environ), "log_path": tmp_path / "log"}
    with (
        pytest.raises(ServerFailed, match="took the port 5 times"),
        serving(program("taken"), ready_timeout_s=60.0, **settings),
    ):
        pass


def test_somebody_elses_server_on_the_port_is_not_ours(tmp_path: Path) -> None:
    with serving(
        program("well"), environment=dict(os.environ), log_path=tmp_path / "log", ready_timeout_s=60.0
    ) as server:
        assert server.serves()
        server.name = "eyas-another"
        assert not server.serves()


PARENT = """
import os, sys
from pathlib import Path
from tests.openloop_records import plan
from tests.test_eval_openloop_run import run
run(Path(sys.argv[1]), plan(requests=4, rates=(50.0, 60.0)), sys.argv[2], Path(sys.argv[3]))
"""


@contextlib.contextmanager
def started_run(directory: Path, behaviour: str, memory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that measures an open loop, as a session does."""
    arguments = [sys.executable, "-c", PARENT, str(directory), behaviour, str(memory)]
    process = subprocess.Popen(arguments, cwd=ROOT, env=dict(os.environ), start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def supervisor_of(parent: int) -> int | None:
    """Id of the child of `parent`, if it has one."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[0]) if children else None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_its_session(tmp_path: Path, number: signal.Signals) -> None:
    """The first server hangs at 50 requests/s, which the session would wait 30 s for."""
    memory, partial = tmp_path / "memory", tmp_path / "out"
    with started_run(partial, "hang_once", memory) as process:
        until(memory.exists)
        supervisor = supervisor_of(process.pid)
        assert supervisor is not None
        served = supervisor_of(supervisor)
        assert served is not None and alive(served)
        process.send_signal(number)
        process.wait(60)
        until(lambda: not alive(served) and not alive(supervisor))
    cells = run(partial, made.plan(requests=4, rates=(50.0, 60.0)), "well")
    assert [cell.rate for cell in cells] == [50.0, 60.0], "the next run does the rest"


def test_a_stubborn_server_is_killed_with_its_children(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    with serving(
        program("stubborn", memory), environment=dict(os.environ), log_path=tmp_path / "log", ready_timeout_s=60.0
    ) as server:
        pids = [server.process.pid, *map(int, memory.read_text().split())]
        assert len(pids) == 3 and all(map(alive, pids))
    until(lambda: not any(map(alive, pids)))
