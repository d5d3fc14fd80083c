"""Part of G: the schedule of draft lengths by batch size, ready to serve, and how it measured as an arm of its own."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.values import listing, number, span, times

TITLE = "Schedule: k by batch size"
Row = dict[str, Any]


def schedule_section(results: dict[str, Any]) -> Section:
    schedule = results.get("schedule")
    if not schedule:
        return not_measured(TITLE)
    ranges = _ranges(schedule["ranges"])
    words = [
        f"Chosen: {ranges}. {'' if schedule['pays'] else 'Nothing pays anywhere, so the command serves without a head. '}"
        "Chosen from the starts above and measured in fresh starts of its own, alternating with AR, with the arms it is made of "
        "and with every k that was the fastest of some cell.",
        f"Rule: {schedule['rule']}",
    ]
    bullets = [
        f"Serve it: {schedule['serve_command_line']}",
        "speculative_config.json holds the configuration alone.",
        "Options and variables are those of the measured engines. Prefix caching, where it is switched off, may be left to "
        "vLLM's default; it was not measured then.",
    ]
    parts = [_measured(results, schedule), Section("Why these lengths", tables=[_choices(results, schedule)])]
    return Section(TITLE, words, bullets=bullets, alerts=_alerts(results, schedule), parts=parts)


def _alerts(results: dict[str, Any], schedule: Row) -> list[str]:
    alerts = []
    if results.get("mends"):
        alerts.append(
            f"Answers were measured on a mended engine ({listing(results['mends'])}). The command below starts vLLM as it is "
            "installed, without the mends."
        )
    again = schedule["recomputed_ranges"]
    if again is not None and again != schedule["ranges"]:
        alerts.append(
            f"The schedule that was served and measured differs from what the records lead to: {_ranges(again)}. The table of "
            "candidates is recomputed; score again to measure that schedule."
        )
    return alerts


def _ranges(ranges: list[list[int]]) -> str:
    return listing([_range(*each) for each in ranges])


def _range(first: int, last: int, length: int) -> str:
    if first == last:
        return f"k={length} for {first} {'request' if first == 1 else 'requests'}"
    return f"k={length} for {first} to {last} requests"


def _measured(results: dict[str, Any], schedule: Row) -> Section:
    title = "The schedule as measured"
    rows = schedule.get("cells") or []
    if not rows:
        return not_measured(title, schedule.get("not_measured") or "No start of it finished.")
    kept = {
        True: "Both promises are kept in every cell.",
        False: "A promise is BROKEN.",
        None: "Not all cells are resolved.",
    }
    broken = [row for row in rows if "no" in (row["not_slower_than_ar"], row["within_best_fixed"])]
    alerts = [f"{len(broken)} of {len(rows)} cells of the schedule break a promise."] if broken else []
    bullets = [f"Promise: {rule}." for rule in schedule.get("rules") or []]
    shown = [
        [
            *place(row),
            row["not_slower_than_ar"],
            _within(results, row),
            arm_label(results, row["best_fixed_arm"]),
            str(row["batch_size"]),
            number(row["ar_tokens_per_second"], 1),
            number(row["tokens_per_second"], 1),
            f"{times(row['ratio'])} ({span(row['interval'])})",
            span(row["null_band"], 3),
            f"{times(row['ratio_to_best_fixed'], 3)} ({span(row['ratio_to_best_fixed_interval'], 3)})",
        ]
        for row in rows
    ]
    columns = [
        *(
            *PLACE,
            "not slower than AR",
            "within 3 % of the best fixed k",
            "best fixed",
            "batch size",
            "AR tok/s",
            "tok/s",
        ),
        *("ratio to AR", "null band", "ratio to the best fixed"),
    ]
    marks = ["slower" if row in broken else "" for row in rows]
    return Section(
        title,
        [kept[schedule["passed"]]],
        [table(columns, shown, text_columns=5, row_marks=marks)],
        bullets=bullets,
        alerts=alerts,
    )


def _within(results: dict[str, Any], row: Row) -> str:
    absent = listing([arm_label(results, arm) for arm in row["absent_and_better"]])
    return f"{row['within_best_fixed']} ({absent} did not run beside it)" if absent else row["within_best_fixed"]


def _choices(results: dict[str, Any], schedule: Row) -> Table:
    rows = [
        [
            str(choice["batch_size"]),
            arm_label(results, candidate["arm"]),
            "chosen" if candidate["arm"] == choice["arm"] else "",
            candidate["why"],
            times(candidate["ratio"]),
            f"{candidate['low']:.2f} to {candidate['high']:.2f}",
        ]
        for choice in schedule["choices"]
        for candidate in choice["candidates"]
    ]
    columns = ["batch size", "arm", "", "why", "ratio, mean over cells", "95 % interval"]
    return table(columns, rows, text_columns=4)
