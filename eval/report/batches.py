"""How full the batches of a cell were: what was asked for is a batch size, what ran thins out as the last answers end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.eval.records import AR
from eyas.eval.report.names import of_group, of_phase

NOMINAL_SHARE = 0.8
"""Share of the time for which a cell should have run its full batch."""


@dataclass(frozen=True)
class FullBatch:
    """Share of a cell's time in which the full batch ran: in plain decoding, and in the arm that had it least."""

    plain: float | None
    least: float


def full_batch(results: dict[str, Any], group: tuple[str, float], batch_size: int) -> FullBatch | None:
    """Of the grid; None where nothing was logged."""
    rows = of_phase(of_group(results["running"], group), "grid")
    shares = {row["arm"]: row["at_nominal"] for row in rows if row["batch_size"] == batch_size}
    return FullBatch(shares.get(AR), min(shares.values())) if shares else None
