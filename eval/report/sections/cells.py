"""I: every judged cell with its reason, and the rules."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.values import count, number, p_value, span, times
from eyas.eval.report.words import MARKS
from eyas.eval.verdict import RULES

TITLE = "I. Verdict of every cell"


def cells_section(results: dict[str, Any]) -> Section:
    if not results["cells"]:
        return not_measured(TITLE, "No drafting arm and plain decoding share a cell.")
    words = (
        "Ratios are never averaged over prompts or batch sizes. p: two-sided, of the ratio being 1; p (Holm): corrected for "
        "the number of cells judged. Null band: how far plain decoding lies from itself in the same cell. Prompts: independent ones, "
        "where a conversation is one. AR tok/s: of the phase in which the arm is judged, the grid or the schedule's own."
    )
    return Section(TITLE, [words], [_numbers(results), _reasons(results)], bullets=[f"Rule. {rule}" for rule in RULES])


def _numbers(results: dict[str, Any]) -> Table:
    rows = [
        [
            *place(cell),
            arm_label(results, cell["arm"]),
            cell["verdict"],
            str(cell["batch_size"]),
            number(cell["ar_tokens_per_second"], 1),
            number(cell["tokens_per_second"], 1),
            times(cell["ratio"], 3),
            span(cell["interval"], 3),
            span(cell.get("null_band"), 3),
            p_value(cell.get("p_value")),
            p_value(cell.get("p_holm")),
            f"{cell['prompts']} of {cell['needed_prompts']}",
            count(cell["requests"]),
            count(cell["starts"]),
        ]
        for cell in results["cells"]
    ]
    columns = [
        *(*PLACE, "arm", "verdict", "batch size", "AR tok/s", "tok/s", "ratio", "95 % interval"),
        *("null band", "p", "p (Holm)", "prompts, of needed", "requests", "starts"),
    ]
    return table(columns, rows, text_columns=4, marks=_marks(results, columns), caption="Numbers")


def _marks(results: dict[str, Any], columns: list[str]) -> list[list[str]]:
    shaded = columns.index("verdict")
    return [
        [MARKS[cell["verdict"]] if index == shaded else "" for index in range(len(columns))]
        for cell in results["cells"]
    ]


def _reasons(results: dict[str, Any]) -> Table:
    rows = [
        [*place(cell), arm_label(results, cell["arm"]), cell["verdict"], cell["reason"], str(cell["batch_size"])]
        for cell in results["cells"]
    ]
    return table([*PLACE, "arm", "verdict", "reason", "batch size"], rows, text_columns=5, caption="Reasons")
