"""Acceptance by position in the chain and by position in the answer."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator

from eyas.eval.report.document import Figure
from eyas.eval.report.figures.canvas import legend_below, style_of, svg
from eyas.eval.report.names import arm_label, group_name, groups, of_group


def longest_heads(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the head's longest chain that drafted; other methods and a schedule draft by another law."""
    heads = [row for row in rows if row["kind"] == "head" and row["marginal"]]
    longest = max((row["draft_length"] for row in heads), default=0)
    return [row for row in heads if row["draft_length"] == longest]


def chain_figure(results: dict[str, Any], rows: list[dict[str, Any]]) -> Figure:
    """Marginal (filled) and conditional (hollow) acceptance by position in the chain, a line per prompts, temperature and arm.

    Args:
        rows: of `results["acceptance"]`, at least one, all with the same draft length.
    """
    longest = rows[0]["draft_length"]

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        for index, row in enumerate(rows):
            name = f"{arm_label(results, row['arm'])}, {group_name(row['dataset'], row['temperature'])}"
            style = style_of(index, name)
            positions = range(1, len(row["marginal"]) + 1)
            axes.plot(positions, row["marginal"], **style.line)
            hollow: dict[str, Any] = {
                "color": style.colour,
                "marker": style.marker,
                "linestyle": ":",
                "markerfacecolor": "white",
            }
            axes.plot(positions, [_or_gap(value) for value in row["conditional"]], linewidth=1.2, **hollow)
        axes.xaxis.set_major_locator(FixedLocator(range(1, longest + 1)))
        axes.set_xlabel(f"position in the chain of k={longest} drafted tokens")
        axes.set_ylabel("acceptance")
        axes.set_ylim(0, 1)
        handles, labels = axes.get_legend_handles_labels()
        legend_below(canvas, handles, labels, columns=2)

    text = svg(draw, salt="chain", title="Acceptance by position in the chain")
    return Figure(
        text,
        f"Acceptance by position in the head's longest chain, k={longest}. Filled markers: marginal, the share of all steps that accept that far. "
        "Hollow, dotted: conditional, among the steps that accepted everything before.",
    )


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else value


def output_figure(rows: list[dict[str, Any]], *, draft_length: int) -> Figure:
    """tau by position in the answer, with intervals.

    Args:
        rows: of `results["acceptance_positions"]`, all of one arm; a line per prompts and temperature.
        draft_length: of that arm.
    """

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        for index, group in enumerate(groups(rows)):
            mine = of_group(rows, group)
            taus = [row["tau"] for row in mine]
            bounds = [row["interval"] or [row["tau"], row["tau"]] for row in mine]
            below = [max(tau - low, 0) for tau, (low, _) in zip(taus, bounds, strict=True)]
            above = [max(high - tau, 0) for tau, (_, high) in zip(taus, bounds, strict=True)]
            style = style_of(index, group_name(*group))
            places = [slot + 0.06 * index for slot in range(len(mine))]
            axes.errorbar(places, taus, yerr=(below, above), capsize=2.5, elinewidth=1, **style.line)
        starts = sorted({row["from"] for row in rows})
        axes.xaxis.set_major_locator(FixedLocator(range(len(starts))))
        axes.set_xticklabels([str(start) for start in starts])
        axes.set_xlabel("position in the answer [tokens], start of the bucket")
        axes.set_ylabel("tau, tokens per step")
        axes.set_ylim(1, draft_length + 1)
        handles, labels = axes.get_legend_handles_labels()
        legend_below(canvas, handles, labels, columns=2)

    text = svg(draw, salt="output-position", title="Acceptance by position in the answer")
    return Figure(
        text,
        f"tau by position in the answer, k={draft_length}, step-weighted, 95 % intervals. 1: nothing was accepted.",
    )
