"""Sessions that go on from others: the same measurement with more starts, or with other parts beside the grid.

Whether a start can stay is decided start by start, by its plan (`eyas.eval.launch.is_finished`). Here is decided what a
plan does not say: the files behind its paths, the machine's settings, and what is measured at all.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from eyas.recipes.stage import MANIFEST, read_manifest, without

FREE = ("starts_per_arm", "budget_minutes", "schedule", "time_split", "lossless", "open_loop")
"""Settings by which a session is longer, or has other parts beside its grid: its finished starts stay when they change."""

RAW = ("starts", "instrument", "lossless", "open_loop")
"""Directories of raw records. Each part compares them with what it would measure, and removes what it would not."""


def is_same_grid(
    settings: dict[str, Any],
    inputs: dict[str, str],
    *,
    earlier_settings: dict[str, Any],
    earlier_inputs: dict[str, str],
) -> bool:
    """Whether an earlier session's starts may be those of this one."""
    asked = json.loads(json.dumps(without(settings, FREE)))
    return without(earlier_settings, FREE) == asked and earlier_inputs == inputs


def adopt_starts(finished: Path, out_dir: Path, *, settings: dict[str, Any], inputs: dict[str, str]) -> None:
    """Begin with the records of a finished session of the same grid.

    The session's id comes along, so that the new session is the earlier one continued.
    """
    if any((out_dir / "starts").glob("*")) or not (finished / MANIFEST).is_file():
        return
    manifest = read_manifest(finished)
    if not is_same_grid(settings, inputs, earlier_settings=manifest["settings"], earlier_inputs=manifest["inputs"]):
        return
    for name in RAW:
        if (finished / name).is_dir():
            shutil.copytree(finished / name, out_dir / name, dirs_exist_ok=True)
    shutil.copy2(finished / "session.json", out_dir / "session.json")
