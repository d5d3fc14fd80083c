"""What all figures share: size, colours, markers, axes. The same results give the same bytes: no date, no random ids.

Colours are those of Okabe and Ito (2008), which people with any common colour vision can tell apart; every line also has
its own marker and dashes, so that a grey print says the same. The canvas is small and its text large, so that it stays
readable when a phone shrinks it to 320 pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from eyas.eval.records import AR
from eyas.eval.report.names import arm_label, drafting_arms

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 2)), (0, (3, 1, 1, 1, 1, 1)))
INK, GREY = "#222222", "#666666"
SIZE = (5.0, 3.9)
"""Inches of a figure with one panel."""
FONT = 12
"""Points of all text; a phone shows them as 11 pixels."""


class Style(NamedTuple):
    """How one line is drawn."""

    colour: str
    marker: str
    dashes: Any
    label: str

    @property
    def line(self) -> dict[str, Any]:
        """For `Axes.plot` and `Axes.errorbar`."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "label": self.label,
            "markersize": 5,
            "linewidth": 1.6,
        }


def style_of(index: int, label: str) -> Style:
    """The style of line number `index` of a figure; 36 lines look different, since dashes move on when colours start again."""
    turn, wrapped = divmod(index, len(COLOURS))
    return Style(COLOURS[wrapped], MARKERS[wrapped], DASHES[(wrapped + turn) % len(DASHES)], label)


def arm_styles(results: dict[str, Any]) -> dict[str, Style]:
    """The same style for an arm in every figure; AR is grey and the schedule black."""
    styles = {AR: Style(GREY, "X", "-", "plain decoding (AR)")}
    others = [arm for arm in drafting_arms(results) if results["arms"][arm]["kind"] != "schedule"]
    styles |= {arm: style_of(index, arm_label(results, arm)) for index, arm in enumerate(others)}
    for arm in drafting_arms(results):
        styles.setdefault(arm, Style(INK, "*", "-", arm_label(results, arm)))
    return styles


def batch_axis(axes: Axes, sizes: Sequence[int], *, label: str = "batch size (requests running)") -> None:
    """A logarithmic axis with exactly the measured batch sizes on it."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(label)


def plain_log_axis(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of each decade, written as plain numbers, on an axis that is logarithmic already."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def legend_below(canvas: Canvas, handles: Sequence[Any], labels: Sequence[str], *, columns: int = 3) -> None:
    """One legend for all panels, below them, where it hides no data, in as many columns as its labels leave room for."""
    room = 72 * canvas.get_figwidth() / FONT
    fitting = next(
        number for number in range(min(columns, len(labels)), 0, -1) if _width(labels, number) <= room or number == 1
    )
    canvas.legend(handles, labels, loc="outside lower center", ncols=fitting, frameon=False, columnspacing=1.0)


def _width(labels: Sequence[str], columns: int) -> float:
    """About how many font sizes a legend is wide: 0.6 for a letter, 4 for a column's line and gaps."""
    return sum(0.6 * max(map(len, part)) + 4 for part in np.array_split(np.array(labels, dtype=object), columns))


def style_handles(styles: Sequence[Style]) -> list[Line2D]:
    """Legend entries for styles, whatever was drawn."""
    return [Line2D([], [], **style.line) for style in styles]


def svg(draw: Callable[[Canvas], None], *, salt: str, title: str, size: tuple[float, float] = SIZE) -> str:
    """Draw on an empty canvas and return it as an SVG element.

    Args:
        draw: adds panels to the canvas.
        salt: prefix of all ids, unique in the page.
        title: what a screen reader says.
        size: width and height in inches.
    """
    settings: dict[Any, Any] = {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": FONT,
        "axes.titlesize": FONT,
        "legend.fontsize": FONT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
    }
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=size, layout="constrained")
        draw(canvas)
        stream = io.StringIO()
        canvas.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    # Ids must be unique in the page that holds all figures: matplotlib numbers them from 1 in each.
    text = text[text.index("<svg") :].replace('id="', f'id="{salt}-').replace('href="#', f'href="#{salt}-')
    text = text.replace("url(#", f"url(#{salt}-")
    return text.replace("<svg ", f'<svg role="img" aria-label="{_attribute(title)}" ', 1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
