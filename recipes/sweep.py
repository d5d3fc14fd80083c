"""A sweep: one recipe, lists of values for some of its keys, a run of every combination, and one table of them all.

    sweep:
      train.learning_rate: [5e-4, 1.5e-3]
      train.ttt_steps: [2, 3]

Runs lie in `<run_dir>/sweep/0`, `1`, ... What a combination does not change, data and features above all, is made once
in the run directory itself and linked into theirs. A section may be swept too (`train.losses`): each of its values sets
some of the section's fields.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.heads.files import write_text
from eyas.recipes.load import dump_recipe, with_values
from eyas.recipes.pipeline import run_until
from eyas.recipes.run import open_run, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import stage_status
from eyas.recipes.stages import STAGES

FOLDER = "sweep"
RECIPE = "recipe.yaml"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """One combination: its number, the values that make it, and its recipe."""

    number: int
    values: dict[str, Any]
    recipe: Recipe

    @property
    def label(self) -> str:
        """The values in a line."""
        return ", ".join(f"{key.rpartition('.')[2]}={shown(value)}" for key, value in self.values.items())


def shown(value: Any) -> str:
    """A value in a line, as tables and names have it."""
    if isinstance(value, dict):
        return " ".join(f"{name}={shown(each)}" for name, each in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def makes_data(recipe: Recipe) -> bool:
    """Whether a key of the sweep may change what stands before training, so that a combination makes its own."""
    return any(
        key.partition(".")[0] in ("target", "data", "features", "seed")
        or key in ("head", "head.kind", "init", "init.head")
        for key in recipe.sweep
    )


def without_sweep(recipe: Recipe) -> Recipe:
    """The recipe whose data and features all combinations share."""
    return recipe.model_copy(update={"sweep": {}})


def sweep_points(recipe: Recipe) -> list[Point]:
    """Every combination of the recipe's sweep, in the order of its lists, the last key fastest.

    Raises:
        ValueError: the recipe has no sweep, or a combination is refused by the schema.
    """
    if not recipe.sweep:
        raise ValueError(
            "the recipe has no sweep; list values for some of its keys, such as sweep: {train.ttt_steps: [2, 3]}"
        )
    combinations = itertools.product(*recipe.sweep.values())
    return [
        _point(recipe, number, dict(zip(recipe.sweep, each, strict=True))) for number, each in enumerate(combinations)
    ]


def _point(recipe: Recipe, number: int, values: dict[str, Any]) -> Point:
    words = "-".join(f"{key.rpartition('.')[2]}-{shown(value)}" for key, value in values.items())
    own = {
        "name": f"{recipe.name}-{re.sub(r'[^A-Za-z0-9._-]+', '-', words)}",
        "run_dir": str(point_directory(recipe, number)),
        "tracking.group": recipe.tracking.group or recipe.name,
    }
    return Point(number=number, values=values, recipe=with_values(without_sweep(recipe), values | own))


def point_directory(recipe: Recipe, number: int | str) -> Path:
    """Where the run of a combination lies."""
    return recipe.run_directory.absolute() / FOLDER / str(number)


def write_points(recipe: Recipe) -> list[Point]:
    """Write each combination's recipe into its run directory, for jobs that find it by number."""
    points = sweep_points(recipe)
    for point in points:
        write_text(point_directory(recipe, point.number) / RECIPE, dump_recipe(point.recipe))
    return points


def link_stages(recipe: Recipe, point: Point) -> list[str]:
    """Link what is the same for `point` and stands in the base run, or in an earlier combination's; returns the names.

    A stage is the same when the fingerprint that `point` would give it is the one that it was made with.
    """
    directory = point_directory(recipe, point.number)
    bases = [recipe.run_directory.absolute(), *(point_directory(recipe, number) for number in range(point.number))]
    directory.mkdir(parents=True, exist_ok=True)
    run, linked = open_run(point.recipe), []
    for name in stage_names(point.recipe, last=last_shared(point.recipe)):
        stage = STAGES[name](run)
        base = next((each for each in bases if stage_status(stage, run_dir=each) == "complete"), None)
        link = directory / stage.name
        shared = None if base is None else (base / stage.name).resolve()
        if link.is_symlink() and link.resolve() != shared:
            link.unlink()  # it dangles, or leads to what was made of other settings
        if shared is None:
            break  # what follows reads what is not there
        if not link.exists():
            link.symlink_to(shared, target_is_directory=True)
        linked.append(stage.name)
    return linked


def last_shared(recipe: Recipe) -> str:
    """The last stage before training."""
    return "prepare" if recipe.features.mode == "online" else "extract"


def ready_point(recipe: Recipe, point: Point, *, say: Say) -> None:
    """Make all ready that the training of `point` reads: linked where it is shared, and else made in its own run."""
    linked = link_stages(recipe, point)
    say(f"{point.number}: {point.label}: {', '.join(linked) or 'nothing'} shared")
    if len(linked) < len(stage_names(point.recipe, last=last_shared(point.recipe))):
        run_until(point.recipe, last=last_shared(point.recipe), say=lambda line: say(f"{point.number}: {line}"))


def run_sweep(recipe: Recipe, *, say: Say) -> Path:
    """Make what is shared, train every combination, one after the other, and write the table; returns its file."""
    from eyas.recipes.sweep_table import write_table

    points = write_points(recipe)
    run_until(without_sweep(recipe), last=last_shared(recipe), say=say)
    for point in points:
        say(f"sweep {point.number + 1} of {len(points)}: {point.label}")
        link_stages(recipe, point)
        run_until(point.recipe, last="train", say=say)
    return write_table(recipe)
