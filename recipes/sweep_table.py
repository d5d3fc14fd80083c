"""The end of a sweep: held-out tau of every combination, best first, and against each key, as Markdown, JSON and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.heads.files import read_json, write_json, write_text
from eyas.recipes.schema import Recipe
from eyas.recipes.sweep import FOLDER, Point, point_directory, shown, sweep_points


def write_table(recipe: Recipe) -> Path:
    """Write sweep.json, sweep.svg and sweep.md into the sweep's folder, of the combinations that are trained.

    Raises:
        ValueError: none is.
    """
    folder = recipe.run_directory.absolute() / FOLDER
    points = sweep_points(recipe)
    rows = [_row(recipe, point) for point in points]
    trained = [row for row in rows if row["heldout_tau"] is not None]
    if not trained:
        raise ValueError(
            f"no combination of the sweep in {folder} is trained yet; run `eyas sweep` with the same recipe"
        )
    keys = list(recipe.sweep)
    write_json(folder / "sweep.json", {"keys": keys, "runs": rows})
    _plot(trained, keys=keys, path=folder / "sweep.svg")
    write_text(folder / "sweep.md", _markdown(recipe.name, rows, keys=keys))
    return folder / "sweep.md"


def _row(recipe: Recipe, point: Point) -> dict[str, Any]:
    train = point_directory(recipe, point.number) / "train"
    found = read_json(train / "heldout.json") if (train / "heldout.json").is_file() else None
    manifest = read_json(train / "manifest.json") if (train / "manifest.json").is_file() else None
    return {
        "run": point.number,
        "values": point.values,
        "heldout_tau": found and found["heldout_tau"],
        "chain_length": found and found["chain_length"],
        "marginal": found and found["heldout_marginal"],
        "conversations": found and found["heldout_conversations"],
        "seconds": manifest and manifest["seconds"],
    }


def _markdown(name: str, rows: list[dict[str, Any]], *, keys: list[str]) -> str:
    """Best first; what is not trained stands last and says so."""
    order = sorted(rows, key=lambda row: -(row["heldout_tau"] or 0.0))
    heads = ["run", *keys, "held-out tau", "marginal acceptance", "training, s"]
    lines = [f"# Sweep {name}", "", f"| {' | '.join(heads)} |", f"|{' ---: |' * len(heads)}"]
    for row in order:
        values = [shown(row["values"][key]) for key in keys]
        lines.append(f"| {' | '.join([str(row['run']), *values, *_results(row)])} |")
    lengths = {row["chain_length"] for row in rows if row["chain_length"] is not None}
    lines += [
        "",
        f"Held-out tau at k={', '.join(map(str, sorted(lengths)))}: tokens per verification step, bonus token included, "
        "step-weighted, as training measures it; one run each, so differences of a percent are not told from chance. "
        "Speed is not in this table: `eyas score` measures it.",
    ]
    return "\n".join(lines) + "\n"


def _results(row: dict[str, Any]) -> list[str]:
    if row["heldout_tau"] is None:
        return ["not trained", "", ""]
    marginal = ", ".join(f"{value:.3f}" for value in row["marginal"])
    return [f"{row['heldout_tau']:.3f}", marginal, "" if row["seconds"] is None else f"{row['seconds']:.0f}"]


def _plot(rows: list[dict[str, Any]], *, keys: list[str], path: Path) -> None:
    """Tau against each key, a dot a run, and a line through the means."""
    import io

    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(keys) + 0.8, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for axis, key in zip(axes, keys, strict=True):
        names = list(dict.fromkeys(shown(row["values"][key]) for row in rows))
        taus = {name: [row["heldout_tau"] for row in rows if shown(row["values"][key]) == name] for name in names}
        for place, name in enumerate(names):
            axis.plot([place] * len(taus[name]), taus[name], "o", color="#0072B2", markersize=5)
        axis.plot(
            range(len(names)), [sum(taus[name]) / len(taus[name]) for name in names], "-", color="#D55E00", linewidth=1
        )
        axis.set_xticks(range(len(names)), names)
        axis.set_xlabel(key)
        axis.margins(x=0.2)
    axes[0].set_ylabel("held-out tau")
    text = io.StringIO()
    figure.savefig(text, format="svg")
    write_text(path, text.getvalue())
