"""`eyas sweep`: every combination of a recipe's lists of values, here or as the tasks of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.recipes.arguments import OverridesArgument, RecipeArgument


def sweep(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    link: Annotated[
        bool, typer.Option("--link", help="Only make the runs' directories, with all that their training reads.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Only write the table and the plot of what is trained.")
    ] = False,
) -> None:
    """Train a head for every combination of the recipe's `sweep`, and compare held-out tau."""
    from eyas.recipes.load import load_recipe
    from eyas.recipes.sweep import ready_point, run_sweep, write_points
    from eyas.recipes.sweep_table import write_table

    resolved = load_recipe(recipe, overrides=overrides or ())
    if link:
        for point in write_points(resolved):
            ready_point(resolved, point, say=typer.echo)
        return
    written = write_table(resolved) if table else run_sweep(resolved, say=typer.echo)
    typer.echo(written.read_text(encoding="utf-8").rstrip())
    typer.echo(f"table: {written}")
