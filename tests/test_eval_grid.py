from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.grid import FIRST_OF_SCHEDULE, order_of_starts, plan_turns, read_failures, require_both_sides, run_grid
from eyas.eval.launch import Launcher
from eyas.eval.plan import CellPlan, StartPlan, read_plan
from eyas.eval.records import Protocol, read_starts
from eyas.eval.workload import Request
from eyas.heads.files import read_json, write_json

HEAD = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
K3, K1 = Arm("k3", "head", HEAD), Arm("k1", "head", {**HEAD, "num_speculative_tokens": 1})
ARMS = [PLAIN, K3]
REQUESTS = [Request("heldout", "p0", [1, 2])]
CELL = CellPlan("heldout", 1, 0.0, 8, 0, REQUESTS)
PLAN = StartPlan(
    target_dir="target",
    trust_remote_code=False,
    dtype="float32",
    max_model_len=64,
    seed=0,
    enforce_eager=True,
    stop_token_ids=[2],
    warmup=[3],
    cells=[CELL, replace(CELL, batch_size=2)],
    session="session-0",
)
WORKER = Path(__file__).with_name("fake_worker.py")


class Recorder:
    """A launcher on a fake worker, and the progress lines it relayed."""

    def __init__(self, behaviour: dict[str, str] | None = None, *, timeout_s: float = 60) -> None:
        self.lines: list[str] = []
        environment = dict(os.environ) | {"FAKE_BEHAVIOUR": json.dumps(behaviour or {})}
        self.launcher = Launcher(environment, timeout_s, self.lines.append, (sys.executable, str(WORKER)))

    def started(self) -> list[str]:
        return [line.split()[-1] for line in self.lines if line.startswith("progress")]

    def run(self, directory: Path, arms: list[Arm], *, starts: int, protocol: str = "starts") -> int:
        plan = replace(PLAN, protocol=protocol)
        turns = plan_turns(arms, protocol=plan.protocol, starts_per_arm=starts)
        return run_grid(directory, plan=plan, turns=turns, launcher=self.launcher)


def test_order_alternates() -> None:
    names = [arm.name for arm in order_of_starts([PLAIN, K3, K1], starts_per_arm=3)]
    assert names == ["ar", "k3", "k1", "k1", "k3", "ar", "ar", "k3", "k1"]


def test_turns_count_starts_and_rounds() -> None:
    turns = plan_turns(ARMS, protocol="starts", starts_per_arm=2)
    assert [(turn.arms[0].name, turn.start, turn.round) for turn in turns] == [
        ("ar", 0, 0),
        ("k3", 1, 0),
        ("k3", 2, 1),
        ("ar", 3, 1),
    ]


def test_side_by_side_every_arm_gets_pairs_with_plain_decoding_loaded_first_in_turn() -> None:
    turns = plan_turns([PLAIN, K3, K1], protocol="side-by-side", starts_per_arm=2)
    assert [[arm.name for arm in turn.arms] for turn in turns] == [
        ["ar", "k3"],
        ["ar", "k1"],
        ["ar", "ar_twin"],
        ["ar_twin", "ar"],
        ["k1", "ar"],
        ["k3", "ar"],
    ]
    assert [turn.round for turn in turns] == [0, 1, 2, 3, 4, 5]
    assert [turn.start for turn in turns] == [0, 2, 4, 6, 8, 10]


def test_the_twin_of_plain_decoding_is_a_control_that_drafts_nothing_and_is_not_slowed() -> None:
    twin = plan_turns(ARMS, protocol="side-by-side", starts_per_arm=1)[-1].arms[1]
    assert twin == Arm("ar_twin", "other", None, slowed_by=0.0)
    assert plan_turns([], protocol="side-by-side", starts_per_arm=0) == []


@pytest.mark.parametrize(("protocol", "most"), [("starts", 166), ("side-by-side", 83)])
def test_a_phase_has_no_more_starts_than_it_can_number(protocol: Protocol, most: int) -> None:
    arms = [PLAIN, K3, K1]
    turns = plan_turns(arms, protocol=protocol, starts_per_arm=most)
    assert turns[-1].start + len(turns[-1].arms) <= FIRST_OF_SCHEDULE
    with pytest.raises(ValueError, match=rf"set score\.starts_per_arm to {most} at most"):
        plan_turns(arms, protocol=protocol, starts_per_arm=most + 1)


def test_plan_survives_its_file(tmp_path: Path) -> None:
    plan = replace(PLAN, arm="k3", kind="head", speculative_config=HEAD, beside="ar", blocks=3)
    write_json(tmp_path / "plan.json", plan.to_json())
    assert read_plan(tmp_path / "plan.json") == plan


def test_all_starts_run_and_a_second_call_runs_none(tmp_path: Path) -> None:
    first = Recorder()
    assert first.run(tmp_path, ARMS, starts=2) == 4
    starts = read_starts(tmp_path)
    assert [(start.arm, start.kind, start.start, start.round, start.draft_length) for start in starts] == [
        ("ar", "ar", 0, 0, 0),
        ("k3", "head", 1, 0, 3),
        ("k3", "head", 2, 1, 3),
        ("ar", "ar", 3, 1, 0),
    ]
    assert first.started() == ["ar", "k3", "k3", "ar"]
    again = Recorder()
    assert again.run(tmp_path, ARMS, starts=2) == 4
    assert again.started() == []


def test_more_starts_continue_a_finished_order(tmp_path: Path) -> None:
    Recorder().run(tmp_path, ARMS, starts=1)
    longer = Recorder()
    assert longer.run(tmp_path, ARMS, starts=2) == 4
    assert longer.started() == ["k3", "ar"]


def test_a_killed_session_continues_with_the_missing_starts(tmp_path: Path) -> None:
    Recorder().run(tmp_path, ARMS, starts=2)
    (tmp_path / "002-k3.jsonl").unlink()
    again = Recorder()
    assert again.run(tmp_path, ARMS, starts=2) == 4
    assert again.started() == ["k3"]


def test_starts_of_another_order_are_removed_and_those_of_the_other_phase_stay(tmp_path: Path) -> None:
    Recorder().run(tmp_path, ARMS, starts=2)
    schedule = plan_turns(ARMS, protocol="starts", starts_per_arm=1, first_start=FIRST_OF_SCHEDULE)
    run_grid(tmp_path, plan=PLAN, turns=schedule, launcher=Recorder().launcher, phase="schedule")
    Recorder().run(tmp_path, ARMS, starts=1)
    assert [(start.start, start.phase) for start in read_starts(tmp_path)] == [
        (0, "grid"),
        (1, "grid"),
        (500, "schedule"),
        (501, "schedule"),
    ]
    run_grid(tmp_path, plan=PLAN, turns=[], launcher=Recorder().launcher, phase="schedule")
    assert len(read_starts(tmp_path)) == 2


def test_a_failed_start_costs_only_itself_and_is_tried_again(tmp_path: Path) -> None:
    arms = [*ARMS, K1]
    assert Recorder({"k1": "crash"}).run(tmp_path, arms, starts=1) == 2
    (failure,) = read_failures(tmp_path)
    assert failure == {
        "arm": "k1",
        "start": 2,
        "reason": "exit code 1",
        "kept_blocks": 0,
        "log_tail": ["out of memory"],
    }
    require_both_sides(tmp_path)
    assert Recorder().run(tmp_path, arms, starts=1) == 3
    assert read_failures(tmp_path) == []


def test_an_engine_that_dies_in_the_middle_keeps_its_finished_cells(tmp_path: Path) -> None:
    assert Recorder({"k3": "half"}).run(tmp_path, ARMS, starts=1) == 1
    plain, drafted = read_starts(tmp_path)
    assert [len(plain.cells), len(drafted.cells)] == [2, 1]
    assert [failure["kept_blocks"] for failure in read_failures(tmp_path)] == [1]
    again = Recorder()
    assert again.run(tmp_path, ARMS, starts=1) == 2
    assert again.started() == ["k3"]
    assert [len(start.cells) for start in read_starts(tmp_path)] == [2, 2]


def test_an_arm_that_keeps_failing_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    recorder = Recorder({"k1": "crash"})
    assert recorder.run(tmp_path, [*ARMS, K1], starts=4) == 8
    assert recorder.started().count("k1") == 2
    assert any("not started: it failed 2 times" in line for line in recorder.lines)


def test_without_plain_decoding_there_is_nothing_to_compare_and_the_grid_stops(tmp_path: Path) -> None:
    recorder = Recorder({"ar": "crash"})
    recorder.run(tmp_path, ARMS, starts=4)
    assert recorder.started() == ["ar", "k3", "k3", "ar"]
    with pytest.raises(ValueError, match=r"every start of plain decoding.*ar\.log"):
        require_both_sides(tmp_path)


def test_all_other_arms_failing_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    Recorder({"k3": "crash"}).run(tmp_path, ARMS, starts=2)
    with pytest.raises(ValueError, match=r"every start of the other arms.*k3\.log"):
        require_both_sides(tmp_path)


def test_a_worker_that_writes_nothing_has_failed(tmp_path: Path) -> None:
    assert not Recorder({"ar": "nothing"}).launcher.run(PLAN, tmp_path / "000-ar")
    assert read_json(tmp_path / "000-ar.failed.json")["reason"] == "ended without writing its result"


@pytest.mark.parametrize("protocol", ["starts", "side-by-side"])
def test_a_hanging_worker_is_ended_at_its_time_limit(tmp_path: Path, protocol: str) -> None:
    recorder = Recorder({"k3": "hang"}, timeout_s=1.5)
    recorder.run(tmp_path, ARMS, starts=1, protocol=protocol)
    reason = read_json(tmp_path / "001-k3.failed.json")["reason"]
    assert reason == f"timed out after {1.5 if protocol == 'starts' else 3:g} s"
    assert not list(tmp_path.glob("*.partial"))


def interrupting(command: tuple[str, ...], behaviour: dict[str, str]) -> Launcher:
    """A launcher whose user presses Ctrl-C as soon as a worker hangs."""

    def interrupt(line: str) -> None:
        if line.startswith("hanging"):
            os.kill(os.getpid(), signal.SIGINT)

    return Launcher(dict(os.environ) | {"FAKE_BEHAVIOUR": json.dumps(behaviour)}, 60, interrupt, command)


def test_ctrl_c_ends_the_worker_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    launcher = interrupting((sys.executable, str(WORKER)), {"ar": "hang"})
    with pytest.raises(KeyboardInterrupt):
        launcher.run(PLAN, tmp_path / "000-ar")
    assert {path.name for path in tmp_path.iterdir()} == {"000-ar.plan.json", "000-ar.log", "000-ar.failed.json"}
    assert read_json(tmp_path / "000-ar.failed.json")["reason"] == "interrupted"


def test_ctrl_c_keeps_the_blocks_that_were_finished_and_the_start_runs_again(tmp_path: Path) -> None:
    launcher = interrupting((sys.executable, str(WORKER)), {"ar": "half_hang"})
    with pytest.raises(KeyboardInterrupt):
        launcher.run(PLAN, tmp_path / "000-ar")
    assert [len(start.cells) for start in read_starts(tmp_path)] == [1]
    assert Recorder().launcher.run(PLAN, tmp_path / "000-ar")
    assert [len(start.cells) for start in read_starts(tmp_path)] == [2]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"000-ar{end}" for end in (".jsonl", ".json", ".plan.json", ".log")
    }


@pytest.mark.parametrize("behaviour", ["crash", "nothing", "hang"])
def test_a_second_attempt_that_gets_less_far_costs_nothing_of_the_first(tmp_path: Path, behaviour: str) -> None:
    stem = tmp_path / "000-ar"
    Recorder({"ar": "half"}).launcher.run(PLAN, stem)
    before = [stem.with_suffix(suffix).read_bytes() for suffix in (".jsonl", ".json")]
    assert not Recorder({"ar": behaviour}, timeout_s=1.5).launcher.run(PLAN, stem)
    kept = 2 if behaviour == "nothing" else 1
    assert read_json(stem.with_suffix(".failed.json"))["kept_blocks"] == kept
    assert [len(start.cells) for start in read_starts(tmp_path)] == [kept]
    if kept == 1:
        assert [stem.with_suffix(suffix).read_bytes() for suffix in (".jsonl", ".json")] == before
    assert not list(tmp_path.glob("*.earlier"))


def test_a_start_counts_as_failed_until_it_has_ended(tmp_path: Path) -> None:
    """So that a kill at any moment, even while earlier blocks are put in order, leaves no half start that looks whole."""
    seen: list[str] = []

    def look(line: str) -> None:
        if line.startswith("progress"):
            seen.append(read_json(tmp_path / "000-ar.failed.json")["reason"])

    launcher = replace(Recorder().launcher, relay=look)
    assert launcher.run(PLAN, tmp_path / "000-ar")
    assert seen == ["killed while it ran"]
    assert read_failures(tmp_path) == []


@pytest.mark.parametrize(
    "left",
    [
        {".jsonl": ".jsonl.partial"},  # a first attempt
        {".jsonl": ".jsonl.earlier", ".json": ".json.earlier"},  # a second one that had finished nothing
        {".jsonl": ".jsonl.earlier"},  # between the two renames
    ],
)
def test_an_attempt_killed_together_with_its_parent_leaves_its_blocks_to_the_next(
    tmp_path: Path, left: dict[str, str]
) -> None:
    """`kill -9`, then an attempt that gets nowhere."""
    stem = tmp_path / "000-ar"
    Recorder({"ar": "half"}).launcher.run(PLAN, stem)
    for suffix, moved in left.items():
        stem.with_suffix(suffix).rename(stem.with_suffix(moved))
    assert not Recorder({"ar": "crash"}).launcher.run(PLAN, stem)
    assert [len(start.cells) for start in read_starts(tmp_path)] == [1]
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".jsonl", ".log"}


def test_blocks_of_another_plan_are_not_kept(tmp_path: Path) -> None:
    stem = tmp_path / "000-ar"
    Recorder({"ar": "half"}).launcher.run(PLAN, stem)
    assert not Recorder({"ar": "crash"}).launcher.run(replace(PLAN, seed=1), stem)
    assert read_starts(tmp_path) == []


def test_ctrl_c_ends_both_workers_of_a_pair(tmp_path: Path) -> None:
    launcher = interrupting((sys.executable, str(WORKER)), {"k3": "hang"})
    plan = replace(PLAN, protocol="side-by-side")
    turns = plan_turns(ARMS, protocol="side-by-side", starts_per_arm=1)
    with pytest.raises(KeyboardInterrupt):
        run_grid(tmp_path, plan=plan, turns=turns, launcher=launcher)
    assert not list(tmp_path.glob("*.jsonl*"))


def test_blocks_of_a_pair_alternate_and_each_side_knows_its_partner(tmp_path: Path) -> None:
    recorder = Recorder()
    plan = replace(PLAN, protocol="side-by-side", blocks=2)
    turns = plan_turns(ARMS, protocol="side-by-side", starts_per_arm=1)[:1]
    assert run_grid(tmp_path, plan=plan, turns=turns, launcher=recorder.launcher) == 2
    order = [line.split()[1] for line in recorder.lines if line.startswith("block")]
    assert order == ["ar", "k3", "k3", "ar", "ar", "k3", "k3", "ar"]
    plain, drafted = read_starts(tmp_path)
    assert (plain.beside, drafted.beside, plain.round, drafted.round) == ("k3", "ar", 0, 0)
    assert [(cell.batch_size, cell.block) for cell in drafted.cells] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    again = Recorder()
    run_grid(tmp_path, plan=plan, turns=turns, launcher=again.launcher)
    assert again.started() == []


@pytest.mark.parametrize("behaviour", ["crash", "half", "nothing"])
def test_a_pair_of_which_one_fails_is_void_as_a_whole(tmp_path: Path, behaviour: str) -> None:
    recorder = Recorder({"k3": behaviour})
    assert recorder.run(tmp_path, ARMS, starts=1, protocol="side-by-side") == 2
    assert [(start.arm, start.beside) for start in read_starts(tmp_path)] == [("ar", "ar_twin"), ("ar_twin", "ar")]
    assert {failure["start"] for failure in read_failures(tmp_path)} == {0, 1}
    with pytest.raises(ValueError, match="every start of the other arms failed"):
        require_both_sides(tmp_path)
    assert Recorder().run(tmp_path, ARMS, starts=1, protocol="side-by-side") == 4


def test_the_second_engine_of_a_pair_is_loaded_when_the_first_one_is(tmp_path: Path) -> None:
    recorder = Recorder({"ar": "crash"})
    recorder.run(tmp_path, ARMS, starts=1, protocol="side-by-side")
    assert "k3" not in recorder.started()
    failure = read_json(tmp_path / "001-k3.failed.json")
    assert (failure["reason"], failure["log_tail"]) == ("ended because its partner failed", [])
