"""Several extractors for one store: those that join take the shards that no other has claimed.

The process that began the stage owns it: it waits for shards that others are making, and writes the manifest. Joining
needs no lock and changes nothing but shards, so any number may join and leave at any moment.
"""

from __future__ import annotations

from collections.abc import Callable

from eyas.recipes.feature_stage import extract_body
from eyas.recipes.run import Run, open_run, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import Stage, begin_stage, partial_directory, stage_status
from eyas.recipes.stages import STAGES


def join_extraction(recipe: Recipe, *, say: Callable[[str], None]) -> None:
    """Make shards of a running extraction until none is left.

    Raises:
        ValueError: nothing to join: an earlier stage is missing, or no extraction of this recipe is under way.
    """
    run = open_run(recipe)
    stage = _ready_stage(run)
    status = stage_status(stage, run_dir=run.run_dir)
    if status == "complete":
        say(f"{stage.name}: nothing to join, {run.run_dir / stage.name} stands")
        return
    if status != "partial":
        raise ValueError(
            f"no extraction of this recipe is under way in {run.run_dir}; start `eyas extract` first, then join it"
        )
    say(f"{stage.name}: joining")
    try:
        extract_body(run, partial_directory(stage, run_dir=run.run_dir))
    except (ValueError, OSError):
        # The owner publishes the directory as soon as the last shard is there.
        if stage_status(stage, run_dir=run.run_dir) != "complete":
            raise
    say(f"{stage.name}: no shard is left")


def extract_part(recipe: Recipe, *, say: Callable[[str], None]) -> None:
    """Make shards beside others that do the same, until all are there; `eyas extract` then seals the stage.

    For tasks of an array, of which none is the first: each may come, go and come again at any time.

    Raises:
        ValueError: an earlier stage is missing.
    """
    run = open_run(recipe)
    stage = _ready_stage(run)
    if stage_status(stage, run_dir=run.run_dir) == "complete":
        say(f"{stage.name}: nothing to do, {run.run_dir / stage.name} stands")
        return
    counts = extract_body(run, begin_stage(stage, run_dir=run.run_dir))
    say(f"{stage.name}: {counts['documents']} documents are there")


def _ready_stage(run: Run) -> Stage:
    """The extract stage of a run whose earlier stages stand."""
    *earlier, last = stage_names(run.recipe, last="extract")
    for name in earlier:
        if stage_status(STAGES[name](run), run_dir=run.run_dir) != "complete":
            raise ValueError(
                f"the {name} stage of {run.run_dir} is missing or stale; run `eyas prepare` with the same recipe first"
            )
    return STAGES[last](run)
