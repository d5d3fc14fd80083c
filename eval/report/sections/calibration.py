"""Part of C: do the statistics call chance chance, and find what is there? From this session's records and made-up ones."""

from __future__ import annotations

from typing import Any

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
        f"was put in (so every miss is one). Stated rate of false calls: at most {percent(calibration['stated_rate'], 0)} per session."
    )
    tables = [_records(calibration["records"])] if calibration["records"] else []
    tables += [_slowed(calibration["slowed"])] if calibration["slowed"] else []
    tables += [_simulated(calibration["simulated"])] if calibration["simulated"] else []
    bullets = [] if calibration["records"] else ["Too few AR starts (four are needed) to split them into two groups."]
    return Section(TITLE, [words], tables, bullets=bullets)


def _records(found: dict[str, Any]) -> Table:
    rows = [
        [
            "AR starts of this session against each other",
            "",
            *_rate(found, "false_positive"),
            *_rate(found, "coverage"),
        ],
        *(
            ["the same, one side slowed", times(each["slow_down"]), percent(each["found"]), "", "", ""]
            for each in found["detection"]
        ),
    ]
    columns = [
        "tests",
        "slowed by",
        "called different",
        "95 % interval",
        "intervals that hold the truth",
        "95 % interval",
    ]
    tests = f"{count(found['tests'])} tests in {count(found['sessions'])} splits of {count(found['cells'])} cells"
    few = "" if found["enough_tests"] else "; too few tests to say much"
    return table(columns, rows, text_columns=1, caption=f"From the records: {tests}{few}")


def _rate(found: dict[str, Any], name: str) -> list[str]:
    value = found[name] if name in found else found[f"{name}_rate"]
    return [percent(value), " to ".join(percent(end) for end in found[f"{name}_interval"])]


def _slowed(found: list[dict[str, Any]]) -> Table:
    rows = [
        [
            each["arm"],
            percent(each["slowed_by"], 0),
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
            percent(each["called"]),
            " to ".join(percent(end) for end in each["called_interval"]),
            percent(each["alarms"]),
            percent(each["coverage"]),
            " to ".join(percent(end) for end in each["coverage_interval"]),
            count(each["tests"]),
        ]
        for name, each in (("no difference", found["no_difference"]), ("slowed", found["slow_down"]))
    ]
    design = found["design"]
    caption = (
        f"Made-up sessions of this design: {design['arms']} arms, {design['starts']} starts, sd of a start "
        f"{number(100 * design['start_sd'], 1)} %"
    )
    columns = [
        *("sessions", "true ratio", "called different", "95 % interval", "sessions with a call"),
        *("intervals that hold the truth", "95 % interval", "tests"),
    ]
    return table(columns, rows, text_columns=1, caption=caption)
