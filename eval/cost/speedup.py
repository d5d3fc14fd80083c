"""The model against measurement: step times and speedups, at the batch sizes it was fitted on and at the held-out ones.

Two speedups are predicted. *decode*: tau T_AR / T_SD, against the same of measured steps. *throughput*, the one of the
verdicts: the cell is replayed (replay.py), prompts, thinning tail and all. tau and the time of reading a prompt come
from the fitted batch sizes; of a held-out cell only its answer lengths (of plain decoding) are known.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eyas.eval.cost import model
from eyas.eval.cost.measured import Measured, points_of
from eyas.eval.cost.replay import prefill_seconds, replay, steps_needed
from eyas.eval.cost.steps import all_blocks
from eyas.eval.records import AR


def residual_rows(measured: Measured) -> list[dict[str, Any]]:
    """Per arm and batch size: measured and predicted step time, and the relative error of the prediction."""
    return [
        {
            **measured.group._asdict(),
            "batch_size": point.batch_size,
            "arm": point.arm,
            "draft_length": measured.facts[point.arm].draft_length,
            "held_out": point.batch_size in measured.held_out,
            "measured_seconds": point.seconds,
            "predicted_seconds": float(measured.fit.seconds(point.arm, [point.batch_size])[0]),
            "relative_error": model.residual(measured.fit, point),
        }
        for point in _known_points(measured)
    ]


def form_rows(measured: Measured) -> list[dict[str, Any]]:
    """Per form: its error in the choice, and what it would have given at the held-out sizes, which the choice never saw."""
    points = _known_points(measured)
    fitted = [point for point in points if point.batch_size in measured.fitted]
    held = [point for point in points if point.batch_size in measured.held_out]
    rows = []
    for form in model.FORMS:
        each = model.fit(fitted, form=form)
        rows.append(
            {
                "form": form,
                "chosen": form == measured.fit.form,
                "left_out_error": measured.errors.get(form),
                "held_out_error": model.relative_error(each, held) if held else None,
            }
        )
    return rows


def _known_points(measured: Measured) -> list[model.Point]:
    points = points_of(measured.times, measured.facts)
    return [point for point in points if point.arm in (AR, *measured.arms)]


def speedup_rows(measured: Measured) -> list[dict[str, Any]]:
    """Per batch size and arm: predicted and measured speedup of throughput and of decoding, with relative errors."""
    prefills = {arm: _prefill(measured, arm) for arm in (AR, *measured.arms)}
    rows = []
    for size in measured.sizes:
        for arm in measured.arms:
            row = _speedup_row(measured, arm=arm, size=size, prefills=prefills)
            if row is not None:
                rows.append(row)
    return rows


def _speedup_row(
    measured: Measured, *, arm: str, size: int, prefills: dict[str, float | None]
) -> dict[str, Any] | None:
    rate, plain_rate = measured.rate(arm, size), measured.rate(AR, size)
    if rate is None or plain_rate is None:
        return None
    predicted = _replayed_speedup(measured, arm=arm, size=size, prefills=prefills)
    fit = measured.fit
    decode = float(measured.taus[arm] * fit.seconds(AR, [size])[0] / fit.seconds(arm, [size])[0])
    seen = _decode_speedup(measured, arm=arm, size=size)
    return {
        **measured.group._asdict(),
        "batch_size": size,
        "arm": arm,
        "draft_length": measured.facts[arm].draft_length,
        "synthetic": measured.facts[arm].synthetic,
        "held_out": size in measured.held_out,
        "predicted": None if predicted is None else float(predicted),
        "measured": rate / plain_rate,
        "relative_error": None if predicted is None else predicted / (rate / plain_rate) - 1,
        "decode_predicted": decode,
        "decode_measured": seen,
        "decode_relative_error": None if seen is None else decode / seen - 1,
    }


def _decode_speedup(measured: Measured, *, arm: str, size: int) -> float | None:
    plain, drafted, tau = measured.seconds(AR, size), measured.seconds(arm, size), measured.tau_at(arm, size)
    return None if plain is None or drafted is None or tau is None else tau * plain / drafted


def _prefill(measured: Measured, arm: str) -> float | None:
    blocks = [cell for size in measured.fitted for cell in all_blocks(measured.by_size[size].get(arm, ()))]
    return prefill_seconds(
        blocks, tau=measured.taus[arm], step_seconds=lambda running: float(measured.fit.seconds(arm, [running])[0])
    )


def _replayed_speedup(measured: Measured, *, arm: str, size: int, prefills: dict[str, float | None]) -> float | None:
    """Replayed seconds of plain decoding over those of `arm`, on the answers of plain decoding."""
    lengths = [request.n_out for request in measured.by_size[size][AR][0][0].requests]
    plain = _replayed_seconds(measured, arm=AR, size=size, lengths=lengths, prefill=prefills[AR])
    drafted = _replayed_seconds(measured, arm=arm, size=size, lengths=lengths, prefill=prefills[arm])
    return None if plain is None or drafted is None else plain / drafted


def _replayed_seconds(
    measured: Measured, *, arm: str, size: int, lengths: Sequence[int], prefill: float | None
) -> float | None:
    if prefill is None:
        return None
    by_running = measured.fit.seconds(arm, list(range(1, size + 1)))
    return replay(
        steps_needed(lengths, tau=measured.taus[arm]),
        batch_size=size,
        step_seconds=lambda running: float(by_running[running - 1]),
        prefill_seconds=prefill,
    )


def median_errors(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Median of the absolute relative errors at held-out batch sizes, and of how many cells."""
    held = [row for row in rows if row["held_out"]]
    result: dict[str, Any] = {"cells": len(held)}
    for name in ("relative_error", "decode_relative_error"):
        errors = [abs(row[name]) for row in held if row[name] is not None]
        result[f"median_{name}"] = float(statistics.median(errors)) if errors else None
    return result
