"""The cost model's predictions against measurement, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas

from eyas.eval.records import AR
from eyas.eval.report.document import Figure
from eyas.eval.report.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    arm_styles,
    legend_below,
    style_handles,
    svg,
)
from eyas.eval.report.names import arm_label, group_name, groups, of_group

PARTS = (
    ("verify", "verify (AR: forward)", BLUE, ""),
    ("draft", "draft", ORANGE, "///"),
    ("sample", "sample", GREEN, "..."),
)
OVERHEAD = ("overhead", "overhead", GREY, "xx")
Row = dict[str, Any]


def prediction_figure(results: dict[str, Any]) -> Figure | None:
    """Predicted against measured throughput ratio of every cell; None where nothing was predicted."""
    rows = [row for row in results["cost"]["speedup"] if row["predicted"] is not None]
    if not rows:
        return None
    styles = arm_styles(results)
    arms = list(dict.fromkeys(row["arm"] for row in rows))

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        ends = [value for row in rows for value in (row["measured"], row["predicted"])]
        low, high = 0.92 * min(ends), 1.08 * max(ends)
        axes.fill_between(
            [low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=GREY, alpha=0.15, linewidth=0
        )
        axes.plot([low, high], [low, high], color=INK, linewidth=0.8)
        for row in rows:
            style = styles[row["arm"]]
            face = style.colour if row["held_out"] else "white"
            axes.plot(row["measured"], row["predicted"], style.marker, color=style.colour, markerfacecolor=face)
        axes.set_xlabel("measured throughput ratio")
        axes.set_ylabel("predicted")
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        legend_below(canvas, style_handles([styles[arm] for arm in arms]), [styles[arm].label for arm in arms])

    text = svg(draw, salt="prediction", title="Predicted against measured speedup")
    return Figure(
        text,
        "Predicted against measured ratio to plain decoding, all prompts and temperatures. Filled: batch sizes that the model "
        "never saw. Hollow: those it was fitted on. Grey: within 10 %.",
    )


def split_figures(rows: Sequence[Row], results: dict[str, Any]) -> list[Figure]:
    """Stacked parts of a step per batch size and arm, in units of plain decoding's step.

    Args:
        rows: of `results["time_split"]`.
        results: for the names of the arms.
    """
    wanted = [group for group in groups(rows) if any(row["arm"] == AR for row in of_group(rows, group))]
    return [_split(of_group(rows, group), results, group, salt=f"split-{i}") for i, group in enumerate(wanted)]


def _split(rows: list[Row], results: dict[str, Any], group: tuple[str, float], *, salt: str) -> Figure:
    plain = {row["batch_size"]: row["mean"]["step"] for row in rows if row["arm"] == AR}
    order = list(results["arms"])
    shown = sorted(
        (row for row in rows if row["batch_size"] in plain), key=lambda r: (r["batch_size"], order.index(r["arm"]))
    )

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        for line, row in enumerate(shown):
            left = 0.0
            for part, label, colour, hatch in (*PARTS, OVERHEAD):
                width = row["mean"][part] / plain[row["batch_size"]]
                face = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
                axes.barh(line, width, left=left, height=0.7, label=label if line == 0 else None, **face)
                left += width
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(shown)), [f"{arm_label(results, r['arm'])}, batch {r['batch_size']}" for r in shown])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("time of a step, plain decoding = 1")
        handles, labels = axes.get_legend_handles_labels()
        legend_below(canvas, handles, labels, columns=2)

    height = min(1.2 + 0.27 * len(shown), 9.0)
    name = group_name(*group)
    text = svg(draw, salt=salt, title=f"Where the time of a step goes, {name}", size=(5.0, height))
    return Figure(
        text,
        f"{name}: parts of one decode step, from separate instrumented starts. A bar's length is tau_min of the instrumented "
        "run: the tokens a step must bring to break even.",
    )
