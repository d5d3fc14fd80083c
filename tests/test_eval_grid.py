from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from eyas.eval.grid import Arm, order_of_starts, read_failures, run_grid
from eyas.eval.launch import Launcher
from eyas.eval.plan import CellPlan, StartPlan, read_plan
from eyas.eval.records import read_starts
from eyas.eval.workload import Request
from eyas.heads.files import read_json, write_json

HEAD = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
ARMS = [Arm("ar", None, 0), Arm("k3", HEAD, 3)]
REQUESTS = [Request("heldout", "p0", [1, 2])]
PLAN = StartPlan(
    target_dir="target",
    trust_remote_code=False,
    dtype="float32",
    max_model_len=64,
    seed=0,
    enforce_eager=True,
    stop_token_ids=[2],
    warmup=[3],
    cells=[CellPlan("heldout", 1, 0.0, 8, 0, REQUESTS)],
)

FAKE_WORKER = """
import json, sys, time
from pathlib import Path
plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
behaviour = {behaviour!r}.get(plan["arm"], "work")
print("progress of", plan["arm"], flush=True)
if behaviour == "crash":
    sys.exit("out of memory")
if behaviour == "hang":
    out.with_name(out.name + ".partial").write_text("half")
    print("hanging", flush=True)
    time.sleep(600)
request = dict(kind="request", cell=0, dataset="heldout", batch_size=1, prompt_id="p0", n_in=2, n_out=1, t_submit=0.0,
    t_first=1.0, t_finish=1.0, chunk_times=[1.0], chunk_sizes=[1], token_ids=[5], finish_reason="stop",
    per_step_accepted=None, per_step_drafted=None)
cell = dict(kind="cell", cell=0, dataset="heldout", batch_size=1, temperature=0.0, max_tokens=8, makespan=1.0,
    mean_running=1.0, counters={{}})
description = dict(arm=plan["arm"], start=plan["start"], speculative_config=plan["speculative_config"])
if behaviour != "nothing":
    out.with_suffix(".json").write_text(json.dumps(description))
    out.write_text(json.dumps(request) + "\\n" + json.dumps(cell) + "\\n")
"""


class Recorder:
    """A launcher on a fake worker, and the progress lines it relayed."""

    def __init__(self, directory: Path, behaviour: dict[str, str] | None = None, *, timeout_s: float = 60) -> None:
        self.lines: list[str] = []
        script = directory / "worker.py"
        script.write_text(FAKE_WORKER.format(behaviour=behaviour or {}))
        self.launcher = Launcher(dict(os.environ), timeout_s, self.relay, (sys.executable, str(script)))

    def relay(self, line: str) -> None:
        self.lines.append(line)

    def count(self) -> int:
        return sum(line.startswith("progress") for line in self.lines)


def test_order_alternates() -> None:
    arms = [Arm("ar", None, 0), Arm("k3", HEAD, 3), Arm("k1", HEAD, 1)]
    names = [arm.name for arm in order_of_starts(arms, starts_per_arm=3)]
    assert names == ["ar", "k3", "k1", "k1", "k3", "ar", "ar", "k3", "k1"]


def test_plan_survives_its_file(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", PLAN.to_json())
    assert read_plan(tmp_path / "plan.json") == PLAN


def test_all_starts_run_and_a_second_call_runs_none(tmp_path: Path) -> None:
    order = order_of_starts(ARMS, starts_per_arm=2)
    first = Recorder(tmp_path)
    assert run_grid(tmp_path / "starts", plan=PLAN, order=order, launcher=first.launcher) == 4
    starts = read_starts(tmp_path / "starts")
    assert [(start.arm, start.start, start.draft_length) for start in starts] == [
        ("ar", 0, 0),
        ("k3", 1, 3),
        ("k3", 2, 3),
        ("ar", 3, 0),
    ]
    assert first.count() == 4
    again = Recorder(tmp_path)
    assert run_grid(tmp_path / "starts", plan=PLAN, order=order, launcher=again.launcher) == 4
    assert again.count() == 0


def test_a_killed_session_continues_with_the_missing_starts(tmp_path: Path) -> None:
    order = order_of_starts(ARMS, starts_per_arm=2)
    run_grid(tmp_path / "starts", plan=PLAN, order=order, launcher=Recorder(tmp_path).launcher)
    (tmp_path / "starts" / "002-k3.jsonl").unlink()
    again = Recorder(tmp_path)
    assert run_grid(tmp_path / "starts", plan=PLAN, order=order, launcher=again.launcher) == 4
    assert again.lines == ["progress of k3\n"]


def test_starts_of_another_order_are_removed(tmp_path: Path) -> None:
    launcher = Recorder(tmp_path).launcher
    run_grid(tmp_path / "starts", plan=PLAN, order=order_of_starts(ARMS, starts_per_arm=2), launcher=launcher)
    run_grid(tmp_path / "starts", plan=PLAN, order=order_of_starts(ARMS, starts_per_arm=1), launcher=launcher)
    assert len(read_starts(tmp_path / "starts")) == 2


def test_a_failed_start_costs_only_itself_and_is_tried_again(tmp_path: Path) -> None:
    order = order_of_starts([*ARMS, Arm("k1", HEAD, 1)], starts_per_arm=1)
    broken = Recorder(tmp_path, {"k1": "crash"})
    assert run_grid(tmp_path / "starts", plan=PLAN, order=order, launcher=broken.launcher) == 2
    (failure,) = read_failures(tmp_path / "starts")
    assert failure == {"arm": "k1", "start": 2, "reason": "exit code 1", "log_tail": ["out of memory"]}
    assert run_grid(tmp_path / "starts", plan=PLAN, order=order, launcher=Recorder(tmp_path).launcher) == 3
    assert read_failures(tmp_path / "starts") == []


@pytest.mark.parametrize(("arm", "side"), [("ar", "plain decoding"), ("k3", "the head")])
def test_one_side_failing_altogether_is_an_error_that_names_the_log(tmp_path: Path, arm: str, side: str) -> None:
    order = order_of_starts(ARMS, starts_per_arm=2)
    with pytest.raises(ValueError, match=rf"every start of {side}.*{arm}\.log"):
        run_grid(tmp_path / "starts", plan=PLAN, order=order, launcher=Recorder(tmp_path, {arm: "crash"}).launcher)


def test_a_worker_that_writes_nothing_has_failed(tmp_path: Path) -> None:
    assert not Recorder(tmp_path, {"ar": "nothing"}).launcher.run(PLAN, tmp_path / "000-ar")
    assert read_json(tmp_path / "000-ar.failed.json")["reason"] == "ended without writing its result"


def test_a_hanging_worker_is_ended_at_its_time_limit(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {"ar": "hang"}, timeout_s=1.5)
    assert not recorder.launcher.run(PLAN, tmp_path / "000-ar")
    assert read_json(tmp_path / "000-ar.failed.json")["reason"] == "timed out after 1.5 s"
    assert not list(tmp_path.glob("*.partial"))


def test_ctrl_c_ends_the_worker_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {"ar": "hang"})

    def interrupt(line: str) -> None:
        if line.startswith("hanging"):
            os.kill(os.getpid(), signal.SIGINT)

    launcher = Launcher(dict(os.environ), 60, interrupt, recorder.launcher.command)
    with pytest.raises(KeyboardInterrupt):
        launcher.run(PLAN, tmp_path / "000-ar")
    assert {path.name for path in tmp_path.iterdir()} == {"worker.py", "000-ar.plan.json", "000-ar.log"}
