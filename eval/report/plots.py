"""The figures, as inline SVG. The same results give the same bytes: no date, and a fixed salt for element ids."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from eyas.eval.records import AR
from eyas.eval.report.document import Figure
from eyas.eval.report.words import DATASET_NAMES, MAIN_DATASET

COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4fa3", "#8a6d1f")
GREY = "#666666"
# Names in the training stage's metrics.jsonl (KL of the first TTT step), and plain names for heads trained elsewhere.
LOSS_KEYS = ("kl_1", "loss")
TAU_KEYS = ("heldout/tau", "heldout_tau")


def speedup_figure(results: dict[str, Any]) -> Figure:
    """Ratio to plain decoding over batch size, with intervals, the AR-vs-AR spread and the line at 1."""

    def draw(axes: Axes) -> None:
        null = [row for row in results["null"] if row["dataset"] == MAIN_DATASET and row["spread"] is not None]
        if null:
            sizes, spreads = [row["batch_size"] for row in null], [row["spread"] for row in null]
            below = [1 / spread for spread in spreads]
            axes.fill_between(sizes, below, spreads, color=GREY, alpha=0.18, linewidth=0, label="AR against AR")
        axes.axhline(1, color=GREY, linewidth=1)
        for index, arm in enumerate(_head_arms(results)):
            cells = [cell for cell in results["cells"] if cell["arm"] == arm and cell["dataset"] == MAIN_DATASET]
            sizes, ratios = [cell["batch_size"] for cell in cells], [cell["ratio"] for cell in cells]
            errors = [
                [max(cell["ratio"] - cell["interval"][0], 0) for cell in cells],
                [max(cell["interval"][1] - cell["ratio"], 0) for cell in cells],
            ]
            colour = COLOURS[index % len(COLOURS)]
            axes.errorbar(
                sizes, ratios, yerr=errors, marker="o", capsize=3, color=colour, label=f"head, {_k(results, arm)}"
            )
        _batch_axis(axes, results)
        axes.set_ylabel("throughput, head / AR")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    caption = (
        "Throughput relative to plain decoding, held-out chat prompts. Bars: 95 % intervals over starts and prompts. "
        "Grey band: how far two starts of plain decoding lie apart. Below the line at 1 the head is slower."
    )
    return Figure(_svg(draw, salt="speedup"), caption)


def throughput_figure(results: dict[str, Any]) -> Figure:
    """Output tokens per second over batch size for every arm."""

    def draw(axes: Axes) -> None:
        for index, arm in enumerate(results["arms"]):
            rows = [row for row in results["throughput"] if row["arm"] == arm and row["dataset"] == MAIN_DATASET]
            colour = GREY if arm == AR else COLOURS[(index - 1) % len(COLOURS)]
            label = "plain decoding (AR)" if arm == AR else f"head, {_k(results, arm)}"
            sizes = [row["batch_size"] for row in rows]
            axes.plot(sizes, [row["tokens_per_second"] for row in rows], marker="o", color=colour, label=label)
            starts = [(row["batch_size"], rate) for row in rows for rate in row["tokens_per_second_by_start"]]
            axes.scatter([size for size, _ in starts], [rate for _, rate in starts], s=8, color=colour, alpha=0.5)
        _batch_axis(axes, results)
        axes.set_ylabel("output tokens / s")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    return Figure(
        _svg(draw, salt="throughput"), "Throughput by batch size, held-out chat prompts. Small dots: single starts."
    )


def acceptance_figure(results: dict[str, Any]) -> Figure:
    """Marginal (solid) and conditional (dashed) acceptance by position of the longest chain, per dataset."""

    def draw(axes: Axes) -> None:
        longest = max((row["draft_length"] for row in results["acceptance"]), default=1)
        for index, row in enumerate(row for row in results["acceptance"] if row["draft_length"] == longest):
            positions = list(range(1, longest + 1))
            colour = COLOURS[index % len(COLOURS)]
            conditional = [float("nan") if value is None else value for value in row["conditional"]]
            axes.plot(
                positions, row["marginal"], marker="o", color=colour, label=f"{DATASET_NAMES[row['dataset']]}, marginal"
            )
            axes.plot(
                positions,
                conditional,
                "--",
                marker="s",
                color=colour,
                label=f"{DATASET_NAMES[row['dataset']]}, conditional",
            )
            axes.xaxis.set_major_locator(FixedLocator(positions))
        axes.set_xlabel(f"position in the chain (k={longest})")
        axes.set_ylabel("acceptance")
        axes.set_ylim(0, 1)
        axes.legend(frameon=False)

    caption = (
        "Acceptance by position. Marginal: share of all steps. Conditional: share of the steps that accepted "
        "everything before."
    )
    return Figure(_svg(draw, salt="acceptance"), caption)


def training_figure(results: dict[str, Any]) -> Figure | None:
    """Training loss and held-out tau over steps, or None when the context brings no metrics."""
    metrics = (results["context"].get("training") or {}).get("metrics", [])
    losses, taus = _series(metrics, LOSS_KEYS), _series(metrics, TAU_KEYS)
    if not losses and not taus:
        return None

    def draw(axes: Axes) -> None:
        axes.plot([step for step, _ in losses], [loss for _, loss in losses], color=COLOURS[0], linewidth=1)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel("training loss (nats)", color=COLOURS[0])
        right = axes.twinx()
        right.plot([step for step, _ in taus], [tau for _, tau in taus], marker="o", color=COLOURS[1])
        right.set_ylabel("held-out tau", color=COLOURS[1])
        right.spines["top"].set_visible(False)

    return Figure(_svg(draw, salt="training"), "Training: loss (left axis) and held-out prefix-joint tau (right axis).")


def _series(metrics: list[dict[str, Any]], keys: tuple[str, ...]) -> list[tuple[int, float]]:
    """(step, value) of the records that hold one of `keys`."""
    return [(row["step"], row[key]) for row in metrics for key in keys if row.get(key) is not None]


def _head_arms(results: dict[str, Any]) -> list[str]:
    return [arm for arm in results["arms"] if arm != AR]


def _k(results: dict[str, Any], arm: str) -> str:
    return f"k={results['arms'][arm]}"


def _batch_axis(axes: Axes, results: dict[str, Any]) -> None:
    sizes = sorted({row["batch_size"] for row in results["throughput"] if row["dataset"] == MAIN_DATASET})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("batch size (requests running)")


def _svg(draw: Callable[[Axes], None], *, salt: str) -> str:
    settings: dict[Any, Any] = {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
    }
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=(6.8, 3.8), layout="constrained")
        draw(canvas.add_subplot())
        stream = io.StringIO()
        canvas.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    # Ids must be unique in the page that holds all figures: matplotlib numbers them from 1 in each.
    svg = svg[svg.index("<svg") :].replace('id="', f'id="{salt}-').replace('"#', f'"#{salt}-')
    return svg.replace("url(#", f"url(#{salt}-")
