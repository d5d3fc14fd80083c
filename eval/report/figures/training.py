"""Training loss and held-out tau over steps, where the head was trained in the same run."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Canvas

from eyas.eval.report.document import Figure
from eyas.eval.report.figures.canvas import BLUE, VERMILLION, svg

# Names in the training stage's metrics.jsonl (KL of the first TTT step), and plain names for heads trained elsewhere.
LOSS_KEYS = ("kl_1", "loss")
TAU_KEYS = ("heldout/tau", "heldout_tau")


def training_figure(results: dict[str, Any]) -> Figure | None:
    """The two curves, or None when the context brings no metrics."""
    metrics = (results["context"].get("training") or {}).get("metrics", [])
    losses, taus = _series(metrics, LOSS_KEYS), _series(metrics, TAU_KEYS)
    if not losses and not taus:
        return None

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        axes.plot([step for step, _ in losses], [loss for _, loss in losses], color=BLUE, linewidth=1)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel("training loss (nats)", color=BLUE)
        right = axes.twinx()
        right.plot([step for step, _ in taus], [tau for _, tau in taus], "--o", color=VERMILLION, markersize=4)
        right.set_ylabel("held-out tau", color=VERMILLION)
        right.grid(False)

    text = svg(draw, salt="training", title="Training loss and held-out tau")
    return Figure(text, "Training: loss (left axis, line) and held-out prefix-joint tau (right axis, dots).")


def _series(metrics: list[dict[str, Any]], keys: tuple[str, ...]) -> list[tuple[int, float]]:
    """(step, value) of the records that hold one of `keys`."""
    return [(row["step"], row[key]) for row in metrics for key in keys if row.get(key) is not None]
