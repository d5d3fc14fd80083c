"""Running again what failed of a chain: only that, and the jobs after it follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eyas.heads.files import read_json
from eyas.recipes.slurm_checks import RECORD
from eyas.slurm.sbatch import ENDED_BADLY, job_states, requeue, wait_for_again


def retry_jobs(run_dir: Path, *, say: Callable[[str], None]) -> list[str]:
    """Requeue every ended job of the run that did not end well; returns them.

    A cancelled job whose stage was submitted again later is left alone.

    Raises:
        ValueError: no job of the run failed, or SLURM refused.
    """
    if not (run_dir / RECORD).is_file():
        raise ValueError(f"no jobs were submitted for {run_dir} (`eyas slurm submit`)")
    newest = {entry["stage"]: entry for entry in read_json(run_dir / RECORD)["jobs"]}
    failed = [
        state.job for entry in newest.values() for state in job_states(entry["job"]) if state.state in ENDED_BADLY
    ]
    if not failed:
        raise ValueError(f"no job of {run_dir} failed, as far as SLURM remembers; `eyas slurm status` shows them")
    for job in failed:
        requeue(job)
        say(f"{job}: runs again")
    for entry in newest.values():
        waits = [state.job for state in job_states(entry["job"]) if state.state == "PENDING"]
        if entry["dependency"] is not None and waits and not set(waits) & set(failed):
            wait_for_again(entry["job"], dependency=_open_dependency(entry["dependency"]))
            say(f"{entry['job']} {entry['stage']}: waits again")
    return failed


def _open_dependency(dependency: str) -> str:
    """What is left of "afterok:JOB": an array of which a task failed once never counts as ended well, its tasks do."""
    kind, _, job = dependency.partition(":")
    tasks = [state.job for state in job_states(job) if state.state != "COMPLETED"]
    return f"{kind}:{':'.join(tasks)}" if tasks else ""
