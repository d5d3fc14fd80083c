"""The command line: `eyas`. Commands parse, call one function of another file, and print.

Everything heavy is imported inside the command that needs it, so that `eyas --help` and shell completion stay fast.
Errors of the user arrive here as `ValueError` (a full or read-only disk as `OSError`) and leave as one line on stderr
with exit code 2, a training that a signal stopped with 75 (run it again); set EYAS_TRACEBACK=1 to see where they came from.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from eyas.recipes import ceiling_command, data_commands, head_commands, report_command, slurm_commands, sweep_command
from eyas.recipes.arguments import OnlyOption, OverridesArgument, RecipeArgument
from eyas.train.preemption import EXIT_REQUEUE, Preempted

if TYPE_CHECKING:
    from eyas.recipes.schema import Recipe

USER_ERROR = 2
INTERRUPTED = 130
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class _Commands(TyperGroup):
    """Turns errors of the user and Ctrl-C into one line and an exit code, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._invoke(ctx)
        except Preempted as stopped:
            typer.echo(f"{stopped}; run the same command again to continue", err=True)
            raise typer.Exit(EXIT_REQUEUE) from stopped

    def _invoke(self, ctx: Any) -> Any:
        if os.environ.get("EYAS_TRACEBACK") == "1":
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except ValueError as error:
            message = str(error)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            message = f"{error.filename or 'disk'}: {error.strerror}; free space, or set run_dir=... to write elsewhere"
        except KeyboardInterrupt as error:
            typer.echo("interrupted; run the same command again to continue", err=True)
            raise typer.Exit(INTERRUPTED) from error
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(USER_ERROR)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a draft head for your language model, serve it in vLLM, and measure whether it pays.",
)
recipes_app = typer.Typer(no_args_is_help=True, help="The recipes that come with eyas.")
app.add_typer(recipes_app, name="recipes")
app.add_typer(slurm_commands.slurm_app, name="slurm")


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"eyas {importlib.metadata.version('eyas')}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del version  # its callback has done the work


def main() -> None:
    """Entry point of the `eyas` script."""
    app()


@app.command()
def run(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Do everything: data, features, training, export, score, report. What stands is skipped."""
    _run_and_show(recipe, overrides)


@app.command()
def prepare(recipe: RecipeArgument, overrides: OverridesArgument = None, only: OnlyOption = False) -> None:
    """Collect conversations, let the target answer them if asked, and make token ids with an answer mask."""
    _run_stages(recipe, overrides, last="prepare", only=only)


@app.command()
def extract(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    join: Annotated[bool, typer.Option("--join", help="Help an extraction that another process has begun.")] = False,
    part: Annotated[
        bool, typer.Option("--part", help="Make shards beside others; `eyas extract` without it seals them.")
    ] = False,
    only: OnlyOption = False,
) -> None:
    """Run up to the target's hidden states. With --join or --part: take shards, on another GPU or node."""
    if part:
        from eyas.recipes.join import extract_part

        extract_part(_load(recipe, overrides), say=typer.echo)
        return
    if join:
        from eyas.recipes.join import join_extraction

        join_extraction(_load(recipe, overrides), say=typer.echo)
        return
    _run_stages(recipe, overrides, last="extract", only=only)


@app.command()
def train(recipe: RecipeArgument, overrides: OverridesArgument = None, only: OnlyOption = False) -> None:
    """Run up to the trained head."""
    _run_stages(recipe, overrides, last="train", only=only)


@app.command()
def export(recipe: RecipeArgument, overrides: OverridesArgument = None, only: OnlyOption = False) -> None:
    """Run up to the head in vLLM's form."""
    _run_stages(recipe, overrides, last="export", only=only)


@app.command()
def score(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Fresh starts of each arm (score.starts_per_arm).")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", help="Minutes to fill with starts, --repeats at least (score.budget_minutes)."),
    ] = None,
    arm: Annotated[
        str | None, typer.Option("--arm", help="Only this arm beside plain decoding, in a directory of its own.")
    ] = None,
    arm_number: Annotated[
        int | None,
        typer.Option("--arm-number", min=0, help="As --arm, by its number, from 0 (`eyas slurm arms` lists them)."),
    ] = None,
    only: OnlyOption = False,
) -> None:
    """Run up to the measurement in vLLM and the report. A finished session is continued when more starts are asked for."""
    asked = {"score.starts_per_arm": repeats, "score.budget_minutes": budget}
    more = [f"{key}={value}" for key, value in asked.items() if value is not None]
    if arm is not None and arm_number is not None:
        raise ValueError("--arm and --arm-number name the same thing; give one of them")
    _run_and_show(recipe, [*(overrides or []), *more], arm=arm, arm_number=arm_number, only=only)


app.command()(report_command.report)
app.command()(ceiling_command.ceiling)
app.command()(sweep_command.sweep)
app.command()(data_commands.plan)
app.command()(data_commands.presets)
app.command()(head_commands.check)
app.command()(head_commands.convert)


@app.command()
def doctor() -> None:
    """Show the machine and the installed packages, and what is missing."""
    from eyas.recipes.doctor import checks

    results = checks()
    missing = [mend for _, mend in results if mend is not None]
    typer.echo("\n".join(line for line, _ in results))
    for mend in missing:
        typer.echo(f"missing: {mend}", err=True)
    if missing:
        raise typer.Exit(USER_ERROR)


@recipes_app.command("ls")
def recipes_ls() -> None:
    """List the shipped recipes."""
    from eyas.recipes.load import shipped_recipes

    for name, path in shipped_recipes().items():
        summary = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        typer.echo(f"{name}\t{summary}")


@recipes_app.command("cat")
def recipes_cat(recipe: RecipeArgument) -> None:
    """Print a recipe with its comments."""
    from eyas.recipes.load import find_recipe

    typer.echo(find_recipe(recipe).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("cp")
def recipes_cp(
    recipe: RecipeArgument,
    destination: Annotated[Path | None, typer.Argument(help="File or directory; default: here.")] = None,
) -> None:
    """Copy a recipe to edit it, with a line that tells editors its keys; an existing file is never overwritten."""
    from eyas.heads.files import write_text
    from eyas.recipes.json_schema import with_modeline
    from eyas.recipes.load import find_recipe

    source = find_recipe(recipe)
    goal = destination or Path()
    if goal.is_dir():
        goal = goal / source.name
    if goal.exists():
        raise ValueError(f"{goal} exists; name another file or remove it")
    write_text(goal, with_modeline(source.read_text(encoding="utf-8")))
    typer.echo(str(goal))


@recipes_app.command("keys")
def recipes_keys(
    section: Annotated[str | None, typer.Argument(help="Only keys that begin with this, such as data.")] = None,
) -> None:
    """List every setting of a recipe with its default and its meaning."""
    from eyas.recipes.keys import describe_keys

    lines = [
        line for key, line in describe_keys() if section is None or key == section or key.startswith(f"{section}.")
    ]
    if not lines:
        raise ValueError(f"no setting begins with {section!r}; `eyas recipes keys` lists all of them")
    typer.echo("\n".join(lines))


@recipes_app.command("schema")
def recipes_schema() -> None:
    """Print the form of a recipe as a JSON schema, for editors and other tools."""
    from eyas.recipes.json_schema import recipe_schema_text

    typer.echo(recipe_schema_text(), nl=False)


@recipes_app.command("validate")
def recipes_validate(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Check a recipe, and overrides with it, without running anything."""
    resolved = _load(recipe, overrides)
    typer.echo(f"{recipe}: valid, runs in {resolved.run_directory}")


def _load(recipe: str, overrides: list[str] | None) -> Recipe:
    from eyas.recipes.load import load_recipe

    return load_recipe(recipe, overrides=overrides or ())


def _run_stages(recipe: str, overrides: list[str] | None, *, last: str, only: bool) -> None:
    from eyas.recipes.pipeline import run_until

    run_until(_load(recipe, overrides), last=last, say=typer.echo, only=only)


def _run_and_show(
    recipe: str,
    overrides: list[str] | None,
    *,
    arm: str | None = None,
    arm_number: int | None = None,
    only: bool = False,
) -> None:
    from eyas.heads.files import read_json
    from eyas.recipes.pipeline import run_until
    from eyas.recipes.score_stage import arm_numbered, only_arm

    resolved = _load(recipe, overrides)
    name = arm if arm_number is None else arm_numbered(resolved, arm_number)
    finished = run_until(
        resolved if name is None else only_arm(resolved, name), last="score", say=typer.echo, only=only
    )
    score_dir = finished.directory("score")
    report_command.show_results(read_json(score_dir / "results.json"), score_dir=score_dir)
