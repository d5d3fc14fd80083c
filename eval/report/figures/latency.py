"""Latency: the whole distribution at a few batch sizes, and what throughput costs in latency."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Canvas

from eyas.eval.records import AR
from eyas.eval.report.document import Figure
from eyas.eval.report.figures.canvas import SIZE, arm_styles, legend_below, plain_log_axis, style_handles, svg
from eyas.eval.report.names import batch_sizes, drafting_arms, group_name, groups, is_control, of_group, of_phase

QUANTITIES = (("e2e", "total latency [s]", 1.0), ("tpot", "TPOT [ms per token]", 1000.0))


def cdf_figures(results: dict[str, Any]) -> list[Figure]:
    """Distributions of total latency and TPOT for the first group of the grid: AR, the fastest and the slowest other arm."""
    rows = results["latency_curves"]
    if not rows or not drafting_arms(results):
        return []
    group = groups(rows)[0]
    mine = of_group(rows, group)
    sizes = batch_sizes(mine)
    chosen = list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))
    return [_cdf(results, group, size) for size in chosen]


def _cdf(results: dict[str, Any], group: tuple[str, float], size: int) -> Figure:
    rows = [row for row in of_group(results["latency_curves"], group) if row["batch_size"] == size]
    shown = _contrast(results, group, size)
    styles = arm_styles(results)

    def draw(canvas: Canvas) -> None:
        for position, (quantity, label, scale) in enumerate(QUANTITIES):
            axes = canvas.add_subplot(1, 2, position + 1)
            for row in rows:
                if row["arm"] in shown and row[quantity] is not None:
                    style = styles[row["arm"]]
                    values = [scale * value for value in row[quantity]]
                    axes.plot(values, row["levels"], markevery=4, **style.line)
            axes.set_xlabel(label)
            axes.set_ylim(0, 1)
            if position == 0:
                axes.set_ylabel("share of requests at or below")
        drawn = [styles[arm] for arm in shown]
        legend_below(canvas, style_handles(drawn), [style.label for style in drawn])

    name = group_name(*group)
    text = svg(draw, salt=f"cdf-{size}", title=f"Distribution of latency at batch size {size}, {name}")
    return Figure(
        text,
        f"Batch size {size}, {name}: total latency and TPOT of every request. Further left is better. "
        f"Shown: plain decoding, and the drafting arms with the highest and the lowest throughput here.{_left_out(results)}",
    )


def _contrast(results: dict[str, Any], group: tuple[str, float], size: int) -> list[str]:
    """AR and the fastest and slowest drafting arm of a cell of the grid, without repeats."""
    rates = {
        row["arm"]: row["tokens_per_second"]
        for row in of_phase(of_group(results["throughput"], group), "grid")
        if row["batch_size"] == size
    }
    others = [arm for arm in drafting_arms(results) if arm in rates and not is_control(results, arm)]
    picked = [arm for arm in (AR,) if arm in rates]
    if others:
        picked += [max(others, key=rates.__getitem__), min(others, key=rates.__getitem__)]
    return list(dict.fromkeys(picked))


def _left_out(results: dict[str, Any]) -> str:
    """Absolute numbers of two times do not stand in one figure."""
    if not results["schedule_starts"]:
        return ""
    return " The schedule is not shown: it was measured at another time, beside other starts of AR."


def frontier_figures(results: dict[str, Any]) -> list[Figure]:
    """Throughput against median TPOT in the grid, one point per batch size and arm, per group with several batch sizes."""
    rows = of_phase(results["throughput"], "grid")
    wanted = [group for group in groups(rows) if len(batch_sizes(of_group(rows, group))) > 1]
    return [_frontier(results, group, salt=f"frontier-{index}") for index, group in enumerate(wanted)]


def _frontier(results: dict[str, Any], group: tuple[str, float], *, salt: str) -> Figure:
    rates = {(row["arm"], row["batch_size"]): row for row in of_phase(of_group(results["throughput"], group), "grid")}
    medians = {
        (row["arm"], row["batch_size"]): 1000 * row["tpot"]["p50"]
        for row in of_phase(of_group(results["latency"], group), "grid")
        if row["tpot"] is not None
    }
    styles = arm_styles(results)
    arms = [arm for arm in (AR, *drafting_arms(results)) if any(key[0] == arm for key in medians)]

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        for arm in arms:
            keys = sorted(key for key in medians if key[0] == arm and key in rates)
            places = [(medians[key], rates[key]["tokens_per_second"]) for key in keys]
            axes.plot([x for x, _ in places], [y for _, y in places], **styles[arm].line)
            if arm == AR:
                for (_, size), spot in zip(keys, places, strict=True):
                    axes.annotate(str(size), spot, textcoords="offset points", xytext=(4, -12), fontsize=11)
        axes.set_xscale("log")
        plain_log_axis(axes.xaxis)
        axes.set_xlabel("TPOT, median [ms per token]")
        axes.set_ylabel("output tokens / s")
        axes.set_ylim(bottom=0)
        drawn = [styles[arm] for arm in arms]
        legend_below(canvas, style_handles(drawn), [style.label for style in drawn])

    name = group_name(*group)
    text = svg(draw, salt=salt, title=f"Throughput against per-token latency, {name}", size=SIZE)
    return Figure(
        text,
        f"{name}: what a request feels (TPOT) against what the machine delivers, along the batch sizes (written at the "
        f"AR points). Up and to the left is better.{_left_out(results)}",
    )
