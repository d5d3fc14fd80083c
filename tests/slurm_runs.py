"""Runs of `eyas slurm` with SLURM's commands shimmed: a recipe on a disk called shared, and what SLURM says of its jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eyas.heads.files import write_json
from eyas.recipes.cli import app
from eyas.recipes.slurm_jobs import Options
from eyas.slurm.site import Resources
from tests import slurm_shims


def job_line(job: int, state: str, *, name: str = "tiny-train", array: int | None = None, task: str = "") -> str:
    """A line of `scontrol show job -o`."""
    of = "" if array is None else f" ArrayJobId={array} ArrayTaskId={task}"
    return (
        f"JobId={job}{of} JobName={name} JobState={state} Reason=None NodeList=n1 RunTime=00:01:02 Restarts=2 "
        "Command=/elsewhere WorkDir=/\n"
    )


def slurm_says(shared: Path, job: str, *lines: str) -> None:
    """What `scontrol show job` answers from now on; without lines that it does not know the job."""
    path = shared / "shims" / "jobs" / job
    if lines:
        path.write_text("".join(lines))
    else:
        path.unlink(missing_ok=True)


def recipe_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "target": {"model": str(folder / "target")},
        "data": {"conversations": str(folder / "chats.jsonl")},
        "score": {"draft_lengths": [3, 1], "arms": {"ngram": {"method": "ngram", "num_speculative_tokens": 3}}},
    } | changes


def options(**changes: Any) -> Options:
    return Options(**{"resources": Resources(), "extract_tasks": 1, "array": None, "launch": None} | changes)


def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the site file calls shared, with a recipe whose run was done once, and SLURM's commands shimmed."""
    for name, value in slurm_shims.install(tmp_path / "shims").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "target").mkdir()
    (tmp_path / "chats.jsonl").write_text("{}\n")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe_settings(tmp_path)))
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"shared_paths": [str(tmp_path)], "partition": "gpu"}))
    monkeypatch.setenv("EYAS_SLURM", str(tmp_path / "site.yaml"))
    for stage in ("collect", "prepare", "features", "train", "export"):
        stands(tmp_path / "run" / stage, "2000-01-01T00:00:00+00:00")
    return tmp_path


def stands(folder: Path, finished_at: str, **facts: Any) -> None:
    """A stage that is done."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"settings": {}, "seconds": 12.0, "finished_at": finished_at} | facts
    write_json(folder / "manifest.json", facts)


def eyas(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def told(shared: Path) -> list[str]:
    return (shared / "shims" / "log").read_text().splitlines()
