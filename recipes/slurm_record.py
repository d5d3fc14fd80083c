"""The jobs that were submitted for a run, `RUN/slurm/jobs.json`, and how each stands: SLURM forgets, so it is written down."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from eyas.heads.files import read_json, write_json, write_text
from eyas.recipes.run import Run
from eyas.recipes.run_lock import short_lock
from eyas.recipes.schema import Recipe
from eyas.recipes.score_stage import only_arm
from eyas.recipes.stage import MANIFEST
from eyas.recipes.sweep import FOLDER
from eyas.slurm.sbatch import (
    ENDED_BADLY,
    FORGOTTEN,
    JobState,
    accounted_states,
    job_states,
    plain_id,
    submit,
    tasks_of,
)

RECORD = Path("slurm") / "jobs.json"
"""Inside a run directory: the jobs that were submitted for it."""
RECORD_LOCK, SUBMITTING_LOCK = Path("slurm") / "jobs.lock", Path("slurm") / "submitting.lock"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A job as it was submitted; `job`, `script` and `submitted` are empty until it is.

    Attributes:
        after: the stage whose job it waits for. processes: GPUs of the whole job, or nodes where it asks for none.
        states: of each task ("" where it is no array) when it was last looked at. forgotten: by SLURM's controller.
    """

    job: str = ""
    stage: str
    name: str
    script: str = ""
    output: str
    submitted: str = ""
    array: str | None = None
    dependency: str | None = None
    after: str | None = None
    processes: int = 1
    states: dict[str, str] = field(default_factory=dict)
    forgotten: bool = False

    @property
    def tasks(self) -> list[str]:
        return [""] if self.array is None else [str(number) for number in tasks_of(self.array)]

    def task(self, number: str) -> str:
        """The id of a task."""
        job, separator, cluster = self.job.partition(";")
        return self.job if number == "" else f"{job}_{number}{separator}{cluster}"


@dataclass(frozen=True)
class Known:
    """A job with its states, as SLURM has them or as they were last seen; together they have every task."""

    entry: Entry
    states: Sequence[JobState]

    def state(self, task: str) -> JobState:
        """The state of one task."""
        return next(replace(each, job=self.entry.task(task)) for each in self.states if task in each.tasks)


def read_entries(run_dir: Path) -> list[Entry]:
    """Every job of a run, in the order of submission."""
    if not (run_dir / RECORD).is_file():
        return []
    names = {each.name for each in fields(Entry)}
    return [
        Entry(**{"name": "", **{key: value for key, value in entry.items() if key in names}})
        for entry in read_json(run_dir / RECORD)["jobs"]
    ]


def submitted_entries(run_dir: Path) -> list[Entry]:
    """As `read_entries`, of a run for which there are any.

    Raises:
        ValueError: none was submitted.
    """
    entries = read_entries(run_dir)
    if not entries:
        raise ValueError(f"no jobs were submitted for {run_dir} (`eyas slurm submit`)")
    return entries


def write_entries(run_dir: Path, entries: Sequence[Entry]) -> None:
    """Replace the record."""
    write_json(run_dir / RECORD, {"jobs": [asdict(entry) for entry in entries]})


@contextlib.contextmanager
def submitting(run_dir: Path) -> Iterator[None]:
    """Whoever submits jobs of a run does it alone, from the look at those there are to the last new one.

    Raises:
        ValueError: the disk knows no locks.
    """
    (run_dir / SUBMITTING_LOCK).parent.mkdir(parents=True, exist_ok=True)
    with short_lock(run_dir / SUBMITTING_LOCK):
        yield


def submit_entry(run_dir: Path, entry: Entry, *, script: str) -> Entry:
    """Write the script of a job into its run, submit it and record it; returns the record.

    Ctrl-C in between waits, so that there is no job that nobody knows of.

    Raises:
        ValueError: sbatch refused.
    """
    with short_lock(run_dir / RECORD_LOCK):
        entries = read_entries(run_dir)
        path = run_dir / RECORD.parent / f"{len(entries):03d}-{entry.stage}.sbatch"
        write_text(path, script, mode=0o600)  # the site's environment may hold keys
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with _interrupted_later():
            submitted = replace(entry, job=submit(path), script=str(path), submitted=now)
            write_entries(run_dir, [*entries, submitted])
    return submitted


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def known_jobs(run_dir: Path) -> list[Known]:
    """How every job of a run stands. What is seen is written down; what ended well, or was forgotten, is not asked about again.

    Raises:
        ValueError: SLURM cannot be asked.
    """
    entries = read_entries(run_dir)
    found = [_known(run_dir, entry) for entry in entries]
    changed = {each.entry.script: each.entry for each, old in zip(found, entries, strict=True) if each.entry != old}
    if changed:
        with contextlib.suppress(OSError), short_lock(run_dir / RECORD_LOCK):  # who may only read may still look
            # SLURM took its time to answer: a job that was submitted meanwhile stays in the record.
            write_entries(run_dir, [changed.get(entry.script, entry) for entry in read_entries(run_dir)])
    return found


def live_jobs(run_dir: Path) -> list[JobState]:
    """Jobs of a run directory that SLURM still has in its queue.

    Raises:
        ValueError: SLURM cannot be asked.
    """
    return [state for known in known_jobs(run_dir) for state in known.states if state.live]


def deciding(known: Sequence[Known], *, stage: str) -> dict[str, tuple[Entry, JobState]]:
    """For each task of a stage ("" without an array) the newest job that has it, with its state there."""
    found: dict[str, tuple[Entry, JobState]] = {}
    for each in reversed([each for each in known if each.entry.stage == stage]):
        if found and ("" in found or each.entry.array is None):
            break  # once an array and once a single job: the newer form holds
        for task in each.entry.tasks:
            found.setdefault(task, (each.entry, each.state(task)))
    return dict(sorted(found.items(), key=lambda item: int(item[0] or 0)))


def _known(run_dir: Path, entry: Entry) -> Known:
    if entry.states and set(entry.states.values()) == {"COMPLETED"}:
        return Known(entry, [JobState(entry.task(task), "COMPLETED") for task in entry.tasks])
    if entry.forgotten:
        return Known(entry, _remembered(run_dir, entry))
    there = [state for state in job_states(entry.job) if _is_of(state, entry)]
    states = _with_missing(entry, there, lambda: accounted_states(entry.job))
    found = Known(entry, _with_missing(entry, states, lambda: _remembered(run_dir, entry)))
    seen = {task: found.state(task).state for task in entry.tasks}
    return replace(found, entry=replace(entry, states=seen, forgotten=not there))


def _is_of(state: JobState, entry: Entry) -> bool:
    """Whether SLURM speaks of the job that was submitted: a controller that was set up anew counts from 1 again."""
    if not entry.name or (state.name is None and state.command is None):
        return True
    return state.name == entry.name or state.command == entry.script


def _with_missing(entry: Entry, states: list[JobState], more: Callable[[], list[JobState]]) -> list[JobState]:
    """`states`, and of `more` those of tasks that are not among them: SLURM forgets an array task by task."""
    there = {task for state in states for task in state.tasks}
    missing = set(entry.tasks) - there
    if not missing:
        return states
    return states + [state for state in more() if _is_of(state, entry) and missing & set(state.tasks)]


def _remembered(run_dir: Path, entry: Entry) -> list[JobState]:
    """What was last seen of each task, where that was its end; else whether its result lies there."""
    found = []
    for task in entry.tasks:
        state = entry.states.get(task, "")
        if state not in {"COMPLETED", *ENDED_BADLY}:
            state = "COMPLETED" if _has_result(run_dir, entry, task) else FORGOTTEN
        found.append(JobState(entry.task(task), state))
    return found


def _has_result(run_dir: Path, entry: Entry, task: str) -> bool:
    """Whether what a task makes was finished after it was submitted."""
    folder = _result(run_dir, entry, task)
    if folder is None or not (folder / MANIFEST).is_file():
        return False
    return read_json(folder / MANIFEST)["finished_at"] >= entry.submitted


def _result(run_dir: Path, entry: Entry, task: str) -> Path | None:
    if entry.stage == "score" and entry.array is not None:
        recipe = recipe_of(run_dir)
        arms = recipe.score.arm_names
        return arm_directory(run_dir, recipe, arms[int(task)]) if int(task) < len(arms) else None
    if entry.stage == "train" and entry.array is not None:
        return run_dir / FOLDER / task / "train"
    if entry.stage == "score":
        return score_directory(run_dir, recipe_of(run_dir))
    folders = {"prepare": "prepare", "extract": "features", "seal": "features", "train": "train", "export": "export"}
    return run_dir / folders[entry.stage] if entry.stage in folders else None


def arm_directory(run_dir: Path, recipe: Recipe, arm: str) -> Path:
    """Where an arm that is measured alone leaves its results."""
    return score_directory(run_dir, only_arm(recipe, arm))


def score_directory(run_dir: Path, recipe: Recipe) -> Path:
    """Where the measurement of a recipe leaves its results."""
    run = Run(recipe=recipe, run_dir=run_dir, target_dir=Path(), target_fingerprint="")
    return run.directory("score")


def recipe_of(run_dir: Path) -> Recipe:
    """The recipe of a run: as its jobs read it, or as it ran without them, whichever is newer; with its sweep.

    Raises:
        ValueError: the directory is no run of eyas.
    """
    paths = [run_dir / "slurm" / "sweep.yaml", run_dir / "slurm" / "recipe.yaml", run_dir / "recipe.yaml"]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise ValueError(f"{run_dir} is no run directory of eyas (it has no recipe.yaml); name the run_dir of a recipe")
    newest = there[0] if there[0].name == "sweep.yaml" else max(there, key=lambda path: path.stat().st_mtime)
    values: Any = yaml.safe_load(newest.read_text(encoding="utf-8"))
    return Recipe.model_validate(values)


def job_ids(states: Sequence[JobState]) -> str:
    """Ids as a dependency names them."""
    return ":".join(plain_id(state.job) for state in states)
