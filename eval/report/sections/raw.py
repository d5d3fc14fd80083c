"""J: failed starts, and where the raw records are."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, table
from eyas.eval.report.names import arm_label
from eyas.eval.report.values import count

TITLE = "J. Raw records and failures"


def raw_section(results: dict[str, Any]) -> Section:
    bullets = [
        f"starts/*.jsonl: one line per request ({count(results['requests'])} requests, {count(results['output_tokens'])} "
        "output tokens) with times, token ids, finish reason and accepted tokens of every step; one line per measured block "
        "with every engine step.",
        "starts/*.json: the resolved engine and machine; starts/*.plan.json: what the process was told to do; starts/*.log: "
        "what the engine said.",
        "`eyas report DIRECTORY` recomputes every number of this page from those files, without an engine and without a GPU. "
        "results.json holds all numbers; its form is published as eval/report/results.schema.json.",
    ]
    return Section(TITLE, bullets=bullets, parts=[_failures(results)])


def _failures(results: dict[str, Any]) -> Section:
    if not results["failures"]:
        return Section("Failed starts", ["None."])
    words = "These starts failed and are in no figure; their cells are missing from their arm only."
    rows = [
        [
            arm_label(results, each["arm"]),
            each["reason"],
            "\n".join(each["log_tail"][-1:]),
            str(each["start"]),
        ]
        for each in results["failures"]
    ]
    shown = table(["arm", "reason", "last line of the log", "start"], rows, text_columns=3)
    return Section("Failed starts", [words], [shown])
