"""What a report tells about where a measured head comes from, and with what it was measured."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.heads.files import fingerprint_file, read_json
from eyas.recipes.provenance import git_state, versions
from eyas.recipes.run import Run, data_stage_names, scores_own_head, stage_names
from eyas.recipes.score_heads import head_files
from eyas.recipes.stage import read_manifest

if TYPE_CHECKING:
    from eyas.heads.config import HeadConfig


def score_context(run: Run, head_dir: Path | None) -> dict[str, Any]:
    """The recipe, and each earlier stage's counts and seconds: what may change while the measurement stands."""
    own = scores_own_head(run.recipe)
    made = stage_names(run.recipe, last="export") if own else data_stage_names(run.recipe)
    manifests = {name: read_manifest(run.directory(name)) for name in made}
    return {
        "name": run.recipe.name,
        "head": None if head_dir is None else str(head_dir),
        "training": _training(run) if own else {"metrics": [], "heldout": None},
        "recipe": run.recipe.model_dump(mode="json"),
        "target": {"directory": str(run.target_dir), "fingerprint": run.target_fingerprint},
        "stages": {name: {key: found[key] for key in ("counts", "seconds")} for name, found in manifests.items()},
    }


def measured_context(run: Run, *, head_dir: Path | None, head: HeadConfig | None) -> dict[str, Any]:
    """What belongs to the measurement itself: the head's files and form, the data it was trained on, our code, the command.

    The training data of a head from elsewhere is not known.
    """
    code = git_state()
    return {
        "head_files": None if head_dir is None else head_files(head_dir),
        "head_config": None if head is None else _head_config(head),
        "data_sha256": fingerprint_file(run.conversations) if scores_own_head(run.recipe) else None,
        "eyas": {"version": versions()["eyas"], **({"commit": None, "dirty": None} if code is None else code)},
        "command": list(sys.argv),
    }


def _head_config(head: HeadConfig) -> dict[str, Any]:
    """The head's form; captured layers None = the engine's default for the target."""
    return {name: value for name, value in dataclasses.asdict(head).items() if name != "inherited_window"}


def _training(run: Run) -> dict[str, Any]:
    """Metrics of the training, and what it measured on held-out conversations at the end (heldout.json), if it did."""
    from eyas.train.tracking import METRICS_NAME, read_metrics

    directory = run.directory("train")
    heldout = directory / "heldout.json"
    return {
        "metrics": read_metrics(directory / METRICS_NAME),
        "heldout": read_json(heldout) if heldout.is_file() else None,
    }
