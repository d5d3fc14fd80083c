"""Commands about data and its cost: what a run will take, and the named sources of conversations."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.recipes.arguments import OverridesArgument, RecipeArgument


def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    hardware: Annotated[
        str | None, typer.Option(help="Estimate hours for: here (measured in a second), h100, h200, a100-80gb, ...")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many devices of it.")] = 1,
    tokens: Annotated[int | None, typer.Option(help="Tokens of all conversations, where no local file tells.")] = None,
    answer_share: Annotated[float | None, typer.Option(help="Share of them that are answers.")] = None,
) -> None:
    """Show the resolved recipe and what it will take, and do nothing. Exit code 2 when the disk is too small."""
    from eyas.recipes.hardware import find_hardware
    from eyas.recipes.load import dump_recipe, load_recipe
    from eyas.recipes.plan import PlanOptions, make_plan

    resolved = load_recipe(recipe, overrides=overrides or ())
    found = find_hardware(hardware, dtype=resolved.features.dtype) if hardware else None
    options = PlanOptions(hardware=found, devices=devices, tokens=tokens, answer_share=answer_share)
    planned = make_plan(resolved, options=options)
    typer.echo(dump_recipe(resolved))
    typer.echo("\n".join(planned.lines))
    if planned.refusal is not None:
        raise ValueError(planned.refusal)


def presets(name: Annotated[str | None, typer.Argument(help="Show this one as YAML.")] = None) -> None:
    """List the named sources of conversations, for data.sources and data.guard.sources."""
    import yaml

    from eyas.recipes.sources import find_preset
    from eyas.recipes.sources import presets as known

    if name is not None:
        typer.echo(yaml.safe_dump(find_preset(name), sort_keys=False).rstrip())
        return
    for each, preset in known().items():
        typer.echo(f"{each}\t{preset['kind']}\t{preset['about']}")
