"""`eyas report RUN`: the report again from raw records. `eyas report A B`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.recipes.arguments import complete_recipe


def report(
    source: Annotated[
        str, typer.Argument(help="Score directory, run directory, or recipe.", autocompletion=complete_recipe)
    ],
    other: Annotated[
        str | None,
        typer.Argument(help="A second one to compare it with: which cells changed, and what may be claimed."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory for comparison.html, .md and .json; default: only printed.")
    ] = None,
) -> None:
    """Make the report again from the raw records, without an engine. With a second run: compare the two."""
    if other is not None:
        _compare(find_score_dir(source), find_score_dir(other), out=out)
        return
    if out is not None:
        raise ValueError("--out is where a comparison goes; name a second run, or leave it out")
    from eyas.eval.report.build import build_report
    from eyas.recipes.stage import MANIFEST, refresh_files

    score_dir = find_score_dir(source)
    results = build_report(score_dir)
    if (score_dir / MANIFEST).is_file():
        refresh_files(score_dir)
    show_results(results, score_dir=score_dir)


def show_results(results: dict[str, Any], *, score_dir: Path) -> None:
    """The main table and where the report is."""
    from eyas.eval.report.terminal import terminal_table

    typer.echo(terminal_table(results))
    typer.echo(f"report: {score_dir / 'report.html'}")


def _compare(first: Path, second: Path, *, out: Path | None) -> None:
    from eyas.eval.report.build import build_comparison
    from eyas.eval.report.comparison_page import comparison_text

    typer.echo(comparison_text(build_comparison(first, second, out_dir=out)))
    if out is not None:
        typer.echo(f"comparison: {out / 'comparison.html'}")


def find_score_dir(source: str) -> Path:
    """Score directory that `source` means: itself, inside a run directory, or of a recipe.

    Raises:
        ValueError: there are no raw records.
    """
    from eyas.recipes.load import load_recipe

    directory = Path(source).expanduser()
    if not directory.is_dir():
        directory = load_recipe(source).run_directory
    for candidate in (directory, directory / "score"):
        if (candidate / "starts").is_dir():
            return candidate
    raise ValueError(
        f"{directory} holds no raw records (a folder 'starts'); "
        "run `eyas score RECIPE` first, or name a score directory"
    )
