"""Open loop: latency against the rate at which requests arrive, and what the server delivered of it."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Canvas

from eyas.eval.report.document import Figure
from eyas.eval.report.figures.canvas import arm_styles, legend_below, plain_log_axis, style_handles, svg

Row = dict[str, Any]
PANELS = (("e2e", "total latency [s]", 1.0), ("ttft", "TTFT [s]", 1.0), ("tpot", "TPOT [ms]", 1000.0))


def open_loop_figures(results: dict[str, Any], rows: list[Row]) -> list[Figure]:
    """Latency against rate, and delivered against offered rate. `rows`: of `results["open_loop"]` that were served."""
    if len({row["rate"] for row in rows}) < 2:
        return []
    return [_latency(results, rows), _delivered(results, rows)]


def _latency(results: dict[str, Any], rows: list[Row]) -> Figure:
    styles = arm_styles(results)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    tail = _tail(rows)

    def draw(canvas: Canvas) -> None:
        for place, (quantity, label, scale) in enumerate(PANELS):
            axes = canvas.add_subplot(len(PANELS), 1, place + 1)
            for arm in arms:
                mine = [row for row in rows if row["arm"] == arm and row[quantity] is not None]
                for percentile, dashes, strength in (("p50", "-", 1.0), (tail, ":", 0.6)):
                    line = {"color": styles[arm].colour, "marker": styles[arm].marker, "markersize": 4}
                    values = [scale * row[quantity][percentile] for row in mine]
                    axes.plot([row["rate"] for row in mine], values, linestyle=dashes, alpha=strength, **line)
            axes.set_ylabel(label)
            axes.set_yscale("log")
            plain_log_axis(axes.yaxis)
        canvas.axes[-1].set_xlabel("arrivals [requests / s]")
        legend_below(canvas, style_handles([styles[arm] for arm in arms]), [styles[arm].label for arm in arms])

    text = svg(draw, salt="open-loop", title="Open loop: latency against arrival rate", size=(5.0, 6.0))
    return Figure(
        text,
        f"Open loop, real server: latency counted from the scheduled arrival. Solid: median; dotted: {tail}. Where the curve "
        "turns up the server no longer keeps pace.",
    )


def _tail(rows: list[Row]) -> str:
    """The highest percentile that every row tells: with few prompts there is no p99."""
    told = [row[quantity] for row in rows for quantity, _, _ in PANELS if row[quantity] is not None]
    return "p99" if all(values["p99"] is not None for values in told) else "p90"


def _delivered(results: dict[str, Any], rows: list[Row]) -> Figure:
    styles = arm_styles(results)
    arms = list(dict.fromkeys(row["arm"] for row in rows))

    def draw(canvas: Canvas) -> None:
        for place, (label, value) in enumerate((("tokens / s", _rate), ("goodput [1 / s]", _good))):
            axes = canvas.add_subplot(2, 1, place + 1)
            for arm in arms:
                mine = [row for row in rows if row["arm"] == arm]
                axes.plot([row["rate"] for row in mine], [value(row) for row in mine], **styles[arm].line)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        canvas.axes[-1].set_xlabel("arrivals [requests / s]")
        legend_below(canvas, style_handles([styles[arm] for arm in arms]), [styles[arm].label for arm in arms])

    text = svg(draw, salt="delivered", title="Open loop: throughput and goodput against arrival rate", size=(5.0, 4.6))
    return Figure(
        text, "What was delivered at each rate: tokens per second, and requests per second within both service levels."
    )


def _rate(row: Row) -> float:
    return row["tokens_per_second"]


def _good(row: Row) -> float:
    return row["goodput"]["requests_per_second"]
