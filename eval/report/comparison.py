"""Two scoring sessions side by side: the same cells, what differs between the runs, and which differences may be claimed.

Each session's ratio to its own plain decoding cancels its machine's state, so ratios of two sessions can be compared, once
target, engine, machine, decoding and prompts are the same, and once the cell may carry a claim in its own run (`unfit`). Where
that is not so, nothing is claimed and the reason is named.
The interval of a ratio of two ratios is recovered from the two intervals (MOVER; Zou and Donner, Statistics in Medicine
27, 2008, on the log scale); its p is Welch's t on the same scale, and claims are corrected for the number of cells (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from eyas.eval.distributions import student_tail
from eyas.eval.holm import holm
from eyas.eval.report.differences import blocking_reasons, run_differences
from eyas.eval.report.taus import tau_of
from eyas.eval.report.unfit import unfit
from eyas.eval.report.values import listing

LEVEL = 0.05
"""A claim needs a Holm-corrected p below this."""

Key = tuple[str, float, int, str]


def compare_runs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Compare two results (of `collect_results`).

    Returns:
        differences: settings that differ, each with `kind`, `setting`, `first`, `second`, `blocks`.
        cells: rows of the cells that both have, with `relative` = second ratio / first ratio.
        only_first, only_second: keys of cells that one run lacks.
    """
    differences = run_differences(first, second)
    one, other = _by_key(first), _by_key(second)
    shared = [key for key in one if key in other]
    rows = [_row(key, _side(first, one[key]), _side(second, other[key])) for key in shared]
    return {
        "first": _name(first),
        "second": _name(second),
        "differences": differences,
        "cells": _with_claims(rows, differences),
        "only_first": [list(key) for key in one if key not in other],
        "only_second": [list(key) for key in other if key not in one],
    }


def _name(results: dict[str, Any]) -> str:
    return f"{results['context'].get('name') or 'unnamed'} (session {results['session']})"


def _by_key(results: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    return {(row["dataset"], row["temperature"], row["batch_size"], row["arm"]): row for row in results["cells"]}


def _side(results: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """What one run says about a cell, and why it may carry no claim."""
    names = (
        "ar_tokens_per_second",
        "tokens_per_second",
        "ratio",
        "interval",
        "verdict",
        "requests",
        "prompts",
        "starts",
    )
    found = {name: cell[name] for name in (*names, "standard_error", "degrees_of_freedom", "indicative")}
    return found | {"tau": tau_of(results, cell), "unfit": unfit(results, cell)}


def _row(key: Key, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    dataset, temperature, batch_size, arm = key
    relative = ratio_of_ratios(one["ratio"], one["interval"], other["ratio"], other["interval"])
    return {
        "dataset": dataset,
        "temperature": temperature,
        "batch_size": batch_size,
        "arm": arm,
        "first": one,
        "second": other,
        "relative": relative,
        "p_value": None if relative["interval"] is None else p_of_difference(one, other),
        "verdict_changed": one["verdict"] != other["verdict"],
    }


def ratio_of_ratios(
    first: float, first_interval: Sequence[float] | None, second: float, second_interval: Sequence[float] | None
) -> dict[str, Any]:
    """`second` / `first` with its 95 % interval; no interval without both of theirs."""
    value = second / first
    if first_interval is None or second_interval is None:
        return {"ratio": value, "interval": None}
    low_1, middle_1, high_1 = (math.log(each) for each in (first_interval[0], first, first_interval[1]))
    low_2, middle_2, high_2 = (math.log(each) for each in (second_interval[0], second, second_interval[1]))
    difference = middle_2 - middle_1
    down = math.hypot(middle_2 - low_2, high_1 - middle_1)
    up = math.hypot(high_2 - middle_2, middle_1 - low_1)
    return {"ratio": value, "interval": [math.exp(difference - down), math.exp(difference + up)]}


def p_of_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Two-sided p of two ratios being equal: Welch's t of their logs, whose errors are known by few starts each."""
    errors = one["standard_error"], other["standard_error"]
    degrees = one["degrees_of_freedom"], other["degrees_of_freedom"]
    difference, error = math.log(other["ratio"] / one["ratio"]), math.hypot(*errors)
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    welch = error**4 / sum(each**4 / freedom for each, freedom in zip(errors, degrees, strict=True))
    return student_tail(difference / error, welch)


def _with_claims(rows: list[dict[str, Any]], differences: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say of every row what may be claimed: faster, slower, no difference detected, or nothing and why."""
    tested = [index for index, row in enumerate(rows) if row["p_value"] is not None]
    corrected = dict(zip(tested, holm([rows[index]["p_value"] for index in tested]), strict=True))
    return [
        row | {"p_holm": corrected.get(index), "claim": _claim(row, corrected.get(index), differences)}
        for index, row in enumerate(rows)
    ]


def _claim(row: dict[str, Any], p: float | None, differences: list[dict[str, Any]]) -> str:
    reasons = blocking_reasons(differences, dataset=row["dataset"])
    if row["first"]["requests"] != row["second"]["requests"]:
        reasons = list(dict.fromkeys([*reasons, "prompts"]))
    if reasons:
        return f"not claimed: {', '.join(reasons)} differ"
    barred = [f"in the {side} run {listing(row[side]['unfit'])}" for side in ("first", "second") if row[side]["unfit"]]
    if barred:
        return f"not claimed: {', '.join(barred)}"
    if p is None:
        return "not claimed: an interval is missing"
    low, high = row["relative"]["interval"]
    if p < LEVEL and low > 1:
        return "second faster"
    if p < LEVEL and high < 1:
        return "second slower"
    return "no difference detected"
