"""Part of C: do the statistics call chance chance, and find what is there? From this session's records and made-up ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.eval.calibration_outcome import outcome_sentence
from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.values import count, number, percent, times

TITLE = "Calibration of the statistics"


def calibration_section(results: dict[str, Any]) -> Section:
    calibration = results.get("calibration")
    if not calibration:
        return not_measured(
            TITLE,
            "`python -m eyas.eval.calibration SCORE_DIR` computes it from the records of any session; docs/evaluation.md has "
            "the one that the rules were chosen by.",
        )
    words = (
        "Judged by the rules of section I where nothing is different (so every call is a false one), and where a known slow-down "
        f"was put in (so every miss is one). Stated rate: at most {percent(calibration['stated_rate'], 0)} of sessions without a "
        "difference call one anywhere, after Holm's correction."
    )
    tables = [_records(calibration["records"])] if calibration["records"] else []
    tables += [_slowed(calibration["slowed"])] if calibration["slowed"] else []
    tables += [_simulated(calibration["simulated"])] if calibration["simulated"] else []
    sentence = outcome_sentence(calibration)
    alerts, outcome = ([sentence], []) if calibration["failed"] else ([], [sentence])
    return Section(TITLE, [words, *outcome], tables, alerts=alerts)


def _records(found: dict[str, Any]) -> Table:
    rows = [
        [
            "AR starts of this session against each other",
            "none",
            f"{count(found['alarms'])} of {count(found['sessions'])}",
            _percents(found["session_rate_interval"]),
            percent(found["called"]),
            percent(found["coverage"]),
            _percents(found["coverage_interval"]),
        ],
        *(
            ["the same, one side slowed", times(each["slow_down"]), "", "", percent(each["found"]), "", ""]
            for each in found["detection"]
        ),
    ]
    columns = [
        *("", "slowed by", "sessions with a call", "share, 95 % interval", "tests called different"),
        *("intervals that hold the truth", "95 % interval"),
    ]
    tests = f"{count(found['tests'])} tests in {count(found['sessions'])} splits of {count(found['cells'])} cells"
    return table(
        columns,
        rows,
        text_columns=1,
        caption=f"From the records, each split of the starts being a session without a difference: {tests}",
    )


def _percents(interval: Sequence[float]) -> str:
    return " to ".join(percent(end) for end in interval)


def _slowed(found: list[dict[str, Any]]) -> Table:
    rows = [
        [
            each["arm"],
            percent(each["slowed_by"] or None, 0),
            times(each["ratio"], 3),
            percent(each["found"]),
            count(each["cells"]),
        ]
        for each in found
    ]
    columns = ["arm", "slowed by", "ratio measured", "cells called slower", "cells"]
    return table(
        columns, rows, text_columns=1, caption="Plain decoding slowed in the engine by a known share of each step"
    )


def _simulated(found: dict[str, Any]) -> Table:
    rows = [
        [
            name,
            times(each.get("ratio"), 3) if name == "slowed" else "none",
            count(each["sessions"]),
            percent(each["alarms"]),
            _percents(each["alarms_interval"]),
            percent(each["called"]),
            percent(each["coverage"]),
            _percents(each["coverage_interval"]),
        ]
        for name, each in (("no difference", found["no_difference"]), ("slowed", found["slow_down"]))
    ]
    design = found["design"]
    starts = "pairs of starts" if design["paired"] else "starts"
    caption = (
        f"Made-up sessions of this design: {count(design['cells'])} cells, {design['arms']} arms, {design['starts']} {starts}, "
        f"sd of each {number(100 * design['start_sd'], 1)} %, {count(design['tests'])} tests a session"
    )
    columns = [
        *("", "true ratio", "sessions", "with a call", "95 % interval", "tests called different"),
        *("intervals that hold the truth", "95 % interval"),
    ]
    return table(columns, rows, text_columns=1, caption=caption)
