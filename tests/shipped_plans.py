"""What `eyas plan` says of the shipped recipes, for their headers and for the table of docs/recipes.md.

`python -m tests.shipped_plans` writes both anew. The recipes are planned with the configs that come with the package, so
the same lines come out on every machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from typer.testing import CliRunner

from eyas.recipes.cli import app
from eyas.recipes.estimate_tokens import estimate_tokens
from eyas.recipes.hardware import NAMED, gib
from eyas.recipes.load import load_recipe, shipped_recipes
from eyas.recipes.packaged_targets import packaged_targets
from eyas.recipes.plan_facts import PlanFacts
from eyas.recipes.run import plan_run
from eyas.recipes.schema import Recipe
from eyas.recipes.store_form import store_form
from eyas.recipes.target_size import read_target_size

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"
COMMAND = re.compile(r"^# Plan: +(eyas plan .*)$", re.MULTILINE)
FIGURE = "#   "
SHOWN = (
    "features disk:",
    "train disk:",
    "time:",
    "side by side:",
    "regenerate: ",
    "extract: ",
    "train: ",
    "score: ",
    "score, in ",
)
"""Beginnings of the plan's lines that a header has."""

NOT_MEASURED = "This recipe: not measured here."
ANSWER_SHARE = 0.75
"""As the headers' commands have it."""


def header(name: str) -> list[str]:
    """The comment lines that a recipe begins with."""
    lines = shipped_recipes()[name].read_text(encoding="utf-8").splitlines()
    return lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]


def headed(name: str, label: str) -> str:
    """What a header says under `label:`, its lines joined; empty when it says nothing."""
    found: list[str] = []
    for line in header(name):
        if line.startswith(f"# {label}:"):
            found.append(line.partition(":")[2])
        elif found and line.startswith("#      "):
            found.append(line[1:])
        elif found:
            break
    return " ".join(" ".join(found).split())


def figures(name: str) -> list[str]:
    """The estimates that a header has copied from the plan."""
    return [line.removeprefix(FIGURE) for line in header(name) if re.match(rf"{FIGURE}\S", line)]


@cache
def planned(name: str) -> list[str]:
    """The lines of its header's plan that tell what a recipe costs."""
    command = COMMAND.search("\n".join(header(name)))
    assert command is not None, name
    result = CliRunner().invoke(app, shlex.split(command[1])[1:])
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    return [line for line in lines[lines.index("") :] if line.startswith(SHOWN)]


def gpu_recipes() -> list[str]:
    """Shipped recipes that train a head for a target whose config is packaged."""
    recipes = {name: load_recipe(name) for name in shipped_recipes()}
    return [
        name for name, each in recipes.items() if each.target.model in packaged_targets() and each.score.head is None
    ]


def table() -> Iterator[str]:
    """The table of GPU recipes in docs/recipes.md."""
    yield "| recipe | GPUs of one engine | hidden states on disk | checkpoints | hours on 8 x H100 | expected tau |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for name in gpu_recipes():
        facts = _facts(load_recipe(name))
        stored = "none"
        if facts.stores_features and facts.found is not None:
            stored = f"{facts.found.tokens.total * facts.token_bytes(store_form(facts.run.recipe)) / 2**40:.1f} TiB"
        hours = facts.hours(hardware=NAMED["h100"], devices=8)
        each = ", ".join(f"{stage} {value:.1f}" for stage, value in hours.items())
        yield (
            f"| `{name}` | {_engine_gpus(facts.run.recipe)} | {stored} | {gib(facts.checkpoint_bytes(facts.heads[1]))} | "
            f"{sum(hours.values()):.1f} ({each}) | {_published(name)} |"
        )


def _published(name: str) -> str:
    """What a header says was published, without what it says of the recipe itself, which the page says of all."""
    return headed(name, "Expected tau").removesuffix(NOT_MEASURED).strip()


def _facts(recipe: Recipe) -> PlanFacts:
    run = plan_run(recipe)
    size = read_target_size(run.target_dir, dtype=recipe.features.dtype, trust_remote_code=False)
    return PlanFacts(run=run, size=size, found=estimate_tokens(run, tokens=None, answer_share=ANSWER_SHARE))


def _engine_gpus(recipe: Recipe) -> int:
    generation, features, score = recipe.data.generation, recipe.features, recipe.score
    return max(section.tensor_parallel_size for section in (generation, features, score))


def _rewrite_header(name: str) -> None:
    path = shipped_recipes()[name]
    kept = [line for line in header(name) if not re.match(rf"{FIGURE}\S", line)]
    place = next(number for number, line in enumerate(kept) if COMMAND.match(line))
    kept[place + 1 : place + 1] = [FIGURE + line for line in planned(name)]
    rest = path.read_text(encoding="utf-8").splitlines()[len(header(name)) :]
    path.write_text("\n".join([*kept, *rest]) + "\n", encoding="utf-8")


def with_table(text: str) -> str:
    """The page with its table as it is now."""
    begin = text.index("| recipe |")
    end = text.index("\n\n", begin)
    return text[:begin] + "\n".join(table()) + text[end:]


if __name__ == "__main__":
    for name in shipped_recipes():
        if COMMAND.search("\n".join(header(name))):
            _rewrite_header(name)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
