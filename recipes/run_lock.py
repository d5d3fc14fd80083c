"""The lock on a run directory: one process writes there, on whichever node, and its job is told by name."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LOCK = ".lock"
LEASE_SECONDS = 120
"""How long a file server may keep the lock of a node that died; a requeued job waits so long for its own."""


@contextmanager
def run_lock(run_dir: Path, *, part: str | None = None) -> Iterator[None]:
    """Hold `run_dir`, or a part of it, for this process; the kernel lets go when the process ends, however it ends.

    Raises:
        ValueError: another process holds it, or the disk knows no locks.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / (LOCK if part is None else f"{LOCK}-{part}")
    with path.open("a+", encoding="utf-8") as stream:
        deadline = time.monotonic() + LEASE_SECONDS
        while not _take(stream):
            holder = holder_of(path)
            if not _is_own_lost(holder) or time.monotonic() > deadline:
                raise ValueError(
                    f"{run_dir} is in use by another eyas process ({holder or 'unknown'}); "
                    "wait for it, or set run_dir=... to write elsewhere"
                )
            time.sleep(1)
        stream.truncate(0)
        stream.write(_holder())
        stream.flush()
        try:
            yield
        finally:
            stream.truncate(0)  # who reads it later finds nobody


@contextmanager
def short_lock(path: Path) -> Iterator[None]:
    """Hold `path` for a moment, waiting for whoever else does.

    Raises:
        ValueError: the disk knows no locks.
    """
    with path.open("a", encoding="utf-8") as stream:
        _take(stream, wait=True)
        yield


def holder_of(path: Path) -> str:
    """Who wrote itself into a lock's file; "" when it let go."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def job_of(holder: str) -> str | None:
    """The SLURM job of a holder."""
    match = re.search(r"SLURM job (\d+)", holder)
    return match[1] if match else None


def is_held(path: Path) -> bool:
    """Whether a process holds the lock at `path`, as far as this node can see."""
    if not path.is_file():
        return False
    with path.open("a", encoding="utf-8") as stream:
        return not _take(stream)


def _take(stream: IO[str], *, wait: bool = False) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ValueError(
            f"{stream.name}: this disk gives no locks ({error.strerror}), so two jobs could write into one run; set "
            "run_dir=... to another disk, or have it mounted with them (Lustre: -o flock)"
        ) from error
    return True


def _is_own_lost(holder: str) -> bool:
    """Whether the holder was this very job before it was requeued: a process that is gone, or on another node."""
    own = os.environ.get("SLURM_JOB_ID")
    if own is None or job_of(holder) != own:
        return False
    match = re.match(r"id (\d+) on (\S+?),", holder)
    here = match is not None and match[2] == socket.gethostname()
    return not (here and match is not None and Path(f"/proc/{match[1]}").exists())


def _holder() -> str:
    """This process as another one would look for it: on another node its number alone says nothing."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"id {os.getpid()} on {socket.gethostname()}" + (f", SLURM job {job}" if job else "")
