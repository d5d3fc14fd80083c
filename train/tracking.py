"""Where metrics go: always metrics.jsonl in the run, and the trackers that the recipe asks for.

The loop sees one object and never asks which trackers there are. A tracker is a convenience: whatever goes wrong with
one is said in one line, and training goes on without it. metrics.jsonl is the record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from eyas.heads.files import write_json, write_text
from eyas.train.preemption import EXIT_REQUEUE, Preempted
from eyas.train.tensorboard_tracker import TensorBoard
from eyas.train.wandb_tracker import ID_NAME, Wandb, WandbSettings, stored_run_id

METRICS_NAME = "metrics.jsonl"

Say = Callable[[str], None]


class Tracker(Protocol):
    """Receives flat records, and files at the end."""

    def log(self, record: dict[str, Any]) -> None:
        """Record metrics; `record["step"]` is the optimiser step. Keys of evaluations begin with `heldout/`."""
        ...

    def artifact(self, path: Path, *, kind: str) -> None:
        """Keep a file or directory with the run, such as the head or a report."""
        ...

    def close(self, *, exit_code: int = 0) -> None:
        """Flush; also when training is interrupted. `exit_code` is the one that the process will end with."""
        ...


class NoTracker:
    """Nothing to do: processes other than the first, and a tracker that failed."""

    def log(self, record: dict[str, Any]) -> None:
        """Ignore the record."""

    def artifact(self, path: Path, *, kind: str) -> None:
        """Ignore the file."""

    def close(self, *, exit_code: int = 0) -> None:
        """Nothing to flush."""


class JsonLines(NoTracker):
    """Appends to metrics.jsonl; on resume the records past the resumed step are cut, so no step appears twice."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_step]
        write_text(path, "".join(_line(record) for record in kept))
        self._stream = path.open("a", encoding="utf-8")

    def log(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the system at once."""
        self._stream.write(_line(record))
        self._stream.flush()

    def close(self, *, exit_code: int = 0) -> None:
        """Close the file."""
        del exit_code
        self._stream.close()


class Guarded:
    """A tracker that may fail: the first error is said and ends it. Not KeyboardInterrupt, which is the user's."""

    def __init__(self, name: str, start: Callable[[], Tracker], *, say: Say) -> None:
        self._name, self._say = name, say
        self._inner: Tracker = NoTracker()
        self._attempt(partial(self._start, start))

    def log(self, record: dict[str, Any]) -> None:
        """Pass the record on."""
        self._attempt(lambda: self._inner.log(record))

    def artifact(self, path: Path, *, kind: str) -> None:
        """Pass the file on."""
        self._attempt(lambda: self._inner.artifact(path, kind=kind))

    def close(self, *, exit_code: int = 0) -> None:
        """Finish the tracker, once."""
        self._attempt(lambda: self._inner.close(exit_code=exit_code))
        self._inner = NoTracker()

    def _start(self, start: Callable[[], Tracker]) -> None:
        self._inner = start()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._inner = NoTracker()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._say(
                f"warning: {self._name}: {lines[0]}; going on without it, {METRICS_NAME} of the training has every curve"
            )


class All:
    """Sends everything to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, record: dict[str, Any]) -> None:
        """Pass the record on."""
        for tracker in self._trackers:
            tracker.log(record)

    def artifact(self, path: Path, *, kind: str) -> None:
        """Pass the file on."""
        for tracker in self._trackers:
            tracker.artifact(path, kind=kind)

    def close(self, *, exit_code: int = 0) -> None:
        """Finish all of them."""
        for tracker in self._trackers:
            tracker.close(exit_code=exit_code)


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """Which trackers, and what they are told about the run.

    Attributes:
        kinds: any of the two. config: what the run was made with (recipe, git state).
        kept_in: where the tracked directory will lie once its stage is complete; None where it stays.
        name, project, entity, group, tags, mode: of wandb; None leaves the choice to wandb's environment variables.
    """

    kinds: tuple[Literal["wandb", "tensorboard"], ...] = ()
    name: str
    kept_in: Path | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    config: dict[str, Any]


@contextmanager
def open_trackers(
    settings: TrackingSettings, *, run_dir: Path, resumed_step: int, main: bool, say: Say
) -> Iterator[Tracker]:
    """metrics.jsonl and what `settings` names, for a run that goes on from `resumed_step`; nothing where not `main`.

    They are closed however the block ends, and told whether it was completed, stopped by a signal, or failed.
    """
    tracker = _trackers(settings, run_dir=run_dir, resumed_step=resumed_step, say=say) if main else NoTracker()
    exit_code = 1
    try:
        yield tracker
        exit_code = 0
    except Preempted:
        exit_code = EXIT_REQUEUE
        raise
    finally:
        tracker.close(exit_code=exit_code)


def add_to_finished_run(
    settings: TrackingSettings, *, trained_in: Path, work_dir: Path, path: Path, kind: str, say: Say
) -> None:
    """Keep a file or directory with the wandb run of a training that is over, if there is one; else do nothing.

    Args:
        trained_in: directory of the training, which holds the run's id. work_dir: where wandb may write.
    """
    identity = stored_run_id(trained_in)
    if "wandb" not in settings.kinds or identity is None:
        return
    write_json(work_dir / ID_NAME, identity)
    tracker = Guarded(
        "wandb", partial(Wandb, work_dir, settings=_wandb(settings), config=settings.config, say=say), say=say
    )
    tracker.artifact(path, kind=kind)
    tracker.close()


def _trackers(settings: TrackingSettings, *, run_dir: Path, resumed_step: int, say: Say) -> Tracker:
    starts: dict[str, Callable[[], Tracker]] = {
        "wandb": partial(Wandb, run_dir, settings=_wandb(settings), config=settings.config, say=say),
        "tensorboard": partial(TensorBoard, run_dir, resumed_step=resumed_step, config=settings.config),
    }
    metrics = JsonLines(run_dir / METRICS_NAME, resumed_step=resumed_step)
    return All([metrics, *(Guarded(kind, starts[kind], say=say) for kind in settings.kinds)])


def _wandb(settings: TrackingSettings) -> WandbSettings:
    return WandbSettings(
        name=settings.name,
        kept_in=settings.kept_in,
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        tags=settings.tags,
        mode=settings.mode,
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; a line cut by a kill or a power cut is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _line(record: dict[str, Any]) -> str:
    """One line of JSON; what is not finite becomes null, since NaN is no JSON."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite) + "\n"
