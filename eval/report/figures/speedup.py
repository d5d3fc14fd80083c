"""Throughput relative to plain decoding over batch size, with intervals: one figure per prompts and temperature."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from eyas.eval.report.document import Figure
from eyas.eval.report.figures.canvas import GREY, arm_styles, batch_axis, legend_below, svg
from eyas.eval.report.names import batch_sizes, drafting_arms, group_name, groups, of_group

CAPTION = (
    "Throughput relative to plain decoding; of a schedule, to the AR starts of its own phase. Bars: 95 % intervals. Grey "
    "band: how far plain decoding lies from itself. "
    "Below the line at 1 drafting is slower. Arms are moved sideways a little, so that bars do not hide each other."
)
SPREAD = 0.035
"""Sideways distance of two arms at the same batch size, as a share of the size."""


def speedup_figures(results: dict[str, Any]) -> list[Figure]:
    """One figure for every (prompts, temperature) measured at two batch sizes or more."""
    cells = results["cells"]
    wanted = [group for group in groups(cells) if len(batch_sizes(of_group(cells, group))) > 1]
    return [_figure(results, group, salt=f"speedup-{index}") for index, group in enumerate(wanted)]


def _figure(results: dict[str, Any], group: tuple[str, float], *, salt: str) -> Figure:
    cells, styles = of_group(results["cells"], group), arm_styles(results)
    arms = [arm for arm in drafting_arms(results) if any(cell["arm"] == arm for cell in cells)]

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        _null_band(axes, cells)
        axes.axhline(1, color=GREY, linewidth=1)
        for index, arm in enumerate(arms):
            mine = [cell for cell in cells if cell["arm"] == arm]
            shift = 1 + SPREAD * (index - (len(arms) - 1) / 2)
            ratios, below, above = zip(*(_with_errors(cell) for cell in mine), strict=True)
            sizes = [cell["batch_size"] * shift for cell in mine]
            axes.errorbar(sizes, ratios, yerr=(below, above), capsize=2.5, elinewidth=1, **styles[arm].line)
        batch_axis(axes, batch_sizes(cells))
        axes.set_ylabel("throughput, drafting / AR")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(8))
        handles, labels = axes.get_legend_handles_labels()
        legend_below(canvas, handles, labels)

    name = group_name(*group)
    text = svg(draw, salt=salt, title=f"Throughput relative to plain decoding, {name}")
    return Figure(text, f"{name}. {CAPTION}")


def _with_errors(cell: dict[str, Any]) -> tuple[float, float, float]:
    """Ratio, and how far its interval reaches down and up."""
    low, high = cell["interval"]
    return cell["ratio"], max(cell["ratio"] - low, 0), max(high - cell["ratio"], 0)


def _null_band(axes: Axes, cells: list[dict[str, Any]]) -> None:
    """The widest AR-against-AR band of each batch size."""
    bands = {size: [cell["null_band"] for cell in cells if cell["batch_size"] == size] for size in batch_sizes(cells)}
    known = {size: [band for band in each if band is not None] for size, each in bands.items()}
    sizes = [size for size, each in known.items() if each]
    if sizes:
        lows = [min(low for low, _ in known[size]) for size in sizes]
        highs = [max(high for _, high in known[size]) for size in sizes]
        axes.fill_between(sizes, lows, highs, color=GREY, alpha=0.18, linewidth=0, label="AR against AR")
