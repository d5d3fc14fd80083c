"""Part of H: L1 and L2, token identity of greedy answers, ties told from violations."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.names import arm_label
from eyas.eval.report.values import MISSING, count, number, p_value, percent

TITLES = {"L1": "L1: greedy tokens in one batch", "L2": "L2: greedy tokens, one prompt at a time"}

PASSED = {
    "L1": "Passed: no violation, and identical as often as plain decoding is with itself (p: that it is less often).",
    "L2": "Passed: all answers identical. A tie fails in float32; in a shorter dtype it leaves the level undecided.",
}


def greedy_section(results: dict[str, Any], name: str, level: dict[str, Any]) -> Section:
    if level["status"] != "done":
        return not_measured(TITLES[name], level.get("why") or "")
    words = (
        f"Greedy answers of plain decoding and of the arm to {level['requests']} prompts, {level['dtype']}, batch size "
        f"{level['batch_size']}, compared token by token. Tie: where they part, both tokens are all but equally good to the target "
        "itself (a float32 forward outside the engine, so that a wrong engine cannot excuse itself; logit gap at most "
        f"{level['tie_gap']:g}, more in shorter dtypes, or what plain decoding does to itself, {level['null_gap']:g}). Violation: "
        f"anything else. Undecided: the target is quantised, and no such forward is the engine's. {PASSED[name]} Not excluded: with "
        "no violation seen, a rate below this cannot be ruled out (95 %)."
    )
    tables = [_outcomes(results, level)]
    if any(row["differences"] for row in level["arms"]):
        tables.append(_differences(results, level))
    return Section(TITLES[name], [words], tables)


def _outcomes(results: dict[str, Any], level: dict[str, Any]) -> Table:
    rows = [
        [
            arm_label(results, row["arm"]),
            row["outcome"],
            *_counts(row),
            percent(row["excluded_prompt_rate"]),
            percent(row["excluded_token_rate"], 3),
            p_value(row["match_p_holm"]),
        ]
        for row in level["arms"]
    ]
    null = level["null"]
    if null is not None:
        rows.append([f"AR again, batch size {null['batch_size']}", "the null", *_counts(null), *[MISSING] * 3])
    columns = [
        *("arm", "outcome", "prompts", "tokens", "identical", "ties", "violations", "undecided"),
        *("not excluded, of prompts", "not excluded, of tokens", "p (Holm)"),
    ]
    return table(columns, rows, text_columns=2)


def _counts(row: dict[str, Any]) -> list[str]:
    return [count(row[name]) for name in ("requests", "tokens", "identical", "ties", "violations", "untold")]


def _differences(results: dict[str, Any], level: dict[str, Any]) -> Table:
    rows = [
        [
            arm_label(results, row["arm"]),
            each["prompt_id"],
            each["outcome"],
            each["why"],
            str(each["index"]),
            number(each["gap"], 6),
        ]
        for row in level["arms"]
        for each in row["differences"]
    ]
    columns = ["arm", "prompt", "outcome", "why", "first differing token", "logit gap"]
    return table(columns, rows, text_columns=4, caption="Answers that differ")
