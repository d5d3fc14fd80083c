"""What is said before a job is submitted: a queue's wait is too long to learn that the job could not have run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from eyas.recipes.load import BUILTIN_SCHEME
from eyas.recipes.run import Run, stage_names
from eyas.recipes.run_lock import LOCK, holder_of, is_held, job_of
from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_jobs import STAGES
from eyas.recipes.slurm_record import live_jobs
from eyas.recipes.sources import expand, local_files
from eyas.recipes.stage import MANIFEST
from eyas.recipes.sweep import FOLDER as SWEEP
from eyas.slurm.sbatch import job_states
from eyas.slurm.site import Site

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every node has for itself on any usual machine."""


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


def check_before(recipe: Recipe, *, first: str) -> None:
    """Refuse jobs whose first one does its own stage only, when what that reads is not there.

    Raises:
        ValueError: a stage before it is missing.
    """
    if first not in ("train", "export", "score") or recipe.sweep:  # the others make what is missing
        return
    run = Run(recipe=recipe, run_dir=recipe.run_directory, target_dir=Path(), target_fingerprint="")
    missing = [name for name in stage_names(recipe, last=first)[:-1] if not (run.directory(name) / MANIFEST).is_file()]
    if missing:
        raise ValueError(
            f"--stage {first}: {recipe.run_directory} has no {missing[0]} stage yet, which it reads; submit it as well "
            f"(--stage {missing[0] if missing[0] in STAGES else 'prepare'}), or leave --stage out for everything"
        )


def check_not_held(run_dir: Path) -> None:
    """Refuse a run directory in which a job or another process may write.

    Raises:
        ValueError: one waits or runs, or SLURM cannot be asked.
    """
    live = live_jobs(run_dir)
    if live:
        shown = ", ".join(f"{state.job} ({state.state})" for state in live[:4])
        raise ValueError(
            f"{run_dir} is held by job {shown}; wait for it, end it with `eyas slurm cancel {quote(str(run_dir))}`, or set run_dir=... "
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
