"""The lock on a run directory: between processes, between nodes, and where a disk has none."""

from __future__ import annotations

import errno
import fcntl
import time
from pathlib import Path

import pytest

from eyas.recipes.run_lock import run_lock


def test_two_runs_in_one_directory_refuse_each_other(tmp_path: Path) -> None:
    with (
        run_lock(tmp_path),
        pytest.raises(ValueError, match=r"in use by another eyas process \(id \d+ on [^)]+\)"),
        run_lock(tmp_path),
    ):
        pass
    with run_lock(tmp_path):
        pass


def test_a_requeued_job_waits_for_the_lock_of_its_dead_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server may keep it for a while; a job that is not the holder does not wait."""
    waited: list[float] = []
    monkeypatch.setenv("SLURM_JOB_ID", "55")
    with (tmp_path / ".lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write("id 17 on another-node, SLURM job 55")
        stream.flush()

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            fcntl.flock(stream, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", sleep)
        with run_lock(tmp_path):
            assert waited == [1]
            monkeypatch.setenv("SLURM_JOB_ID", "56")
            with pytest.raises(ValueError, match="SLURM job 55"), run_lock(tmp_path):
                pass
    assert (tmp_path / ".lock").read_text() == ""


def test_a_disk_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"this disk gives no locks \(Function not implemented\)"), run_lock(tmp_path):
        pass
