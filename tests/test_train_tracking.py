"""Where metrics go: metrics.jsonl over restarts, and a real offline Weights & Biases run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.heads.files import read_json
from eyas.train.tracking import METRICS_NAME, JsonLines, Wandb, read_metrics
from tests import training


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    first = JsonLines(path, resumed_step=0)
    for step in (1, 2, 3):
        first.log({"step": step, "kl_1": 1.0})
    first.finish()
    with path.open("a") as stream:
        stream.write('{"step": 4, "kl')  # cut by a kill
    second = JsonLines(path, resumed_step=2)
    second.log({"step": 3, "kl_1": 0.5})
    second.finish()
    assert [(record["step"], record["kl_1"]) for record in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_wandb_logs_the_run_offline_and_keeps_its_id(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tokens, features = training.make_inputs(tmp_path, target=tiny_target)
    loop = training.shorter(training.LOOP, epochs=1)
    run = tmp_path / "run"
    for _ in range(2):  # the second call finds everything done and joins the same run
        training.train(run, target=tiny_target, tokens=tokens, features=features, loop=loop, tracker="wandb")
    identity = read_json(run / "wandb-id.json")
    offline = sorted(path for path in (run / "wandb").glob("offline-run-*"))
    assert offline
    assert all(path.name.endswith(identity) for path in offline)
    inspected = subprocess.run(
        [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--summary", "--json", str(offline[0])],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    summary = json.loads(inspected.stdout)
    assert summary["run_id"] == identity
    tau = next(
        record["heldout/tau"] for record in reversed(read_metrics(run / METRICS_NAME)) if "heldout/tau" in record
    )
    assert tau in summary["summary"].values() or f"{tau:.6}" in inspected.stdout


def test_a_missing_wandb_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"eyas\[wandb\]"):
        Wandb(tmp_path, name="x", settings={})
