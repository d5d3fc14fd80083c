"""The command line: exit codes, one-line errors, and a fast --help."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.recipes import pipeline
from eyas.recipes.cli import app

QUICKSTART = "smollm2-135m-eagle3-cpu"
runner = CliRunner()


def eyas(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    result = runner.invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_help_is_fast_and_lists_the_commands() -> None:
    command = [sys.executable, "-c", "from eyas.recipes.cli import app; app(['--help'])"]
    used: list[float] = []
    shown = ""
    for _ in range(2):  # the first one may have to compile byte code
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert all(name in shown for name in ("run", "prepare", "train", "score", "report", "plan", "doctor"))
    assert min(used) < 0.5, "CPU seconds, because other work on the machine does not count in them"


def test_version() -> None:
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert eyas("--version")[:2] == (0, f"eyas {project['project']['version']}\n")


def test_recipes_ls_cat_validate() -> None:
    assert QUICKSTART in eyas("recipes", "ls")[1]
    assert eyas("recipes", "cat", QUICKSTART)[1].startswith("# EAGLE-3 head for SmolLM2")
    assert eyas("recipes", "validate", QUICKSTART, "run_dir=/x")[:2] == (0, f"{QUICKSTART}: valid, runs in /x\n")


def test_recipes_cp_never_overwrites(tmp_path: Path) -> None:
    assert eyas("recipes", "cp", QUICKSTART, str(tmp_path))[0] == 0
    copy = tmp_path / f"{QUICKSTART}.yaml"
    assert eyas("recipes", "validate", str(copy))[0] == 0
    code, _, stderr = eyas("recipes", "cp", QUICKSTART, str(copy))
    assert (code, stderr) == (2, f"error: {copy} exists; name another file or remove it\n")


@pytest.mark.parametrize("command", ["run", "prepare", "extract", "train", "export", "score", "plan"])
def test_user_errors_are_one_line_and_exit_2(command: str) -> None:
    code, stdout, stderr = eyas(command, QUICKSTART, "train.epoch=1")
    assert (code, stdout) == (2, "")
    assert stderr == "error: overrides: train.epoch: unknown key; did you mean train.epochs?\n"


def test_ctrl_c_ends_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run_until", interrupt)
    code, _, stderr = eyas("train", QUICKSTART)
    assert (code, stderr) == (130, "interrupted; run the same command again to continue\n")


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "runs/x")

    monkeypatch.setattr(pipeline, "run_until", fill)
    code, _, stderr = eyas("train", QUICKSTART)
    assert code == 2
    assert stderr.startswith("error: runs/x: No space left on device; free space")


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_TRACEBACK", "1")
    assert isinstance(runner.invoke(app, ["train", "nosuch"]).exception, ValueError)


@pytest.mark.parametrize(("module", "command"), [("eyas.train", "train"), ("eyas.eval", "score")])
def test_modules_are_the_commands(module: str, command: str) -> None:
    call = [sys.executable, "-m", module]
    refused = subprocess.run([*call, "nosuch"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no recipe file nosuch")
    assert f"eyas {command}" in subprocess.run([*call, "--help"], capture_output=True, text=True, check=True).stdout


def test_recipe_names_complete() -> None:
    environment = os.environ | {"_EYAS_COMPLETE": "complete_bash", "COMP_WORDS": "eyas run smol", "COMP_CWORD": "2"}
    call = [sys.executable, "-c", "from eyas.recipes.cli import app; app(prog_name='eyas')"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert QUICKSTART in done.stdout


def test_report_needs_raw_records(tmp_path: Path) -> None:
    code, _, stderr = eyas("report", str(tmp_path))
    assert code == 2
    assert "holds no raw records" in stderr
