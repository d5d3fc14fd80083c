"""Training in several processes: what each does when `accelerate launch -m eyas.train RECIPE` starts many.

The data stages run in one process beforehand (`eyas extract RECIPE`): here they must stand. The main process owns the
run directory and the manifest; the others enter the stage's body once it has made the directory ready.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.recipes.run import open_run, stage_names
from eyas.recipes.run_lock import run_lock
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import partial_directory, read_manifest, run_stage, stage_status
from eyas.recipes.stages import STAGES
from eyas.recipes.train_stages import require_head_possible


def launched_processes() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def train_in_processes(recipe: Recipe, *, say: Callable[[str], None]) -> None:
    """This process's part of the train stage.

    Raises:
        ValueError: an earlier stage is missing, or the launcher's processes do not know of each other.
    """
    from eyas.train.parallel.start import join_processes

    processes = join_processes()
    with processes.local_main_process_first():  # a package target is unpacked once a node
        run = open_run(recipe)
    last = "prepare" if recipe.features.mode == "online" else "extract"
    for name in stage_names(recipe, last=last):
        if stage_status(STAGES[name](run), run_dir=run.run_dir) != "complete":
            raise ValueError(
                f"the {name} stage of {run.run_dir} is missing or stale; run `eyas {last}` with the same recipe in one "
                "process first, then launch the training"
            )
    stage = STAGES["train"](run)
    require_head_possible(run)
    status = stage_status(stage, run_dir=run.run_dir)
    processes.wait_for_everyone()  # all have looked before the main process changes anything
    if status == "complete":
        if processes.is_main_process:
            say(f"{stage.name}: skipped, {run.run_dir / stage.name} stands")
        return
    if not processes.is_main_process:
        processes.wait_for_everyone()
        stage.body(partial_directory(stage, run_dir=run.run_dir))
        return

    def body(work_dir: Path) -> dict[str, Any]:
        processes.wait_for_everyone()
        return stage.body(work_dir)

    with run_lock(run.run_dir):
        say(f"{stage.name}: running in {processes.num_processes} processes")
        run_stage(replace(stage, body=body), run_dir=run.run_dir)
        say(f"{stage.name}: done")
        for line in stage.describe(read_manifest(run.run_dir / stage.name)["counts"]):
            say(f"{stage.name}: {line}")
