"""The check of a GPU, tried without one: it runs with four packages, notices what is wrong, and leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tests.benchmarks.train_cells import Cell
from tests.gpu import check, numerics
from tests.gpu.numerics import Difference, compare

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "gpu" / "check.sh"
CPU = torch.device("cpu")
PARTS = ["device", "numerics", "numerics", "step", "extraction", "training"]
CELL = Cell(preset="tiny", tokens=96, ttt_steps=2, answer_share=0.75, precision="fp32", document_tokens=48)


def needed(names: tuple[str, ...]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions of these names, and of everything that they require."""
    waiting, seen = list(names), set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        yield found
        for text in found.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)


@pytest.fixture(scope="module")
def four_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to import from that holds torch, transformers, accelerate and safetensors, and what they require."""
    directory = tmp_path_factory.mktemp("four-packages")
    for distribution in needed(check.PACKAGES):
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (directory / top).exists():
                (directory / top).symlink_to(distribution.locate_file(top))  # type: ignore[arg-type]
    return directory


def run_script(*arguments: str, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHON": python} | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.processes
def test_it_runs_with_four_packages_and_leaves_nothing_behind(four_packages: Path, tmp_path: Path) -> None:
    assert not {"eyas", "datasets", "matplotlib", "vllm"} & {path.name for path in four_packages.iterdir()}
    out, temporary = tmp_path / "figures.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    base = str(
        Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    )  # without the environment's packages
    done = run_script(
        "--dry",
        "--out",
        str(out),
        python=base,
        PYTHONPATH=str(four_packages),
        TMPDIR=str(temporary),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all parts passed" in done.stdout
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert [record["part"] for record in records] == PARTS
    trained = records[-1]
    assert trained["last_loss"] < trained["first_loss"]
    assert records[-2]["tokens"] == check.DRY.extracted_tokens
    assert list(temporary.glob("eyas-*")) == []


def test_it_stops_by_itself_and_says_so(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    probed = '[ "$1" = - ] && exit 0'
    stand_in.write_text(f'#!/bin/sh\n{probed}\nprintf \'%s \' "$PYTHONPATH" "$@"\nexit 124\n')
    stand_in.chmod(0o755)
    done = run_script("--dry", python=str(stand_in), TMPDIR=str(tmp_path), PYTHONPATH="/elsewhere")
    assert done.returncode == 124
    assert "stopped after 480 s" in done.stderr
    assert done.stdout.startswith(
        f"{ROOT}:{ROOT}/tests/typing:/elsewhere -m tests.gpu.check --work {tmp_path}/eyas-gpu-check."
    )
    assert list(tmp_path.glob("eyas-*")) == []


def test_stopped_it_takes_the_process_of_a_step_along() -> None:
    before = signal.getsignal(signal.SIGTERM)
    check.end_on_sigterm()
    child = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    try:
        with pytest.raises(SystemExit) as ended:
            subprocess.run([sys.executable, "-c", child], check=False, timeout=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


def test_a_python_without_the_packages_is_said_in_a_line(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S leaves out what is installed
    bare.chmod(0o755)
    done = run_script("--dry", python=str(bare), PYTHONPATH="", TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert "has no torch, transformers, accelerate, safetensors; install" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("eyas-*")) == []


def test_without_a_gpu_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main(["--work", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "--dry" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    ran = []
    monkeypatch.setattr(check, "compare", broken)
    monkeypatch.setattr(check, "in_process", lambda *_: {"error": "ended with 1"})
    monkeypatch.setattr(check.Check, "extraction", lambda _self: ran.append("extraction") is None)
    monkeypatch.setattr(check.Check, "training", lambda _self: False)
    assert check.main(["--dry", "--work", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: numerics, step K=3, training"
    assert ran == ["extraction"]


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device dropped one document's share of the gradient of one matrix."""
    right = compare(CELL, device=CPU, precisions=["fp32"])[0]
    assert right.fits
    assert right.gradient < 1e-5
    on_device = numerics.on_device

    def wrong(*args: Any, **options: Any) -> numerics.Outcome:
        outcome = on_device(*args, **options)
        outcome.gradients["fc.weight"] *= 0.99
        return outcome

    monkeypatch.setattr(numerics, "on_device", wrong)
    found = compare(CELL, device=CPU, precisions=["fp32"])[0]
    assert not found.fits
    assert found.parameter == "fc.weight"
    assert found.gradient == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("changes", [{"loss": 2.1}, {"loss": float("nan")}, {"gradient": float("nan")}])
def test_what_is_off_or_not_a_number_does_not_fit(changes: dict[str, float]) -> None:
    right = Difference(
        precision="fp32", loss=2.0, reference_loss=2.0, hits=3, reference_hits=3, gradient=1e-6, parameter="fc.weight"
    )
    assert right.fits
    assert not replace(right, **changes).fits  # type: ignore[arg-type]
