"""The run of a recipe: each stage in order, made when it is missing or stale, skipped when it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from eyas.heads.files import write_json, write_text
from eyas.recipes.distributed import launched_processes, train_in_processes
from eyas.recipes.load import dump_recipe
from eyas.recipes.run import Run, open_run, scores_own_head, stage_names
from eyas.recipes.run_lock import run_lock
from eyas.recipes.schema import Recipe
from eyas.recipes.sources import expand, local_files
from eyas.recipes.stage import MANIFEST, Stage, read_manifest, run_stage, stage_status
from eyas.recipes.stages import STAGES
from eyas.recipes.train_stages import require_head_possible

Say = Callable[[str], None]


def run_until(recipe: Recipe, *, last: str, say: Say, only: bool = False) -> Run:
    """Run what is missing or stale of `recipe` up to and including stage `last`, with one line per stage to `say`.

    Args:
        only: make no stage but `last`. A job that waits for others must not do their work with what it was given.

    Raises:
        ValueError: bad input of any stage, another process at work in the run directory, or an earlier stage that does not
            stand and may not be made.
    """
    if recipe.sweep:
        raise ValueError(
            "the recipe has a sweep, so it is many runs: `eyas sweep RECIPE` trains them all; sweep={} runs the recipe itself"
        )
    if launched_processes() > 1:
        return _train_in_processes(recipe, last=last, say=say)
    _require_sources(recipe)
    run = open_run(recipe)  # before the lock, so that a target that does not exist leaves no run directory
    _require_head_possible(run, last=last)
    _require_export(run)
    if only:
        _require_earlier(run, last=last)
    arm = recipe.score.only if last == "score" else None  # arms of a run may be measured side by side, on many nodes
    with run_lock(run.run_dir, part=None if arm is None else f"score-{arm}"):
        if arm is None:
            write_text(run.run_dir / "recipe.yaml", dump_recipe(recipe))
            write_json(
                run.run_dir / "target.json", {"directory": str(run.target_dir), "fingerprint": run.target_fingerprint}
            )
        for name in stage_names(recipe, last=last)[-1 if only else 0 :]:
            _run_one(STAGES[name](run), run_dir=run.run_dir, say=say)
    return run


def _train_in_processes(recipe: Recipe, *, last: str, say: Say) -> Run:
    """The train stage under a launcher; every other stage would be run by each process, in the same directory."""
    if last != "train":
        raise ValueError(
            f"a launcher started {launched_processes()} processes, and only training runs in several; run this command "
            "without accelerate launch or torchrun"
        )
    train_in_processes(recipe, say=say)
    return open_run(recipe)


def _run_one(stage: Stage, *, run_dir: Path, say: Say) -> None:
    status = stage_status(stage, run_dir=run_dir)
    if status != "complete":
        verb = {
            "partial": "continuing",
            "stale": "running again (settings, inputs or files changed)",
            "missing": "running",
        }
        say(f"{stage.name}: {verb[status]}")
    start = time.monotonic()
    if run_stage(stage, run_dir=run_dir):
        say(f"{stage.name}: done in {time.monotonic() - start:.1f} s")
        for line in stage.describe(read_manifest(run_dir / stage.name)["counts"]):
            say(f"{stage.name}: {line}")
    else:
        say(f"{stage.name}: skipped, {run_dir / stage.name} stands")


def _require_head_possible(run: Run, *, last: str) -> None:
    """Fail before features are extracted when the head cannot be made for the target, unless all of it has been made."""
    needed = [name for name in ("extract", "train") if name in stage_names(run.recipe, last=last)]
    if not needed:
        return
    made = all((run.directory(name) / MANIFEST).is_file() for name in ("prepare", *needed, "train"))
    if not made or stage_status(STAGES["train"](run), run_dir=run.run_dir) != "complete":
        require_head_possible(run)


def _require_export(run: Run) -> None:
    """One arm of a run alone is measured by many tasks at once, and none of them makes the head."""
    own = run.recipe.score.only is not None and scores_own_head(run.recipe)
    if own and not (run.directory("export") / MANIFEST).is_file():
        raise ValueError(
            f"there is no head in {run.directory('export')} yet; run `eyas export` with the same recipe first"
        )


def _require_earlier(run: Run, *, last: str) -> None:
    """Fail when a stage before `last`, or the head that is to be measured, does not stand."""
    names = stage_names(run.recipe, last=last)[:-1]
    if last == "score" and scores_own_head(run.recipe):
        # The export of one arm alone would be another one, with its number of drafted tokens: `_require_export` looks at it.
        names = stage_names(run.recipe, last="train" if run.recipe.score.only else "export")
    for name in names:
        if stage_status(STAGES[name](run), run_dir=run.run_dir) != "complete":
            raise ValueError(
                f"the {name} stage of {run.run_dir} is missing or stale, and with --only no stage but {last} is made; make it "
                f"first, or run `eyas {last}` without --only"
            )


def _require_sources(recipe: Recipe) -> None:
    """Fail before the target is unpacked when a file of conversations is missing or a preset is misspelt."""
    guard = recipe.data.guard
    for source in [*recipe.data.all_sources, *(guard.sources if guard.enabled else ())]:
        for entry in expand(source):
            local_files(entry)
