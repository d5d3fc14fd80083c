"""The check of a GPU as a script, tried without one: it runs with four packages, says what is missing, leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import select
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tests.gpu import check, packages, preconditions

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "gpu" / "check.sh"
CPU = torch.device("cpu")
PARTS = ["device", "numerics", "numerics", "step", "extraction", "training"]


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
    for distribution in needed(packages.PACKAGES):
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


def stand_in(folder: Path, body: str) -> str:
    """A Python that has all packages and, asked for the check, does `body`."""
    program = folder / "python"
    program.write_text(f'#!/bin/bash\ncase "$1" in */packages.py) exit 0 ;; esac\n{body}\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("code", [124, 137])
def test_it_stops_by_itself_and_says_so(tmp_path: Path, code: int) -> None:
    """137 is the end of a check that a signal did not reach in time."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "timeout").write_text(
        f'#!/bin/bash\nprintf \'%s \' "$PYTHONPATH" "$PYTHONSAFEPATH" "$@"\nexit {code}\n'
    )
    (programs / "timeout").chmod(0o755)
    python = stand_in(tmp_path, "")
    path = f"{programs}:{os.environ['PATH']}"
    done = run_script("--dry", python=python, TMPDIR=str(tmp_path), PYTHONPATH="/elsewhere", PATH=path)
    assert done.returncode == code
    assert "stopped after 480 s" in done.stderr
    assert done.stdout.startswith(
        f"{ROOT}:{ROOT}/tests/typing:/elsewhere 1 --kill-after=10 480 {python} -m tests.gpu.check --work {tmp_path}/eyas-gpu-check."
    )
    assert list(tmp_path.glob("eyas-*")) == []


def test_stopped_it_takes_along_every_process(tmp_path: Path) -> None:
    """Also one that nobody would end in turn: what it is told is told to the whole group."""
    os.mkfifo(tmp_path / "begun")
    python = stand_in(tmp_path, f'sleep 600 &\necho $! > "{tmp_path}/begun"\nwait')
    script = subprocess.Popen(
        ["bash", str(SCRIPT), "--dry"], env=os.environ | {"PYTHON": python, "TMPDIR": str(tmp_path)}
    )
    grandchild = os.pidfd_open(int((tmp_path / "begun").read_text()))
    script.terminate()
    assert script.wait(timeout=60) == 143
    ended, _, _ = select.select([grandchild], [], [], 60)
    os.close(grandchild)
    assert ended, "it still runs"
    assert list(tmp_path.glob("eyas-*")) == []


def test_a_python_without_the_packages_is_said_in_a_line(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S leaves out what is installed
    bare.chmod(0o755)
    done = run_script("--dry", python=str(bare), PYTHONPATH="", TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert "has no torch, transformers, accelerate, safetensors; install" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("eyas-*")) == []


def test_versions_that_are_too_old_are_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert packages.why_not() is None
    monkeypatch.setattr(packages, "_version", lambda name: "2.0" if name == "torch" else "99")
    reason = packages.why_not()
    assert reason is not None
    assert re.fullmatch(r"has torch 2\.0 \(needed: >=[\d.]+\)", reason)


def test_what_a_gpu_needs_beside_itself_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    free = {"gpu": int(30e9), "disk": int(30e9)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free["gpu"], free["gpu"]))
    monkeypatch.setattr(preconditions.shutil, "disk_usage", lambda _path: Namespace(free=free["disk"]))
    monkeypatch.setattr(preconditions.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(preconditions.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(preconditions.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)

    def reason(*, full: bool = True) -> str:
        return preconditions.why_not(cuda, work=tmp_path / "work", full=full) or ""

    assert reason() == ""
    free["disk"] = int(10e9)
    assert reason() == f"{tmp_path} has 10.0 GB free, and 15 GB are needed; set TMPDIR=..."
    free["gpu"] = int(8e9)
    assert reason().startswith("the GPU has 8.0 GB free, and 20 GB are needed")
    assert reason(full=False) == ""
    (tmp_path / "Python.h").unlink()
    assert reason(full=False).startswith("Python.h is not installed")
    monkeypatch.setattr(preconditions.shutil, "which", lambda _name: None)
    assert reason(full=False).startswith("there is no C compiler")
    monkeypatch.setattr(preconditions.importlib.util, "find_spec", lambda _name: None)
    assert reason(full=False).startswith("this Python has no triton")


def test_what_is_missing_ends_it_before_anything_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "why_not", lambda *_, **__: "there is no C compiler")
    assert check.main(["--dry", "--work", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: there is no C compiler\n"
    assert not (tmp_path / "out").exists()


def test_asked_for_the_cpu_no_part_sees_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ["CUDA_VISIBLE_DEVICES"] != "")
    monkeypatch.setattr(check.Check, "numerics", lambda self: self.device == CPU and not torch.cuda.is_available())
    words = ["--dry", "--device", "cpu", "--only", "numerics", "--work", str(tmp_path), "--out", str(tmp_path / "out")]
    assert check.main(words) == 0


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


def test_too_little_memory_is_no_wrong_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def large(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(check, "compare", large)
    monkeypatch.setattr(check, "in_process", lambda *_: {"error": "ran out of memory", "out_of_memory": True})
    words = ["--dry", "--only", "numerics", "step", "--work", str(tmp_path), "--out", str(tmp_path / "out")]
    assert check.main(words) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "needs more memory than there is: numerics, step K=3"
