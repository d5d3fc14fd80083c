"""What is said before a job is submitted: a queue's wait is too long to learn that the job could not have run."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.recipes.load import BUILTIN_SCHEME
from eyas.recipes.run_lock import LOCK, holder_of, is_held, job_of
from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_jobs import Link
from eyas.recipes.slurm_record import live_jobs, read_entries
from eyas.recipes.sources import expand, local_files
from eyas.recipes.sweep import FOLDER as SWEEP
from eyas.recipes.sweep import sweep_points
from eyas.slurm.sbatch import job_states
from eyas.slurm.site import Site

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every node has for itself on any usual machine."""

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


def named_paths(recipe: Recipe, *, launch: str | None, site: Site) -> list[Path]:
    """Files and directories on disk that the jobs of a recipe read; of data files, the directories.

    Raises:
        ValueError: one of them does not exist.
    """
    guard = recipe.data.guard
    sources = [*recipe.data.all_sources, *(guard.sources if guard.enabled else ())]
    data = {
        file.resolve().parent
        for source in sources
        for entry in expand(source)
        if not str(entry.path).startswith(BUILTIN_SCHEME)
        for file in local_files(entry)
    }
    image = site.container.image if site.container and site.container.image.startswith(("/", ".", "~")) else None
    named = {
        "target.model": recipe.target.model if _is_path(recipe.target.model) else None,
        "init.head": recipe.init.head,
        "score.head": recipe.score.head,
        **{f"score.prompt_sets.{name}": each.path for name, each in recipe.score.prompt_sets.items()},
        "--launch": launch,
        "container.image": image,
        "EYAS_SETUP": site.environment.get("EYAS_SETUP"),
    }
    found = sorted(data)
    for what, path in named.items():
        if path is None or path.startswith(BUILTIN_SCHEME):
            continue
        if not Path(path).expanduser().exists():
            raise ValueError(f"{what}: {path} does not exist (looked for from {Path.cwd()})")
        found.append(Path(path))
    return found


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or Path(model).is_dir()


def check_not_held(run_dir: Path) -> None:
    """Refuse a run directory in which a job or another process may write.

    Raises:
        ValueError: one waits or runs, or SLURM cannot be asked.
    """
    live = live_jobs(run_dir)
    if live:
        shown = ", ".join(f"{state.job} ({state.state})" for state in live[:4])
        raise ValueError(
            f"{run_dir} is held by job {shown}; wait for it, end it with `eyas slurm cancel {run_dir}`, or set run_dir=... "
            "to write elsewhere"
        )
    # Jobs that were submitted by hand are not in the record, but they leave their number in the lock.
    for path in sorted([*run_dir.glob(f"{LOCK}*"), *run_dir.glob(f"{SWEEP}/*/{LOCK}*")]):
        holder = holder_of(path)
        job = job_of(holder)
        if job is not None and job != os.environ.get("SLURM_JOB_ID"):
            held = any(state.live for state in job_states(job))
        else:
            held = bool(holder) and is_held(path)
        if held:
            raise ValueError(
                f"{path.parent} is in use by another eyas process ({holder}); wait for it, "
                f"{f'end it with `scancel {job}`' if job else 'end it'}, or set run_dir=... to write elsewhere"
            )


def check_limits(links: Sequence[Link], recipe: Recipe, *, signal_seconds: int, say: Callable[[str], None]) -> None:
    """Refuse time limits that no job could use: told to stop as it starts, or before its first checkpoint.

    Raises:
        ValueError: a limit is no time, or too short.
    """
    for link in links:
        time = link.job.resources.time
        if time is None:
            continue
        if seconds_of(time) <= signal_seconds:
            raise ValueError(
                f"{link.stage}: --time {time} leaves nothing: the job is told to stop {signal_seconds} s before its end "
                "(signal_seconds); ask for more time or signal later"
            )
        if link.job.template == "train":
            _check_training(link, recipe, time=time, signal_seconds=signal_seconds, say=say)


def _check_training(link: Link, recipe: Recipe, *, time: str, signal_seconds: int, say: Callable[[str], None]) -> None:
    """The speed is that of this run, or of the slowest combination for one that has not trained."""
    run_dir = recipe.run_directory.absolute()
    recipes = [point.recipe for point in sweep_points(recipe)] if recipe.sweep else [recipe]
    rates = [measured_rate(each.run_directory) for each in recipes]
    known = [rate for rate in rates if rate is not None]
    scale = _scale(run_dir, processes=link.processes)
    for each, rate in zip(recipes, rates, strict=True):
        speed = rate or min(known, default=None)
        step = None if speed is None else each.train.batch_tokens / (speed * scale)
        check_time(each, time=time, signal_seconds=signal_seconds, step_seconds=step)
    if not known:
        say(f"{link.stage}: whether a checkpoint fits into {time} is not checked: nothing was trained in {run_dir} yet")


def _scale(run_dir: Path, *, processes: int) -> float:
    """How much faster than the last training of a run one on `processes` is, at best."""
    before = [entry.processes for entry in read_entries(run_dir) if entry.stage == "train"]
    return processes / before[-1] if before else 1.0


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


def seconds_of(time: str) -> float:
    """Seconds of a time limit in one of sbatch's forms: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s, or none (UNLIMITED, 0).

    Raises:
        ValueError: it is none of them.
    """
    if time.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise ValueError(f"--time {time!r} is no time limit; write minutes, hours:minutes:seconds or days-hours")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    assert first is not None
    if days is not None:
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = (first * 60 + (second or 0)) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    return seconds or math.inf  # sbatch takes 0 for no limit


def measured_rate(run_dir: Path) -> float | None:
    """Tokens a second by the newest record of a run's training; None before it has trained."""
    for name in ("train.partial", "train"):
        rates = [record["tokens_per_second"] for record in metrics(run_dir / name) if "tokens_per_second" in record]
        if rates and rates[-1] > 0:
            return rates[-1]
    return None


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Records of a training, the last one left out while it is half written."""
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
