"""The break-even rows of results.json: measured, of decode steps, and predicted, with intervals over starts and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.cost import model
from eyas.eval.cost.break_even import describe, linear_break_even, paying_ranges, predicted_ranges
from eyas.eval.cost.measured import Measured, points_of
from eyas.eval.cost.prompt_draws import Weights, common_prompts, draw_weights, tau_factors, throughput_factors
from eyas.eval.cost.steps import all_blocks
from eyas.eval.cost.tau_min import Draws
from eyas.eval.records import AR

Floats = NDArray[np.float64]

INTERVAL_RULE = (
    "whole starts of all arms are resampled, and prompts, which move tau and the answers' times; percentiles of the crossings. "
    "tau of decode steps is over the prompts that all batch sizes share"
)


@dataclass(frozen=True)
class _Resampled:
    """What the intervals come from: step times and rates over starts, the model fitted to each draw, prompts' weights."""

    times: Draws
    rates: Draws
    fits: list[model.Fit]
    weights: Weights


def break_even_rows(measured: Measured, *, times: Draws | None, draws: int, seed: int) -> list[dict[str, Any]]:
    """Per arm: where throughput's speedup crosses 1 as measured, where that of decode steps does, and where the model's does.

    Args:
        measured: one (dataset, temperature).
        times: resampled step times; None when nothing shows the spread of starts, and then there are no intervals.
        draws: of the intervals.
        seed: of the resampling.
    """
    resampled = None if times is None else _resample(measured, times, draws=draws, seed=seed)
    return [
        {
            **measured.group._asdict(),
            "arm": arm,
            "draft_length": measured.facts[arm].draft_length,
            "smallest_tested": measured.sizes[0],
            "largest_tested": measured.sizes[-1],
            "measured": _of_throughput(measured, arm, resampled),
            "measured_decode": _of_decode_steps(measured, arm, resampled),
            "predicted_decode": _predicted(measured, arm, resampled),
            "closed_form": _closed_form(measured, arm),
        }
        for arm in measured.arms
    ]


def _resample(measured: Measured, times: Draws, *, draws: int, seed: int) -> _Resampled | None:
    rates = measured.rates.draws(draws, seed=seed)
    assert rates is not None, "starts that have step times have rates"
    weights = draw_weights(measured.by_size, count=draws, seed=seed + 1)
    return _Resampled(times, rates, _refits(measured, times), weights)


def _refits(measured: Measured, times: Draws) -> list[model.Fit]:
    """The chosen form fitted again to every draw of the step times at the fitted batch sizes."""
    points = [
        point
        for point in points_of(measured.times.at(measured.fitted), measured.facts)
        if point.arm in (AR, *measured.arms)
    ]
    columns = [times[point.arm][:, measured.sizes.index(point.batch_size)] for point in points]
    return model.fit_many(points, np.stack(columns, axis=1), form=measured.fit.form)


def _of_throughput(measured: Measured, arm: str, resampled: _Resampled | None) -> dict[str, Any] | None:
    means = measured.rates.means()
    columns = _columns(means[AR], means[arm])
    if not columns:
        return None
    drawn = None
    if resampled is not None:
        cells = [measured.by_size[measured.sizes[column]] for column in columns]
        factors = [throughput_factors(cell, arm, resampled.weights) for cell in cells]
        drawn = resampled.rates[arm][:, columns] / resampled.rates[AR][:, columns] * np.stack(factors, axis=1)
    return _described(measured, columns, means[arm][columns] / means[AR][columns], drawn)


def _of_decode_steps(measured: Measured, arm: str, resampled: _Resampled | None) -> dict[str, Any] | None:
    means = measured.times.means()
    taus = [measured.tau_at(arm, size) for size in measured.sizes]
    columns = [column for column in _columns(means[AR], means[arm]) if taus[column] is not None]
    if not columns:
        return None
    tau = np.array([taus[column] for column in columns], dtype=float)
    cells = [all_blocks(measured.by_size[measured.sizes[column]][arm]) for column in columns]
    common = common_prompts(measured.by_size)
    own = np.array([tau_factors(each, dict.fromkeys(common, np.ones(1)))[0] for each in cells])
    drawn = None
    if resampled is not None:
        shared = {prompt: resampled.weights[prompt] for prompt in common}
        factors = np.stack(np.broadcast_arrays(*(tau_factors(each, shared) for each in cells)), axis=1)
        drawn = tau * factors * resampled.times[AR][:, columns] / resampled.times[arm][:, columns]
    return _described(measured, columns, tau * own * means[AR][columns] / means[arm][columns], drawn)


def _described(measured: Measured, columns: list[int], speedups: Floats, drawn: Floats | None) -> dict[str, Any]:
    sizes = [measured.sizes[column] for column in columns]
    ranges = None if drawn is None else [paying_ranges(sizes, row) for row in drawn]
    return describe(paying_ranges(sizes, speedups), ranges, smallest=sizes[0], largest=sizes[-1])


def _columns(*means: Floats) -> list[int]:
    """Batch sizes, by position, at which all of `means` have a value."""
    return np.flatnonzero(~np.isnan(np.stack(means)).any(axis=0)).tolist()


def _predicted(measured: Measured, arm: str, resampled: _Resampled | None) -> dict[str, Any]:
    tested = {"smallest": measured.sizes[0], "largest": measured.sizes[-1]}
    tau = measured.taus[arm]
    ranges = predicted_ranges(measured.fit, arm=arm, tau=tau, **tested)
    if resampled is None:
        return describe(ranges, None, **tested)
    cells = [cell for size in measured.fitted for cell in all_blocks(measured.by_size[size].get(arm, ()))]
    taus = np.broadcast_to(tau * tau_factors(cells, resampled.weights), len(resampled.fits))
    drawn = [
        predicted_ranges(fitted, arm=arm, tau=float(each), **tested)
        for fitted, each in zip(resampled.fits, taus, strict=True)
    ]
    return describe(ranges, drawn, **tested)


def _closed_form(measured: Measured, arm: str) -> float | None:
    """B* of the linear form's formula, beyond the tested range too; None for other forms, and where it is not finite."""
    constants = measured.fit.constants()
    if measured.fit.form != "linear" or constants is None or f"draft:{arm}" not in constants:
        return None
    value = linear_break_even(
        step=constants["step"],
        draft=constants[f"draft:{arm}"],
        token=constants["token"],
        sequence=constants["sequence"],
        draft_length=measured.facts[arm].draft_length,
        tau=measured.taus[arm],
    )
    return value if 0 < value < float("inf") else None
