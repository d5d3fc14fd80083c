"""From raw records to results: every number of the report, as one JSON-able dict. Needs no engine and no torch.

The grid and the phase that measures the schedule are minutes apart, so each is compared within itself: the schedule with
the AR starts that alternated with it, every other arm with the AR starts of the grid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.eval.acceptance import acceptance_results, offline_of
from eyas.eval.calibration import calibrate
from eyas.eval.configs import config_differences, void_by_arm, void_reasons
from eyas.eval.cost.capacity import capacity_results
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
from eyas.eval.records import ArmFacts, CellKey, Cells, Phase, StartRecord, arms_of, cells_by_arm, read_starts
from eyas.eval.schedule_phase import schedule_results
from eyas.eval.sessions import FILE as SESSION_FILE
from eyas.eval.stats import LEVEL, Partners
from eyas.eval.timing.rows import timing_results
from eyas.eval.verdict import session_verdicts
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
    session = starts[0].description["session"]
    require_session(score_dir, protocol=protocol, session=session)
    arms, cells = arms_of(starts), reported_cells(starts)
    lossless = lossless_results(score_dir / "lossless", session=session)
    acceptance = acceptance_results(cells, arms, offline=offline_of(context))
    results = {
        **_identity(starts, arms, protocol=protocol, context=context),
        "mends": mends_of(starts, lossless["lossless"]),
        "failures": read_failures(score_dir / "starts"),
        **_verdicts(starts, arms, protocol=protocol, lossless=lossless["lossless"]),
        **performance_results(cells_by_phase(starts), arms),
        **acceptance,
        **timing_results(score_dir / "instrument", cells, arms, session=session),
        "cost": cost_results(cells, arms, acceptance["acceptance_cells"], seed=SEED)
        | capacity_results(
            _engines(starts),
            arms,
            batch_sizes=sorted({key.batch_size for key in cells}),
            head_bytes=(context.get("head_files") or {}).get("bytes"),
        ),
        "schedule": schedule_results(score_dir, starts, seed=SEED),
        **lossless,
        "open_loop": open_loop_rows(score_dir / "open_loop", session=session),
    }
    return results | {"not_measured": not_measured(results)}


def require_session(score_dir: Path, *, protocol: dict[str, Any], session: str) -> None:
    """Refuse a directory whose files about the session are of another one than its starts.

    Raises:
        ValueError: names the file.
    """
    told = {"protocol.json": protocol["session"]}
    if (score_dir / SESSION_FILE).is_file():
        told[SESSION_FILE] = read_json(score_dir / SESSION_FILE)["session"]
    for name, other in told.items():
        if other != session:
            raise ValueError(
                f"{score_dir / name} is of session {other}, the records in {score_dir / 'starts'} are of session {session}; "
                "a report describes one session only, so bring back the file that belongs to the records, or score again"
            )


def cells_by_phase(starts: Sequence[StartRecord]) -> dict[Phase, Cells]:
    """The records of each phase that was measured: hours apart, so absolute numbers compare within a phase only."""
    phases: dict[Phase, list[StartRecord]] = {}
    for start in starts:
        phases.setdefault(start.phase, []).append(start)
    return {phase: cells_by_arm(own) for phase, own in phases.items()}


def reported_cells(starts: Sequence[StartRecord]) -> Cells:
    """The grid's records, and of the schedule's phase those of the schedule itself: for what no clock is needed."""
    return cells_by_arm([start for start in starts if start.phase == "grid" or start.kind == "schedule"])


def starts_of_phase(starts: Sequence[StartRecord], phase: Phase) -> dict[str, int]:
    """Arm -> number of its starts in a phase, of the arms that have any."""
    return dict(Counter(start.arm for start in starts if start.phase == phase))


def judged_starts(starts: Sequence[StartRecord], arms: Mapping[str, ArmFacts]) -> dict[str, int]:
    """Arm -> number of its starts in the phase in which it is judged: the schedule in its own, every other arm in the grid."""
    grid, later = starts_of_phase(starts, "grid"), starts_of_phase(starts, "schedule")
    return {arm: (later if facts.kind == "schedule" else grid).get(arm, 0) for arm, facts in arms.items()}


def order_of(starts: Sequence[StartRecord]) -> dict[str, list[str]]:
    """Phase -> its arms in the order in which they ran; two that were loaded at the same time as one entry, "ar + k3"."""
    turns: dict[tuple[str, int], list[str]] = {}
    for start in starts:
        turns.setdefault((start.phase, start.start if start.beside is None else start.round), []).append(start.arm)
    found: dict[str, list[str]] = {}
    for (phase, _), arms in turns.items():
        found.setdefault(phase, []).append(" + ".join(arms))
    return found


def mends_of(starts: Sequence[StartRecord], lossless: dict[str, Any]) -> list[str]:
    """What was mended in the engines' processes, in the order met: an engine that was mended is not the installed one."""
    told = [mend for start in starts for mend in start.description.get("mends", [])]
    return list(dict.fromkeys([*told, *lossless.get("mends", [])]))


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
        "starts": judged_starts(starts, arms),
        "schedule_starts": starts_of_phase(starts, "schedule"),
        "order": order_of(starts),
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
    phases: dict[Phase, tuple[Cells, Partners | None]] = {
        phase: (cells, partners_of([start for start in starts if start.phase == phase]))
        for phase, cells in cells_by_phase(starts).items()
    }
    rows = session_verdicts(
        phases,
        arms=arms,
        lossless_passed=lambda arm, temperature: lossless_outcome(lossless, arm=arm, temperature=temperature),
        configs_void=void_by_arm(differences, arms=list(arms)),
        min_requests=wanted_requests(protocol),
        seed=SEED,
    )
    cells, partners = phases.get("grid", ({}, None))
    return {
        "config_differences": {"differences": differences, "void": bool(void), "reasons": void},
        "cells": rows,
        "null": null_rows(cells, partners=partners, seed=SEED),
        "power": power_rows(cells, tests=len(rows), partners=partners),
        "calibration": calibrate(cells, arms=arms, partners=partners, seed=SEED),
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
