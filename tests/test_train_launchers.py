"""Signals to the launcher of two processes: both save, and the next start goes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.heads.files import read_json
from tests import training

ACCELERATE = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no "
    "--main_process_port 0"
)
TORCHRUN = "torch.distributed.run --standalone --nproc-per-node 2"
SCRIPT = """
import os, sys
from pathlib import Path
from eyas.train.loop import Trainer
from eyas.train.preemption import EXIT_REQUEUE, Preempted
from tests import training

run, target, tokens, features, ready = map(Path, sys.argv[1:])
after = Trainer._after_step


def told(self, progress):
    if self.state.step == 5 and self.engine.rank == 0:
        ready.write_bytes(b"5")
    return after(self, progress)


Trainer._after_step = told
loop = training.shorter(training.LOOP, epochs=1000)
try:
    training.train(run, target=target, tokens=tokens, features=features, loop=loop)
except Preempted as stopped:
    Path(run, f"stopped-{os.environ['RANK']}").write_text(str(stopped.step))
    sys.exit(EXIT_REQUEUE)
"""


def wait_for(fifo: Path, *, seconds: float) -> None:
    """Until a process has written to the pipe."""
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert select.select([reading], [], [], seconds)[0], f"nothing came within {seconds:g} s"
    finally:
        os.close(reading)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "number", "environment"),
    [
        (ACCELERATE, signal.SIGTERM, {}),
        (ACCELERATE, signal.SIGUSR2, {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"}),
        (TORCHRUN, signal.SIGINT, {}),
    ],
    ids=["accelerate-TERM", "accelerate-USR2", "torchrun-INT"],
)
def test_a_signal_to_the_launcher_saves_at_one_step(
    launcher: str, number: signal.Signals, environment: dict[str, str], tiny_target: Path, tmp_path: Path
) -> None:
    tokens, features = training.make_inputs(tmp_path, target=tiny_target)
    script, run, ready = tmp_path / "script.py", tmp_path / "run", tmp_path / "ready"
    script.write_text(SCRIPT)
    os.mkfifo(ready)
    command = [sys.executable, "-m", *launcher.split(), str(script)]
    root = str(Path(__file__).parent.parent)
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": root} | environment
    with subprocess.Popen(
        [*command, *map(str, (run, tiny_target, tokens, features, ready))],
        env=os.environ | variables,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait_for(ready, seconds=120)
            process.send_signal(number)
            said = process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert process.returncode != 0, said[-3000:]  # the launcher's own; a batch script asks for the marker
    steps = {(run / f"stopped-{rank}").read_text() for rank in range(2)}
    marker = read_json(run / "REQUEUE")
    assert steps == {str(marker["step"])}
    assert marker["step"] >= 5
    assert marker["signal"] == number.name
    state = read_json(run / "checkpoints" / f"step-{marker['step']:08d}" / "state.json")["state"]
    assert state["step"] == marker["step"]
