"""Where metrics go: metrics.jsonl over restarts, real offline wandb runs and event files, and trackers that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wandb

from eyas.heads.files import read_json, write_json
from eyas.train import tensorboard_tracker, wandb_tracker
from eyas.train.preemption import Preempted
from eyas.train.tracking import (
    METRICS_NAME,
    JsonLines,
    NoTracker,
    Tracker,
    TrackingSettings,
    open_trackers,
    read_metrics,
)
from eyas.train.wandb_tracker import restore_run_id, stored_run_id
from tests.wandb_offline import inspected, offline_runs

SETTINGS = TrackingSettings(
    kinds=("wandb",),
    name="tiny",
    project="birds",
    group="nest",
    tags=("one", "two"),
    mode="offline",
    config={"recipe": {"train": {"epochs": 3}}, "git": {"commit": "abc", "dirty": False}},
)
TENSORBOARD = replace(SETTINGS, kinds=("tensorboard",))
MISSING = re.compile(r"warning: (wandb|tensorboard): .* is not installed \(pip install 'eyas\[\1\]'\); going on")


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the developer's own wandb settings, keys and folders, and nothing that wandb remembers of other tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()


def use(
    run_dir: Path,
    action: Callable[[Tracker], None],
    *,
    settings: TrackingSettings = SETTINGS,
    resumed_step: int = 0,
    main: bool = True,
) -> list[str]:
    """One start of a run; what was said."""
    said: list[str] = []
    with open_trackers(settings, run_dir=run_dir, resumed_step=resumed_step, main=main, say=said.append) as tracker:
        action(tracker)
    return said


def log(tracker: Tracker, *, steps: range) -> None:
    for step in steps:
        tracker.log({"step": step, "kl_1": 1.0 / step})
        if step % 2 == 0:
            tracker.log({"step": step, "heldout/tau": 1.0 + step})


# metrics.jsonl


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    first = JsonLines(path, resumed_step=0)
    for step in (1, 2, 3):
        first.log({"step": step, "kl_1": 1.0})
    first.close()
    with path.open("ab") as stream:
        stream.write(b'{"step": 4, "name": "\xc3')  # cut by a kill, in the middle of a letter
    second = JsonLines(path, resumed_step=2)
    second.log({"step": 3, "kl_1": 0.5})
    second.close()
    assert [(record["step"], record["kl_1"]) for record in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 0.5)]


@pytest.mark.parametrize("rest", ["", "{", '{"st', "1", "null", "[1]", '{"kl_1": 1.0}', "\0\0\0\0", "\n\n"])
def test_what_is_no_record_is_left_out(rest: str, tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    path.write_text('{"step": 1}\n' + rest)
    assert read_metrics(path) == [{"step": 1}]
    lines = JsonLines(path, resumed_step=1)
    lines.log({"step": 2})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_line_is_on_its_way_to_disk_at_once_and_is_json(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    lines = JsonLines(path, resumed_step=0)
    lines.log({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "kl_1": 0.5})
    (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None, "kl_1": 0.5}
    lines.close()


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    assert use(tmp_path, lambda tracker: log(tracker, steps=range(1, 3)), main=False) == []
    assert list(tmp_path.iterdir()) == []


# wandb


def test_a_run_directory_that_lost_its_wandb_id_gets_that_of_its_checkpoint(tmp_path: Path) -> None:
    assert stored_run_id(tmp_path) is None
    restore_run_id(tmp_path, None)
    assert stored_run_id(tmp_path) is None
    restore_run_id(tmp_path, "of-the-checkpoint")
    assert stored_run_id(tmp_path) == "of-the-checkpoint"
    restore_run_id(tmp_path, "another")
    assert stored_run_id(tmp_path) == "of-the-checkpoint"


def test_an_offline_run_is_named_where_it_will_lie(tmp_path: Path) -> None:
    said = use(
        tmp_path / "train.partial", lambda _tracker: None, settings=replace(SETTINGS, kept_in=tmp_path / "train")
    )
    (run,) = offline_runs(tmp_path / "train.partial")
    kept = tmp_path / "train" / run.relative_to(tmp_path / "train.partial")
    assert said[0].endswith(f", offline; upload at the end with: wandb sync {kept}")


def test_wandb_has_curves_config_and_artifacts_of_one_run_over_restarts(tmp_path: Path) -> None:
    head = tmp_path / "head"
    write_json(head / "config.json", {"a": 1})

    def preempted(tracker: Tracker) -> None:
        log(tracker, steps=range(1, 4))
        raise Preempted(signal_number=signal.SIGTERM, step=3)

    def completed(tracker: Tracker) -> None:
        log(tracker, steps=range(4, 6))
        tracker.artifact(head, kind="head")
        tracker.artifact(head / "config.json", kind="report")

    with pytest.raises(Preempted):
        use(tmp_path, preempted)
    said = use(tmp_path, completed, resumed_step=3)
    identity = read_json(tmp_path / "wandb-id.json")
    runs = offline_runs(tmp_path)
    assert len(runs) == 2
    assert all(identity in run.name for run in runs)
    assert said == [f"wandb: run {identity}, offline; upload with: wandb sync {runs[1]}"]

    summaries = [inspected(run, "--summary")[0] for run in runs]
    assert [summary["exit_code"] for summary in summaries] == [75, 0]
    for summary in summaries:
        assert (summary["run_id"], summary["project"], summary["name"]) == (identity, "birds", "tiny")
        assert summary["config"]["recipe"] == SETTINGS.config["recipe"]
        assert summary["config"]["git"] == SETTINGS.config["git"]
    rows = [row["history"]["item"] for run in runs for row in inspected(run) if row["type"] == "history"]
    curve = {row["_step"]: row["train/kl_1"] for row in rows}
    assert curve == pytest.approx({step: 1.0 / step for step in range(1, 6)})
    assert {row["_step"]: row["eval/tau"] for row in rows if "eval/tau" in row} == {2: 3.0, 4: 5.0}
    described = next(row["run"] for row in inspected(runs[0]) if row["type"] == "run")
    assert (described["run_group"], described["tags"]) == ("nest", ["one", "two"])
    artifacts = [row["artifact"] for row in inspected(runs[1]) if row["type"] == "artifact"]
    assert {(artifact["type"], artifact["name"]) for artifact in artifacts} == {
        (kind, f"{kind}-{identity}") for kind in ("head", "report")
    }
    assert len(read_metrics(tmp_path / METRICS_NAME)) == 7


def test_wandb_takes_from_the_environment_what_the_recipe_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PROJECT": "nests", "RUN_GROUP": "g", "TAGS": "x,y", "MODE": "offline", "NAME": "n", "RUN_ID": "id7"}
    for name, value in environment.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    settings = replace(SETTINGS, project=None, group=None, tags=(), mode=None)
    use(tmp_path, lambda tracker: log(tracker, steps=range(1, 2)), settings=settings)
    (run,) = offline_runs(tmp_path)
    described = next(row["run"] for row in inspected(run) if row["type"] == "run")
    found = [described[key] for key in ("project", "run_group", "tags", "display_name", "run_id")]
    assert found == ["nests", "g", ["x", "y"], "n", "id7"]
    assert wandb_tracker.run_id(tmp_path) == "id7"


def test_wandb_that_dies_in_the_middle_is_one_warning(tmp_path: Path) -> None:
    """Its process is killed; in a process of its own, since wandb's exit hooks complain about it too."""
    script = (
        "import os, signal, subprocess, sys\nfrom pathlib import Path\n"
        "from tests.test_train_tracking import SETTINGS, METRICS_NAME, log, open_trackers, read_metrics\n"
        "run = Path(sys.argv[1])\n"
        "with open_trackers(SETTINGS, run_dir=run, resumed_step=0, main=True, say=print) as tracker:\n"
        "    log(tracker, steps=range(1, 3))\n"
        "    children = subprocess.run(['pgrep', '-P', str(os.getpid()), 'wandb'], capture_output=True, text=True)\n"
        "    for child in children.stdout.split():\n"
        "        os.kill(int(child), signal.SIGKILL)\n"
        "        while Path('/proc', child, 'stat').read_text().split()[2] != 'Z': pass\n"
        "    assert children.stdout.split()\n"
        "    log(tracker, steps=range(3, 6))\n"
        "    tracker.artifact(run, kind='head')\n"
        "print(len(read_metrics(run / METRICS_NAME)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    started, warned, count = done.stdout.splitlines()
    assert started.startswith("wandb: run ")
    assert warned.startswith("warning: wandb: ") and warned.endswith(f"{METRICS_NAME} of the training has every curve")
    assert count == "7"


def test_wandb_without_a_key_is_one_warning_and_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", pytest.fail)
    said = use(tmp_path, lambda tracker: log(tracker, steps=range(1, 3)), settings=replace(SETTINGS, mode=None))
    (line,) = said
    assert line.startswith("warning: wandb: no API key (set WANDB_API_KEY, run `wandb login`, or set tracking.mode")
    assert len(read_metrics(tmp_path / METRICS_NAME)) == 3


def test_a_server_that_never_answers_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_tracker, "INIT_TIMEOUT", 2.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()  # takes connections and never says a word
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "local" + "0" * 40)
        started = time.perf_counter()
        said = use(tmp_path, lambda tracker: log(tracker, steps=range(1, 3)), settings=replace(SETTINGS, mode="online"))
    assert time.perf_counter() - started < 20
    (line,) = said
    assert line.startswith("warning: wandb: ")
    assert len(read_metrics(tmp_path / METRICS_NAME)) == 3


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_missing_package_is_one_warning(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    settings = replace(SETTINGS, kinds=(kind,))
    (line,) = use(tmp_path, lambda tracker: log(tracker, steps=range(1, 3)), settings=settings)
    assert MISSING.match(line), line
    assert len(read_metrics(tmp_path / METRICS_NAME)) == 3


# TensorBoard


def points(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / tensorboard_tracker.DIRECTORY))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_curves_of_a_resumed_run_once(tmp_path: Path) -> None:
    said = use(tmp_path, lambda tracker: log(tracker, steps=range(1, 5)), settings=TENSORBOARD)

    def again(tracker: Tracker) -> None:
        for step in (3, 4, 5):
            tracker.log({"step": step, "kl_1": 7.0})
        tracker.artifact(tmp_path, kind="head")

    said += use(tmp_path, again, settings=TENSORBOARD, resumed_step=2)
    assert said == []
    found = points(tmp_path)
    assert set(found) == {"train/kl_1", "eval/tau"}
    assert found["train/kl_1"] == [(1, 1.0), (2, 0.5), (3, 7.0), (4, 7.0), (5, 7.0)]
    assert found["eval/tau"] == [(2, 3.0)]


def test_a_tracker_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.tracking import TensorBoardTracker

    def full(*_arguments: object, **_keywords: object) -> None:
        raise OSError("No space left on device\nand more")

    def action(tracker: Tracker) -> None:
        log(tracker, steps=range(1, 3))
        monkeypatch.setattr(TensorBoardTracker, "log", full)
        log(tracker, steps=range(3, 5))

    said = use(tmp_path, action, settings=replace(SETTINGS, kinds=("tensorboard", "wandb")))
    assert [line for line in said if line.startswith("warning")] == [
        f"warning: tensorboard: No space left on device; going on without it, {METRICS_NAME} of the training has every curve"
    ]
    (run,) = offline_runs(tmp_path)
    assert [row["history"]["item"]["_step"] for row in inspected(run) if row["type"] == "history"] == [1, 2, 3, 4]
    assert set(points(tmp_path)["train/kl_1"]) == {(1, 1.0), (2, 0.5)}


def test_a_person_may_still_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Interrupted(NoTracker):
        def log(self, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt(record["step"])

        def close(self, *, exit_code: int = 0) -> None:
            closed.append(exit_code)

    monkeypatch.setattr("eyas.train.tracking.TensorBoard", lambda *_arguments, **_keywords: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        use(tmp_path, lambda tracker: log(tracker, steps=range(1, 3)), settings=TENSORBOARD)
    assert closed == [1]
