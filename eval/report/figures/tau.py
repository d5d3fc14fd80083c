"""The key figure: the tau that the engine demands (tau_min) against the tau that the head delivers, over batch size.

Where tau lies above tau_min drafting pays; the crossing is the break-even batch size. tau_min belongs to engine and
machine, tau to head and prompts, so the figure says which of the two is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from eyas.eval.report.document import Figure
from eyas.eval.report.figures.canvas import BLUE, INK, VERMILLION, batch_axis, legend_below, svg
from eyas.eval.report.names import arm_label, batch_sizes, group_name, groups, of_group

COLUMNS = 2
CAPTION = (
    "Curve and hollow squares: tau_min, step time with drafting over step time of plain decoding, by the cost model and as "
    "measured. Filled circles: the measured tau, with its 95 % interval over prompts; dashed line: tau over the prompts that every "
    "batch size has. Where the line lies above the curve drafting pays (blue), below it costs (hatched)."
)
Row = dict[str, Any]


def tau_figures(results: dict[str, Any], *, salt: str) -> list[Figure]:
    """One figure per prompts and temperature with two batch sizes or more, one panel per arm. `salt`: unique in the page."""
    rows = (results.get("cost") or {}).get("tau_min") or []
    wanted = [group for group in groups(rows) if len(batch_sizes(of_group(rows, group))) > 1]
    return [_figure(results, group, salt=f"{salt}-{index}") for index, group in enumerate(wanted)]


def _figure(results: dict[str, Any], group: tuple[str, float], *, salt: str) -> Figure:
    rows = of_group(results["cost"]["tau_min"], group)
    curves = {row["arm"]: row for row in of_group(results["cost"]["tau_min_curves"], group)}
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    columns = min(COLUMNS, len(arms))
    lines = -(-len(arms) // columns)

    def draw(canvas: Canvas) -> None:
        for place, arm in enumerate(arms):
            axes = canvas.add_subplot(lines, columns, place + 1)
            mine = [row for row in rows if row["arm"] == arm]
            _panel(axes, mine, curves.get(arm))
            axes.set_title(arm_label(results, arm))
            if place + columns >= len(arms):
                axes.set_xlabel("batch size")
            if place % columns == 0:
                axes.set_ylabel("tokens per step")
        legend_below(canvas, *_legend(), columns=2)

    name = group_name(*group)
    size = (5.0, 1.5 + 2.1 * lines) if columns > 1 else (5.0, 3.9)
    text = svg(draw, salt=salt, title=f"tau_min against measured tau, {name}", size=size)
    return Figure(text, f"{name}. {CAPTION}")


def _panel(axes: Axes, rows: Sequence[Row], curve: Row | None) -> None:
    sizes = [row["batch_size"] for row in rows]
    common = [row["tau"] if row["tau_common"] is None else row["tau_common"] for row in rows]
    axes.plot(sizes, common, color=BLUE, linewidth=1.2, linestyle="--")
    if curve is not None:
        demanded = np.array(curve["tau_min"])
        places = np.array(curve["batch_sizes"])
        delivered = np.interp(np.log(places), np.log(sizes), common)
        axes.plot(places, demanded, color=VERMILLION, linewidth=1.6)
        axes.fill_between(places, demanded, delivered, where=delivered >= demanded, color=BLUE, alpha=0.18, linewidth=0)
        axes.fill_between(
            places,
            demanded,
            delivered,
            where=delivered < demanded,
            facecolor="none",
            edgecolor=VERMILLION,
            hatch="////",
            alpha=0.45,
            linewidth=0,
        )
    squares = [row["tau_min"] for row in rows]
    bars = _errors([(row["tau_min"], row["tau_min_interval"]) for row in rows])
    hollow = {"marker": "s", "markerfacecolor": "white", "markersize": 5, "linestyle": "none", "color": VERMILLION}
    axes.errorbar(sizes, squares, yerr=bars, capsize=2, elinewidth=1, **hollow)
    taus = [row["tau"] for row in rows]
    bars = _errors([(row["tau"], _moved(row)) for row in rows])
    axes.errorbar(
        sizes, taus, yerr=bars, capsize=2, elinewidth=1, marker="o", markersize=5, color=BLUE, linestyle="none"
    )
    axes.axhline(1, color=INK, linewidth=0.6)
    batch_axis(axes, batch_sizes(rows), label="")
    axes.set_ylim(bottom=0.9)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _moved(row: Row) -> list[float] | None:
    """The interval of the acceptance section about this tau, which counts steps without a draft too."""
    interval, middle = row["tau_drafted_interval"], row["tau_drafted"]
    return None if interval is None else [end * row["tau"] / middle for end in interval]


def _errors(values: Sequence[tuple[float, Sequence[float] | None]]) -> tuple[list[float], list[float]]:
    """How far each interval reaches down and up; 0 where there is none."""
    bounds = [(value, interval or (value, value)) for value, interval in values]
    return [max(value - low, 0) for value, (low, _) in bounds], [max(high - value, 0) for value, (_, high) in bounds]


def _legend() -> tuple[list[Any], list[str]]:
    handles: list[Any] = [
        Line2D([], [], color=BLUE, marker="o", markersize=5, linestyle="none"),
        Line2D([], [], color=BLUE, linewidth=1.2, linestyle="--"),
        Line2D([], [], color=VERMILLION, marker="s", markerfacecolor="white", markersize=5),
        Patch(facecolor=BLUE, alpha=0.18),
        Patch(facecolor="none", edgecolor=VERMILLION, hatch="////", alpha=0.6),
    ]
    return handles, ["tau measured", "tau, common prompts", "tau_min demanded", "pays", "costs"]
