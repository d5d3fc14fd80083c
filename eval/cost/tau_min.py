"""tau_min(B) = T_SD(B, k) / T_AR(B): the acceptance that a step of speculative decoding has to buy.

Where the measured tau lies above this curve, decoding is faster than without; the crossing is the break-even batch size.
The curve belongs to the engine and the machine, tau to the head: it says which of the two is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.cost.measured import Measured
from eyas.eval.cost.starts import percentile_interval
from eyas.eval.records import AR

CURVE_POINTS = 60

ACCEPTANCE = {"tau_drafted": "tau", "tau_drafted_interval": "tau_interval", "tau_common": "tau_all_steps_common"}
"""Our name -> the acceptance section's. `tau_common`: over the prompts that all batch sizes share."""

Draws = Mapping[str, NDArray[np.float64]]
"""Resampled means, arm -> [draws, batch sizes]."""


def tau_min_rows(
    measured: Measured, *, drawn: Draws | None, acceptance_cells: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Per batch size and arm: tau_min with its interval over starts, as measured and as the model has it, beside tau.

    Args:
        drawn: resampled step times; None when nothing shows the spread of starts.
        acceptance_cells: rows of the acceptance section by cell, of which tau's interval over prompts is taken.
    """
    rows = []
    for column, size in enumerate(measured.sizes):
        for arm in measured.arms:
            row = _row(measured, arm=arm, size=size, drawn=None if drawn is None else _ratio(drawn, arm, column))
            if row is not None:
                rows.append(row | _acceptance(row, acceptance_cells))
    return rows


def _ratio(drawn: Draws, arm: str, column: int) -> NDArray[np.float64]:
    return drawn[arm][:, column] / drawn[AR][:, column]


def _row(measured: Measured, *, arm: str, size: int, drawn: NDArray[np.float64] | None) -> dict[str, Any] | None:
    plain, drafted, tau = measured.seconds(AR, size), measured.seconds(arm, size), measured.tau_at(arm, size)
    if plain is None or drafted is None or tau is None:
        return None
    predicted = measured.fit.seconds(arm, [size])[0] / measured.fit.seconds(AR, [size])[0]
    return {
        **measured.group._asdict(),
        "batch_size": size,
        "arm": arm,
        "draft_length": measured.facts[arm].draft_length,
        "synthetic": measured.facts[arm].synthetic,
        "held_out": size in measured.held_out,
        "ar_step_seconds": plain,
        "step_seconds": drafted,
        "tau_min": drafted / plain,
        "tau_min_interval": None if drawn is None else list(percentile_interval(drawn)),
        "tau_min_predicted": float(predicted),
        "tau": tau,
        "decode_speedup": tau * plain / drafted,
    }


def _acceptance(row: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The acceptance section's tau of the same cell, of the steps that drafted, with its interval over prompts."""
    place = ("dataset", "temperature", "batch_size", "arm")
    for cell in cells:
        if all(cell[name] == row[name] for name in place):
            return {name: cell[theirs] for name, theirs in ACCEPTANCE.items()}
    return dict.fromkeys(ACCEPTANCE)


def tau_min_curves(measured: Measured) -> list[dict[str, Any]]:
    """Per arm: the model's tau_min at batch sizes evenly spaced in log B over the measured range, and the pooled tau."""
    grid = np.geomspace(measured.sizes[0], measured.sizes[-1], CURVE_POINTS)
    plain = measured.fit.seconds(AR, grid)
    return [
        {
            **measured.group._asdict(),
            "arm": arm,
            "draft_length": measured.facts[arm].draft_length,
            "tau": measured.taus[arm],
            "batch_sizes": grid.tolist(),
            "tau_min": (measured.fit.seconds(arm, grid) / plain).tolist(),
        }
        for arm in measured.arms
    ]
