"""The measured tau that belongs to a cell."""

from __future__ import annotations

from typing import Any


def tau_of(results: dict[str, Any], cell: dict[str, Any]) -> float | None:
    """Tau of a cell's arm in that cell, within the answer, or None where nothing was drafted."""
    key = ("dataset", "temperature", "batch_size", "arm")
    rows = results.get("acceptance_cells") or []
    return next((row["tau"] for row in rows if all(row[name] == cell[name] for name in key)), None)
