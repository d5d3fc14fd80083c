"""TensorBoard through accelerate's tracker: event files in the run's `tensorboard/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.train.curves import curves

DIRECTORY = "tensorboard"


class TensorBoard:
    """One event file a start; a resumed run hides what an earlier start logged past the step it goes on from."""

    def __init__(self, run_dir: Path, *, resumed_step: int, config: dict[str, Any]) -> None:
        try:
            import tensorboard  # noqa: F401  # accelerate would take tensorboardX instead, and name that one as missing
        except ImportError as error:
            raise ImportError("tensorboard is not installed (pip install 'eyas[tensorboard]')") from error
        from accelerate.tracking import TensorBoardTracker

        resumed = {"purge_step": resumed_step + 1} if resumed_step else {}
        self._tracker = TensorBoardTracker(DIRECTORY, run_dir, **resumed)
        self._tracker.start()
        described = json.dumps(config, indent=2, ensure_ascii=False)
        # Indented by four: TensorBoard shows text as Markdown.
        self._tracker.log({"config": "    " + described.replace("\n", "\n    ")}, step=resumed_step)

    def log(self, record: dict[str, Any]) -> None:
        """Add a point to each curve, and flush."""
        self._tracker.log(curves(record), step=record["step"])

    def artifact(self, path: Path, *, kind: str) -> None:
        """TensorBoard keeps curves only."""

    def close(self, *, exit_code: int = 0) -> None:
        """Flush and close the file; TensorBoard has no state of a run."""
        del exit_code
        self._tracker.finish()
