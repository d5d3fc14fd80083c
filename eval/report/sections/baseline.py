"""C: plain decoding against itself, the calibration of the statistics, and how small an effect could be seen."""

from __future__ import annotations

from typing import Any

from eyas.eval.records import AR_TWIN
from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.names import PLACE, place
from eyas.eval.report.sections.calibration import calibration_section
from eyas.eval.report.values import MISSING, number, p_value, percent, span, times

TITLE = "C. Baseline: plain decoding against itself"


def baseline_section(results: dict[str, Any]) -> Section:
    parts = [_power(results), calibration_section(results)]
    if not results.get("null"):
        return Section(TITLE, [not_measured("").paragraphs[0]], parts=parts)
    words = (
        "How much plain decoding (AR) differs from itself in this session. Null band: what the ratio of two groups of AR starts "
        "gives by chance (95 %); a ratio inside it is no difference. AR / AR: half of the AR starts (odd) against the other half "
        "(even), judged as if they were two arms."
    )
    if AR_TWIN in results["arms"]:
        words = (
            "How much plain decoding (AR) differs from itself in this session, loaded beside another engine. AR / AR: its twin, "
            "plain decoding once more, against the AR that ran beside it, judged as if it were an arm. Null band: what the ratio "
            "of as many such pairs gives by chance (95 %); a ratio inside it is no difference."
        )
    return Section(TITLE, [words], [_null(results)], parts=parts)


def _null(results: dict[str, Any]) -> Table:
    rows = [
        [
            *place(row),
            str(row["batch_size"]),
            ", ".join(number(rate, 1) for rate in row["tokens_per_second"]),
            times(row["spread"], 3),
            percent(row["start_sd"]),
            span(row["band"], 3),
            MISSING if row["ratio"] is None else f"{times(row['ratio'], 3)} ({span(row['interval'], 3)})",
            p_value(row["p_value"]),
        ]
        for row in results["null"]
    ]
    columns = [
        *(*PLACE, "batch size", "AR tok/s by start", "fastest / slowest", "sd of a start", "null band"),
        *("AR / AR", "p"),
    ]
    return table(columns, rows, text_columns=2)


def _power(results: dict[str, Any]) -> Section:
    title = "How small a difference could be seen"
    rows = results.get("power") or []
    if not rows:
        return not_measured(
            title,
            "It needs two starts of an arm and two prompts, and side by side two pairs of plain decoding with itself.",
        )
    words = (
        f"The smallest ratio that this session calls different from 1 with probability {percent(rows[0]['power'], 0)}, alone and "
        f"after Holm's correction over all {rows[0]['tests']} comparisons; and how many starts of each arm (side by side: pairs) "
        "it would take to call a difference after that correction (where prompts scatter too much, only more prompts help). sd: scatter on the log scale, of a start (side by side: of "
        "the ratio of a pair), of a block inside a start (with two blocks or more), of a prompt."
    )
    ratios = list(rows[0]["starts_needed"])
    shown = [
        [
            *place(row),
            str(row["batch_size"]),
            str(row["starts"]),
            percent(row["start_sd"]),
            percent(row["block_sd"]),
            percent(row["prompt_sd"]),
            str(row["prompts"]),
            times(row["smallest_detectable_ratio"], 3),
            times(row["smallest_detectable_ratio_after_holm"], 3),
            *(_needed(row["starts_needed"][ratio]) for ratio in ratios),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "batch size", "starts", "sd of a start", "sd of a block", "sd of a prompt", "prompts"),
        *("resolves", "after Holm", *(f"starts for {ratio}x" for ratio in ratios)),
    ]
    return Section(title, [words], [table(columns, shown, text_columns=2)])


def _needed(starts: int | None) -> str:
    return "over 50" if starts is None else str(starts)
