"""Where metrics go: always metrics.jsonl in the run, and Weights & Biases when the recipe asks for it.

The loop sees one object and never asks whether tracking is on. wandb keeps one run over restarts: its id is stored in
the run directory.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any, Protocol

from eyas.heads.files import read_json, write_json, write_text

METRICS_NAME = "metrics.jsonl"


class Tracker(Protocol):
    """Receives one flat record a logged step."""

    def log(self, record: dict[str, Any]) -> None:
        """Record metrics; `record["step"]` is the optimiser step."""
        ...

    def finish(self) -> None:
        """Flush; called also when training is interrupted."""
        ...


class NoTracker:
    """Nothing to do: processes other than the first, and recipes without a tracker."""

    def log(self, record: dict[str, Any]) -> None:
        """Ignore the record."""

    def finish(self) -> None:
        """Nothing to flush."""


class JsonLines:
    """Appends to metrics.jsonl; on resume the records past the resumed step are cut, so no step appears twice."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._stream = path.open("a", encoding="utf-8")

    def log(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the system at once."""
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """Close the file."""
        self._stream.close()


class Wandb:
    """A Weights & Biases run; project, entity and mode come from wandb's own environment variables."""

    def __init__(self, run_dir: Path, *, name: str, settings: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                "train.tracker is wandb, which is not installed; `pip install 'eyas[wandb]'` or set train.tracker=none"
            ) from error
        self._run = wandb.init(
            dir=run_dir, id=_stable_id(run_dir / "wandb-id.json"), name=name, resume="allow", config=settings
        )

    def log(self, record: dict[str, Any]) -> None:
        """Log under `train/` and `heldout/` keys at our own step: an offline run restarts wandb's step at 0."""
        values = {key if "/" in key else f"train/{key}": value for key, value in record.items() if key != "step"}
        self._run.log(values, step=record["step"])

    def finish(self) -> None:
        """Upload or store what is buffered."""
        self._run.finish()


class Both:
    """Sends every record to several trackers."""

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def log(self, record: dict[str, Any]) -> None:
        """Pass the record on."""
        for tracker in self._trackers:
            tracker.log(record)

    def finish(self) -> None:
        """Finish all of them."""
        for tracker in self._trackers:
            tracker.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; a last line cut by a kill is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _stable_id(path: Path) -> str:
    if not path.is_file():
        write_json(path, uuid.uuid4().hex[:12])
    return read_json(path)
