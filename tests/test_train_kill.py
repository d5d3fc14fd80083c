"""A training run that is killed again and again, at any moment, ends with the same bits as one that is left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.files import read_json
from eyas.train.checkpoint_files import check_directory, whole_directories
from eyas.train.preemption import EXIT_REQUEUE
from eyas.train.tracking import METRICS_NAME, read_metrics
from tests import training

ROOT = Path(__file__).parent.parent
KILLS = 25
SEED = 3
CURVE = ("step", "loss", "kl_1", "grad_norm", "learning_rate", "tokens", "slots", "heldout/tau")


class Worker:
    """The process of kill_worker.py."""

    def __init__(self, *, inputs: dict[str, str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._inputs = inputs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kill_worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready\n"

    def train(self, out: Path, *, fault: dict[str, Any] | None = None) -> dict[str, Any]:
        """One attempt; how it ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._inputs | {"out": str(out), "fault": fault}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture(scope="module")
def worker(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    tokens, features = training.make_inputs(tmp_path_factory.mktemp("inputs"), target=tiny_target)
    worker = Worker(inputs={"target": str(tiny_target), "tokens": str(tokens), "features": str(features)})
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def undisturbed(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that was left alone, and how it went."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    end = worker.train(run)
    assert end["code"] == 0, log_of(run)
    return run, end


def log_of(run: Path) -> str:
    return Path(f"{run}.log").read_text()[-3000:]


def assert_same(run: Path, reference: Path) -> None:
    """Weights, optimiser state, head, curves and figures, bit by bit."""
    newest, expected = (whole_directories(one / "checkpoints") for one in (run, reference))
    assert [path.name for path in newest] == [path.name for path in expected]
    names = [f"checkpoints/{newest[-1].name}/{name}.safetensors" for name in ("weights", "optimizer", "rng")]
    for name in (*names, "head/model.safetensors", "heldout.json"):
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name
    ours, theirs = (
        [{key: record.get(key) for key in CURVE} for record in read_metrics(one / METRICS_NAME)]
        for one in (run, reference)
    )
    assert ours == theirs
    assert {path.name for path in run.iterdir()} == {path.name for path in reference.iterdir()}
    assert {path.name for path in (run / "heads").iterdir()} == {path.name for path in (reference / "heads").iterdir()}


def random_fault(generator: random.Random, end: dict[str, Any]) -> dict[str, Any]:
    """A moment of a run like the one that ended so."""
    kind = generator.choice(["forward", "file", "file", "time"])
    moment = generator.uniform(0.2, 1) * end["seconds"] if kind == "time" else generator.randint(1, end["counts"][kind])
    return {"kind": kind, "at": moment, "signal": signal.SIGKILL}


def test_killed_at_random_moments(worker: Worker, undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """25 SIGKILLs: at a forward, before a file operation (of checkpoints mostly), or at any time at all."""
    reference, end = undisturbed
    generator = random.Random(SEED)
    kills, runs = 0, 0
    run = tmp_path / "run-0"
    while kills < KILLS or (run / "checkpoints").exists():
        outcome = worker.train(run, fault=random_fault(generator, end) if kills < KILLS else None)
        for directory in whole_directories(run / "checkpoints"):
            check_directory(directory)  # raises when one looks whole and is not
        if outcome["code"] == -signal.SIGKILL:
            kills += 1
            continue
        assert outcome["code"] == 0, log_of(run)
        assert "broken" not in log_of(run)
        assert_same(run, reference)
        runs += 1
        run = tmp_path / f"run-{runs}"
    assert runs >= 1
    print(f"{kills} kills in {runs} runs")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_stopped_by_a_signal(
    number: signal.Signals, worker: Worker, undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reference, end = undisturbed
    run, marker = tmp_path / "run", tmp_path / "run" / "REQUEUE"
    middle = end["counts"]["forward"] // 2
    stopped = worker.train(run, fault={"kind": "forward", "at": middle, "signal": number})
    assert stopped["code"] == EXIT_REQUEUE, log_of(run)
    content = read_json(marker)
    newest = whole_directories(run / "checkpoints")[-1]
    assert content["signal"] == number.name
    assert newest.name == f"step-{content['step']:08d}"
    assert 0 < content["step"] < read_metrics(reference / METRICS_NAME)[-1]["step"]
    assert worker.train(run)["code"] == 0, log_of(run)
    assert not marker.exists()
    assert_same(run, reference)
