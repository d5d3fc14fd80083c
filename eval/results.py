"""From raw records to results: every number of the report, as one JSON-able dict. Needs no engine and no torch.

The grid and the phase that measures the schedule are minutes apart, so each is compared within itself: the schedule with
the AR starts that alternated with it, every other arm with the AR starts of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.eval.acceptance import acceptance_results, offline_of
from eyas.eval.calibration import calibrate
from eyas.eval.configs import config_differences, void_by_arm, void_reasons
from eyas.eval.cost.rows import cost_results
from eyas.eval.grid import read_failures
from eyas.eval.lossless.ladder import lossless_outcome
from eyas.eval.lossless.results import lossless_results
from eyas.eval.not_measured import not_measured
from eyas.eval.null import null_rows
from eyas.eval.openloop.rows import open_loop_rows
from eyas.eval.partners import partners_of
from eyas.eval.performance import performance_results
from eyas.eval.power import power_rows
from eyas.eval.records import ArmFacts, CellKey, Cells, StartRecord, arms_of, cells_by_arm, read_starts
from eyas.eval.schedule_phase import schedule_results
from eyas.eval.stats import LEVEL
from eyas.eval.timing.rows import timing_results
from eyas.eval.verdict import verdict_rows
from eyas.heads.files import read_json

SCHEMA = 2
SEED = 20260101


def read_results(score_dir: Path) -> dict[str, Any]:
    """All results of the session in `score_dir`, computed from its raw records.

    Raises:
        ValueError: there is no record, a file is broken, or the records are of two sessions.
    """
    starts = read_starts(score_dir / "starts")
    if not starts:
        raise ValueError(f"{score_dir} holds no finished start, so there is nothing to report; run `eyas score` first")
    protocol, context = read_json(score_dir / "protocol.json"), read_json(score_dir / "context.json")
    arms, cells = arms_of(starts), reported_cells(starts)
    lossless = lossless_results(score_dir / "lossless")
    acceptance = acceptance_results(cells, arms, offline=offline_of(context))
    results = {
        **_identity(starts, arms, protocol=protocol, context=context),
        "failures": read_failures(score_dir / "starts"),
        **_verdicts(starts, arms, protocol=protocol, lossless=lossless["lossless"]),
        **performance_results(cells, arms),
        **acceptance,
        **timing_results(score_dir / "instrument", cells, arms),
        "cost": cost_results(cells, arms, acceptance["acceptance_cells"], seed=SEED),
        "schedule": schedule_results(score_dir, starts, seed=SEED),
        **lossless,
        "open_loop": open_loop_rows(score_dir / "open_loop"),
    }
    return results | {"not_measured": not_measured(results)}


def reported_cells(starts: Sequence[StartRecord]) -> Cells:
    """The grid's records, and of the schedule's phase those of the schedule itself."""
    return cells_by_arm([start for start in starts if start.phase == "grid" or start.kind == "schedule"])


def _identity(
    starts: Sequence[StartRecord], arms: Mapping[str, ArmFacts], *, protocol: dict[str, Any], context: dict[str, Any]
) -> dict[str, Any]:
    requests = [request for start in starts for cell in start.cells for request in cell.requests]
    return {
        "schema": SCHEMA,
        "context": context,
        "protocol": protocol,
        "session": starts[0].description["session"],
        "arms": {
            name: {
                "kind": facts.kind,
                "draft_length": facts.draft_length,
                "speculative_config": facts.speculative_config,
                "synthetic": facts.synthetic,
                "slowed_by": facts.slowed_by,
            }
            for name, facts in arms.items()
        },
        "starts": {arm: sum(start.arm == arm for start in starts) for arm in arms},
        "requests": len(requests),
        "output_tokens": sum(request.n_out for request in requests),
        "interval_level": LEVEL,
        "engines": _engines(starts),
    }


def _verdicts(
    starts: Sequence[StartRecord],
    arms: Mapping[str, ArmFacts],
    *,
    protocol: dict[str, Any],
    lossless: dict[str, Any],
) -> dict[str, Any]:
    """Verdicts, AR against AR, power, and the differences of configuration that void a comparison."""
    differences = config_differences(starts)
    void = void_reasons(differences)
    rows: list[dict[str, Any]] = []
    grid = [start for start in starts if start.phase == "grid"]
    for phase in (grid, [start for start in starts if start.phase == "schedule"]):
        compared = verdict_rows(
            cells_by_arm(phase),
            arms=arms,
            lossless_passed=lambda arm, temperature: lossless_outcome(lossless, arm=arm, temperature=temperature),
            configs_void=void_by_arm(differences, arms=list(arms)),
            min_requests=wanted_requests(protocol),
            partners=partners_of(phase),
            seed=SEED,
        )
        rows += [row for row in compared if (row["kind"] == "schedule") == (phase is not grid)]
    cells = cells_by_arm(grid)
    return {
        "config_differences": {"differences": differences, "void": bool(void), "reasons": void},
        "cells": rows,
        "null": null_rows(cells, partners=partners_of(grid), seed=SEED),
        "power": power_rows(cells, arms=arms),
        "calibration": calibrate(cells, arms=arms, partners=partners_of(grid), seed=SEED),
    }


def wanted_requests(protocol: dict[str, Any]) -> dict[CellKey, int]:
    """Prompts that each cell needs, as the protocol says."""
    return {
        CellKey(row["dataset"], row["temperature"], row["batch_size"]): row["wanted"] for row in protocol["requests"]
    }


def _engines(starts: Sequence[StartRecord]) -> dict[str, Any]:
    """The resolved engine and machine of the first start of each arm, and each start's load average."""
    engines: dict[str, Any] = {}
    for start in starts:
        engine = engines.setdefault(start.arm, {**start.description, "load_averages": []})
        engine["load_averages"].append(start.description["machine"]["load_average_before"][0])
    return engines
