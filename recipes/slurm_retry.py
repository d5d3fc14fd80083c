"""Running again what failed of a chain: only that, and the jobs after it wait for it anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from eyas.recipes.slurm_record import (
    Entry,
    deciding,
    job_ids,
    known_jobs,
    submit_entry,
    submitted_entries,
    submitting,
)
from eyas.slurm.sbatch import ENDED_BADLY, FORGOTTEN, JobState, requeue, wait_for_again

Say = Callable[[str], None]

ORDER = ("prepare", "extract", "seal", "link", "train", "table", "export", "score")
"""Jobs of a chain, each before those that may wait for it."""

FAILED = (ENDED_BADLY - {"CANCELLED"}) | {FORGOTTEN}
"""Ends that are repeated. Whoever cancelled a job meant it."""


def retry_jobs(run_dir: Path, *, say: Say) -> list[str]:
    """Run every job, or task of an array, again that did not end well; returns them.

    SLURM is asked to requeue them; what it has forgotten is submitted again with its own script. Jobs after them that
    still wait are told what they wait for, and those that had run whatever came of them (a sweep's table) run again.

    Raises:
        ValueError: no job of the run failed, or SLURM refused (what it did not refuse is done).
    """
    run_dir = run_dir.absolute()
    submitted = {entry.stage for entry in submitted_entries(run_dir)}
    retry = _Retry(run_dir, say)
    with submitting(run_dir):
        for stage in ORDER:
            if stage in submitted:
                retry.stage(stage)
    if retry.problems:
        raise ValueError("; ".join(retry.problems))
    left = f"cancelled, so left alone: {', '.join(retry.cancelled)}" if retry.cancelled else ""
    if not retry.repeated:
        more = f"; {left} (`eyas slurm submit` begins anew)" if left else ""
        raise ValueError(f"no job of {run_dir} failed; `eyas slurm status` shows them{more}")
    if left:
        say(left)
    return retry.repeated


class _Retry:
    """One pass over the stages, in the order in which they depend on each other."""

    def __init__(self, run_dir: Path, say: Say) -> None:
        self.run_dir, self.say = run_dir, say
        self.stages: set[str] = set()
        self.repeated: list[str] = []
        self.cancelled: list[str] = []
        self.problems: list[str] = []

    def stage(self, stage: str) -> None:
        """Repeat what failed of one stage, and let what waits of it wait for what was repeated before it."""
        tasks = deciding(known_jobs(self.run_dir), stage=stage)
        self.cancelled += [state.job for _, state in tasks.values() if state.state == "CANCELLED"]
        entries = {entry.job: entry for entry, _ in tasks.values()}
        for entry in entries.values():
            own = {task: state for task, (its, state) in tasks.items() if its.job == entry.job}
            failed = {task: state for task, state in own.items() if state.state in FAILED}
            dependency = self._dependency(entry)
            try:
                if failed:
                    self._repeat(entry, failed, dependency=dependency)
                elif dependency is None:
                    continue
                elif any(state.state == "PENDING" for state in own.values()):
                    wait_for_again(entry.job, dependency=dependency)
                    self.say(f"{entry.job} {stage}: waits again")
                elif dependency.startswith("afterany") and not any(state.live for state in own.values()):
                    self._submit(entry, list(own), dependency=dependency)
            except ValueError as error:
                self.problems.append(str(error))

    def _dependency(self, entry: Entry) -> str | None:
        """What a job waits for now, when something before it is repeated.

        An array of which a task failed once never counts as ended well, its tasks do.
        """
        if entry.after is None or entry.after not in self.stages or entry.dependency is None:
            return None
        before = deciding(known_jobs(self.run_dir), stage=entry.after)
        waiting = [state for _, state in before.values() if state.state != "COMPLETED"]
        return f"{entry.dependency.partition(':')[0]}:{job_ids(waiting)}" if waiting else None

    def _repeat(self, entry: Entry, failed: dict[str, JobState], *, dependency: str | None) -> None:
        forgotten = []
        self.stages.add(entry.stage)
        for task, state in failed.items():
            try:
                requeue(state.job)
            except ValueError:  # forgotten, or a job that may not be requeued
                forgotten.append(task)
                continue
            self.repeated.append(state.job)
            self.say(f"{state.job}: runs again")
        if dependency is not None and len(forgotten) < len(failed):
            wait_for_again(entry.job, dependency=dependency)
        if forgotten:
            self._submit(entry, forgotten, dependency=dependency)

    def _submit(self, entry: Entry, tasks: Sequence[str], *, dependency: str | None) -> None:
        """Submit a job's script anew, for some of its tasks, as a job of its own."""
        self.stages.add(entry.stage)
        array = None if entry.array is None else ",".join(tasks) + "".join(entry.array.partition("%")[1:])
        text = with_directive(Path(entry.script).read_text(encoding="utf-8"), "array", array)
        again = submit_entry(
            self.run_dir,
            replace(entry, array=array, dependency=dependency, states={}, forgotten=False),
            script=with_directive(text, "dependency", dependency),
        )
        self.repeated.append(again.job)
        of = "" if array is None else f", tasks {','.join(tasks)}"
        self.say(f"{again.job} {entry.stage}: submitted again for {entry.job}{of}")


def with_directive(script: str, name: str, value: str | None) -> str:
    """A script with another value in one of its #SBATCH lines, or without the line."""
    line = "" if value is None else f"#SBATCH --{name}={value}\n"
    return re.sub(rf"^#SBATCH --{name}=.*\n", lambda _: line, script, count=1, flags=re.MULTILINE)
