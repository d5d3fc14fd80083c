"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes that begin with what was typed."""
    from eyas.recipes.load import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str, typer.Argument(help="Recipe file, or name of a shipped recipe.", autocompletion=complete_recipe)
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.FIELD=VALUE", help="Values to use instead of the recipe's.")
]

OnlyOption = Annotated[
    bool, typer.Option("--only", help="Make this stage and no other; refuse when one before it does not stand.")
]
