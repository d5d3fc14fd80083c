"""The time split of a session, from the raw records of its instrumented starts and of its measured runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.eval.records import ArmFacts, Cells, longest_draft
from eyas.eval.timing.derive import check_split, derived_rows
from eyas.eval.timing.perturbation import perturbation
from eyas.eval.timing.steps import MIN_STEPS, step_time_rows
from eyas.heads.files import read_json

TRIM = (25, 75)
"""Means are over the steps between these percentiles of total time: like a median they do not follow the pauses of a busy
machine, and unlike the medians of parts they add up."""

CELL = ("dataset", "temperature", "batch_size")

OVERHEAD = ("schedule", "runner", "rest")
"""What counts as overhead where it is told apart; `rest` is the engine's own work, and on a GPU all of the overhead."""


def timing_results(directory: Path, cells: Cells, arms: Mapping[str, ArmFacts], *, session: str) -> dict[str, Any]:
    """All that results.json holds about the time of steps.

    Args:
        directory: of the raw records of instrumented starts.
        cells, arms: of the measured runs.
        session: id of the session that these belong to.

    Raises:
        ValueError: a record is broken, or of another session.
    """
    step_times, split = step_time_rows(cells, arms), time_split_rows(directory, session=session)
    derived = derived_rows(step_times)
    return {
        "step_times": step_times,
        "time_split": [row for row in split if row["not_measured"] is None],
        "time_derived": derived,
        "time_check": check_split(split, derived),
        "time_not_measured": reasons(split),
    }


def reasons(split: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why there is no time split, of the arms that have none; one line if there was no instrumented start."""
    if not split:
        return ["not measured: no instrumented start ran (score.time_split)"]
    found = {(row["arm"], row["not_measured"]) for row in split if row["not_measured"] is not None}
    return [f"not measured: {arm}: {why}" for arm, why in sorted(found)]


def time_split_rows(directory: Path, *, session: str) -> list[dict[str, Any]]:
    """Draft / verify / sample / overhead of the pure decode steps at the nominal batch, per cell and arm.

    Returns:
        One row per cell of each instrumented start. `not_measured` is None or says why the figures are missing; then:
        clock; running; steps; drafted_per_request; mean: part -> seconds of draft, verify (in AR: the forward), sample,
        overhead and step, over the middle half of the steps (`TRIM`), so that the parts add up to the step; share: part ->
        share of the step; overhead: its own parts; p50: median seconds of a step; perturbation, with its interval,
        clock_share and undisturbed: what instrumenting added (perturbation.py); verify_over_ar_forward and verify_over_ar_step: this
        arm's verification over AR's forward, and over AR's whole step.
    """
    rows = [row for path in sorted(directory.glob("*.jsonl")) for row in _start_rows(path, session=session)]
    return [_beside_ar(row, rows) for row in rows] + _failed_starts(directory)


def _start_rows(path: Path, *, session: str) -> list[dict[str, Any]]:
    description = read_json(path.with_suffix(".json"))
    if description.get("session") != session:
        raise ValueError(
            f"{path} is of session {description.get('session')}, the score of {session}; move it away or score again"
        )
    identity = {
        "arm": description["arm"],
        "kind": description["kind"],
        "draft_length": longest_draft(description["speculative_config"]),
    }
    return [_cell_row(blocks) | identity for blocks in _timed_cells(path)]


def _timed_cells(path: Path) -> list[list[dict[str, Any]]]:
    """The records of each cell's blocks, in order, of an instrumented start."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            if line["kind"] == "cell" and "timing" in line:
                cells.setdefault(tuple(line[name] for name in CELL), []).append(line)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a record of eyas ({error!r}); score again") from error
    return list(cells.values())


def _failed_starts(directory: Path) -> list[dict[str, Any]]:
    failures = [read_json(path) for path in sorted(directory.glob("*.failed.json"))]
    return [{"arm": failure["arm"], "not_measured": f"the start failed: {failure['reason']}"} for failure in failures]


def _cell_row(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    place = {name: blocks[0][name] for name in CELL} | {"version": blocks[0]["timing"]["version"]}
    refused = [block["timing"]["not_measured"] for block in blocks if "not_measured" in block["timing"]]
    if refused:
        return place | {"not_measured": refused[0]}
    running = min(blocks[0]["batch_size"], blocks[0]["num_requests"])
    reports = [block["timing"]["report"] for block in blocks]
    timed = [row for report in reports for row in report["steps"]]
    chosen = [row for row in timed if row["decode"] and row["running"] == running]
    if len(chosen) < MIN_STEPS:
        few = f"{len(chosen)} pure decode steps with {running} requests running were timed; at least {MIN_STEPS} are needed"
        return place | {"not_measured": few}
    figures = {"clock": reports[0]["clock"], "running": running, "steps": len(chosen), "steps_timed": len(timed)}
    parts = _parts(chosen)
    slowed = perturbation(blocks, running=running, step_seconds=parts["p50"])
    return place | {"not_measured": None} | figures | parts | slowed


def _parts(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = np.array([row["seconds"] for row in steps])
    low, high = np.percentile(seconds, TRIM)
    kept = [row for row in steps if low <= row["seconds"] <= high]
    own = {part: _mean([_part(row, part) for row in kept]) for part in ("draft", "verify", "sample", *OVERHEAD)}
    overhead = {part: own.pop(part) for part in OVERHEAD}
    mean = own | {"overhead": sum(overhead.values()), "step": _mean([row["seconds"] for row in kept])}
    return {
        "drafted_per_request": _mean([row["drafted"] / row["running"] for row in steps]),
        "p50": float(np.median(seconds)),
        "mean": mean,
        "share": {part: mean[part] / mean["step"] for part in mean if part != "step"},
        "overhead": overhead,
    }


def _part(row: Mapping[str, Any], part: str) -> float:
    return row["rest"] if part == "rest" else row["parts"].get(part, 0.0)


def _beside_ar(row: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add the verification over AR's forward and over AR's step, where AR was timed in the same cell."""
    cell = [row[name] for name in CELL]
    plain = [
        each["mean"]
        for each in rows
        if each["kind"] == "ar" and each["not_measured"] is None and [each[name] for name in CELL] == cell
    ]
    if row["not_measured"] is not None or not plain:
        return row | {"verify_over_ar_forward": None, "verify_over_ar_step": None}
    return row | {
        "verify_over_ar_forward": row["mean"]["verify"] / plain[0]["verify"],
        "verify_over_ar_step": row["mean"]["verify"] / plain[0]["step"],
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
