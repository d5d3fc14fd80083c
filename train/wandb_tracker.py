"""A Weights & Biases run that is one run over restarts: its id is stored in the run directory.

wandb talks to a server and to a process of its own, so every call may raise; the caller guards them (tracking.py).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from eyas.heads.files import read_json, write_json
from eyas.train.curves import curves
from eyas.train.preemption import EXIT_REQUEUE

ID_NAME = "wandb-id.json"
DEFAULT_PROJECT = "eyas"

INIT_TIMEOUT = 60.0
FINISH_TIMEOUT = 30.0
"""Seconds to wait for the server at both ends. A scheduler's notice before it kills is often a minute; what was not
uploaded by then stays on disk for `wandb sync`."""


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """What the recipe says of the run; None and () leave the choice to wandb's own environment variables.

    Attributes:
        kept_in: where the run's directory will lie once its stage is complete; None where it stays.
    """

    name: str
    kept_in: Path | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None


class Wandb:
    """One start of the run."""

    def __init__(
        self, run_dir: Path, *, settings: WandbSettings, config: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("wandb is not installed (pip install 'eyas[wandb]')") from error
        run_dir.mkdir(parents=True, exist_ok=True)
        _require_key(wandb, mode=settings.mode)
        self._wandb, self._run_dir = wandb, run_dir
        self._run = wandb.init(
            dir=run_dir,
            id=run_id(run_dir),
            resume="allow",
            # The recipe has a name always and wandb's variables are set for this one start: they win over it.
            name=os.environ.get("WANDB_NAME", settings.name),
            project=settings.project or os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags or None,
            mode=settings.mode,
            config=config,
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT,
                finish_timeout=FINISH_TIMEOUT,
                finish_timeout_raises=True,
                silent=True,
                # Capturing the console would put wandb's failures into every print of training.
                console="off",
            ),
        )
        offline = _upload(Path(self._run.dir).parent, run_dir=run_dir, kept_in=settings.kept_in)
        where = offline if self._run.offline else self._run.url
        say(f"wandb: run {self._run.id}, {where}")

    def log(self, record: dict[str, Any]) -> None:
        """Log at our own step: an offline run restarts wandb's at 0. The server drops steps it has already."""
        self._run.log(curves(record), step=record["step"])

    def artifact(self, path: Path, *, kind: str) -> None:
        """Log a file or directory as the artifact `<kind>-<run id>`."""
        artifact = self._wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
        # wandb copies them (policy "mutable", its default): the stage's directory is renamed before an offline run is synced.
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, *, exit_code: int = 0) -> None:
        """Upload or store what is buffered. A preempted run is shown as that: it goes on later.

        Raises:
            TimeoutError: it took too long.
        """
        if exit_code == EXIT_REQUEUE:
            self._run.mark_preempting()
        self._run.finish(exit_code=exit_code)


def _upload(offline_dir: Path, *, run_dir: Path, kept_in: Path | None) -> str:
    """How to upload an offline run, by the name that its directory will have then."""
    if kept_in is None:
        return f"offline; upload with: wandb sync {offline_dir}"
    kept = kept_in / offline_dir.resolve().relative_to(run_dir.resolve())
    return f"offline; upload at the end with: wandb sync {kept}"


def run_id(run_dir: Path) -> str:
    """WANDB_RUN_ID, else the id that an earlier start stored, else a new one; what is returned is stored."""
    path, stored = run_dir / ID_NAME, stored_run_id(run_dir)
    chosen = os.environ.get("WANDB_RUN_ID") or stored or uuid.uuid4().hex[:12]
    if chosen != stored:
        write_json(path, chosen)
    return chosen


def stored_run_id(run_dir: Path) -> str | None:
    """The id that an earlier start stored."""
    path = run_dir / ID_NAME
    return read_json(path) if path.is_file() else None


def restore_run_id(run_dir: Path, run_id: str | None) -> None:
    """Put a checkpoint's id back into a run directory that lost its record of it. Every process may call it at once."""
    if run_id is not None and stored_run_id(run_dir) is None:
        write_json(run_dir / ID_NAME, run_id)


def _require_key(wandb: ModuleType, *, mode: str | None) -> None:
    """Refuse to go online without a key: at a terminal wandb would ask for one, and wait."""
    online = (mode or os.environ.get("WANDB_MODE", "online")) == "online"
    if online and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no API key (set WANDB_API_KEY, run `wandb login`, or set tracking.mode=offline)")
