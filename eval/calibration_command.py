"""`python -m eyas.eval.calibration`: the calibration of a scored session, or the table of coverage, in words."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.eval.calibration import calibrate
from eyas.eval.calibration_outcome import outcome_sentence
from eyas.eval.coverage import grid_table, variants_table
from eyas.eval.partners import partners_of
from eyas.eval.records import AR, StartRecord, arms_of, cells_by_arm, read_starts
from eyas.heads.files import write_json

SEED = 20260101


def main(arguments: Sequence[str], *, say: Callable[[str], None] = print) -> int:
    """Run the command; returns the exit status: 0 only when the calibration passed."""
    parser = argparse.ArgumentParser(prog="python -m eyas.eval.calibration", description=__doc__)
    parser.add_argument("score_dir", nargs="?", type=Path, help="directory of a scored session (it holds starts/)")
    parser.add_argument("--slow", metavar="ARM", help="an arm that is known to be slower, and must be called so")
    parser.add_argument("--json", type=Path, help="write the calibration here as well")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--table", action="store_true", help="simulate the table of coverage instead; takes minutes")
    parser.add_argument("--tests", type=int, default=4000, help="made up for every design")
    options = parser.parse_args(arguments)
    if options.table:
        _table(options.tests, say=say)
        return 0
    if options.score_dir is None:
        parser.error("name a score directory, or ask for --table")
    try:
        starts = _starts(options.score_dir)
        return _session(
            starts, slow=options.slow, json_path=options.json, seed=options.seed, tests=options.tests, say=say
        )
    except ValueError as error:
        say(f"error: {error}")
        return 1


def _starts(score_dir: Path) -> list[StartRecord]:
    starts = read_starts(score_dir / "starts")
    if not starts:
        raise ValueError(
            f"{score_dir} holds no finished start (starts/*.jsonl); name the directory of a scored session"
        )
    return [start for start in starts if start.phase == "grid"]


def _table(tests: int, *, say: Callable[[str], None]) -> None:
    found = grid_table(tests=tests, say=say)
    coverages = [100 * result.coverage for result in found]
    say(f"lowest {min(coverages):.1f} %, highest {max(coverages):.1f} %, {tests} tests a cell")
    variants_table(tests=tests, say=say)


def _session(
    starts: Sequence[StartRecord],
    *,
    slow: str | None,
    json_path: Path | None,
    seed: int,
    tests: int,
    say: Callable[[str], None],
) -> int:
    cells, arms = cells_by_arm(starts), arms_of(starts)
    if slow is not None and slow not in arms.keys() - {AR}:
        others = ", ".join(sorted(arms.keys() - {AR})) or "none"
        raise ValueError(f"no cell has an arm {slow!r} beside plain decoding; the arms are: {others}")
    calibration = calibrate(
        cells,
        arms=arms,
        partners=partners_of(starts),
        slow=[] if slow is None else [slow],
        seed=seed,
        simulated_tests=tests,
    )
    if calibration is None:
        raise ValueError("no cell has two starts of plain decoding; score with score.starts_per_arm=5 or more")
    for line in sentences(calibration):
        say(line)
    if json_path is not None:
        write_json(json_path, calibration)
    return 0 if calibration["passed"] else 1


def sentences(calibration: dict[str, Any]) -> list[str]:
    """The calibration in words, the outcome last."""
    stated = f"stated: at most {calibration['stated_rate']:.0%} of sessions"
    lines = []
    records, simulated = calibration["records"], calibration["simulated"]
    if records is None:
        lines.append(
            "From the records: nothing; it takes four starts of plain decoding, or plain decoding as a control arm."
        )
    else:
        lines += _records_sentences(records, stated=stated)
    lines += [_slowed_sentence(each) for each in calibration["slowed"] if each["cells"]]
    if simulated is not None:
        lines += _simulated_sentences(simulated, stated=stated)
    return [*lines, outcome_sentence(calibration)]


def _slowed_sentence(slowed: dict[str, Any]) -> str:
    known = f"slowed by {slowed['slowed_by']:.0%} in the engine" if slowed["slowed_by"] else "known to be slow"
    return (
        f"Arm {slowed['arm']}, {known}, is called slower in {slowed['found']:.0%} of {slowed['cells']} cells (mean ratio "
        f"{slowed['ratio']:.3f})."
    )


def _records_sentences(records: dict[str, Any], *, stated: str) -> list[str]:
    low, high = records["session_rate_interval"]
    found = ", ".join(f"{each['slow_down']:g}x in {each['found']:.0%}" for each in records["detection"])
    return [
        f"From the records, AR against AR: {records['sessions']} sessions without a difference (splits of the starts, or a "
        f"twin) of {records['cells']} cells, {records['alarms']} of them call one ({low:.1%} to {high:.1%} of sessions; "
        f"{stated}). Of all {records['tests']} tests {records['called']:.1%} are called. The intervals hold 1 in "
        f"{records['coverage']:.1%}.",
        f"The same starts slowed by a known factor are called slower: {found} of the tests.",
    ]


def _simulated_sentences(simulated: dict[str, Any], *, stated: str) -> list[str]:
    null, slow, design = simulated["no_difference"], simulated["slow_down"], simulated["design"]
    low, high = null["coverage_interval"]
    return [
        f"Simulated with the noise measured here (starts {design['start_sd']:.1%}, blocks {design['block_sd']:.1%}, prompts "
        f"{design['prompt_sd']:.1%}; {design['cells']} cells, {design['arms']} arms of {design['starts']} starts), "
        f"{null['sessions']} sessions of {design['tests']} tests: intervals hold the truth in {null['coverage']:.1%} "
        f"({low:.1%} to {high:.1%}); {null['alarms']:.1%} of sessions call a difference where there is none; {stated}.",
        f"A true ratio of {slow['ratio']:.3f} is called slower in {slow['slower']:.0%}, faster in {slow['faster']:.1%}.",
    ]
