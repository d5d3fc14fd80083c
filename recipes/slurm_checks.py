"""What is said before a job is submitted: a queue's wait is too long to learn that the job could not have run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from eyas.heads.files import read_json
from eyas.recipes.schema import Recipe
from eyas.slurm.sbatch import JobState, job_states

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every node has for itself on any usual machine."""

RECORD = Path("slurm") / "jobs.json"
"""Inside a run directory: the jobs that were submitted for it."""

START_SECONDS = 120
"""What a job takes, at least, before its first step: imports, weights, the features' index."""


def check_paths(paths: Sequence[Path], *, shared: Sequence[str]) -> None:
    """Refuse files that other nodes would not see.

    Args:
        shared: folders that the site says are shared, whatever they are called.

    Raises:
        ValueError: a path lies on a node-local disk.
    """
    local = [*NODE_LOCAL, *([os.environ["TMPDIR"]] if os.environ.get("TMPDIR") else [])]
    for path in paths:
        place = path.expanduser().absolute().resolve()
        if any(place.is_relative_to(Path(folder).resolve()) for folder in shared):
            continue
        for folder in local:
            if place.is_relative_to(Path(folder).resolve()):
                raise ValueError(
                    f"{path} lies in {folder}, which is another disk on every node; move it to a shared one, or name the "
                    "folder in shared_paths of the site file if it is shared here"
                )


def live_jobs(run_dir: Path) -> list[JobState]:
    """Jobs of a run directory that SLURM still has in its queue."""
    if not (run_dir / RECORD).is_file():
        return []
    ids = [entry["job"] for entry in read_json(run_dir / RECORD)["jobs"]]
    return [state for job in ids for state in job_states(job) if state.live]


def check_no_live_job(run_dir: Path) -> None:
    """
    Raises:
        ValueError: a job of this run is waiting or running.
    """
    live = live_jobs(run_dir)
    if live:
        shown = ", ".join(f"{state.job} ({state.state})" for state in live[:4])
        raise ValueError(
            f"{run_dir} is held by job {shown}; wait for it, end it with `scancel {live[0].job}`, or set run_dir=... to "
            "write elsewhere"
        )


def check_time(recipe: Recipe, *, time: str | None, signal_seconds: int, step_seconds: float | None) -> None:
    """Refuse a time limit in which a training job could not come to its first checkpoint.

    Args:
        time: as sbatch takes it; None = the partition's default, which is not known here.
        step_seconds: of one optimiser step, when it has been measured or can be estimated.

    Raises:
        ValueError: the limit is no time, or too short.
    """
    if time is None:
        return
    limit = seconds_of(time)
    left = limit - signal_seconds - START_SECONDS
    if left <= 0:
        raise ValueError(
            f"--time {time} leaves nothing: the job is told to stop {signal_seconds} s before its end (signal_seconds), and "
            f"its start takes about {START_SECONDS} s; ask for more time or signal later"
        )
    if step_seconds is None:
        return
    interval = recipe.train.checkpoint_every * step_seconds
    if left < interval:
        raise ValueError(
            f"--time {time} leaves {left:.0f} s of training, and train.checkpoint_every={recipe.train.checkpoint_every} steps "
            f"take about {interval:.0f} s: a job that dies would lose all of it. Ask for more time, or checkpoint more often"
        )


def seconds_of(time: str) -> int:
    """Seconds of a time limit in one of sbatch's forms: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s.

    Raises:
        ValueError: it is none of them.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise ValueError(f"--time {time!r} is no time limit; write minutes, hours:minutes:seconds or days-hours")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    assert first is not None
    if days is not None:
        return ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)


def measured_step_seconds(run_dir: Path, *, batch_tokens: int) -> float | None:
    """Seconds of a step by the newest record of this run's training; None before it has trained."""
    import json

    for name in ("train.partial", "train"):
        path = run_dir / name / "metrics.jsonl"
        if not path.is_file():
            continue
        rates = [
            record["tokens_per_second"]
            for record in map(json.loads, path.read_text().splitlines())
            if "tokens_per_second" in record
        ]
        if rates and rates[-1] > 0:
            return batch_tokens / rates[-1]
    return None
