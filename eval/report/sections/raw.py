"""J: failed starts, where the raw records are, and the command that made them."""

from __future__ import annotations

import shlex
from typing import Any

from eyas.eval.report.document import Section, table
from eyas.eval.report.names import arm_label
from eyas.eval.report.values import count

TITLE = "J. Raw records and failures"
FILES = (
    "protocol.json: how it was measured, written before the first engine started; context.json: where target, head and "
    "recipe come from; session.json: the id that every record of the session carries.",
    "starts/*.json: the resolved engine and machine; starts/*.plan.json: what the process was told to do; starts/*.log: what "
    "the engine said; starts/*.failed.json: why a start failed, and the end of its log. Numbers from 500 on are of the phase "
    "that measures the schedule.",
    "lossless/: the same of the engines of the ladder, with ladder.json (which arm stands for which), sampler.json (counts of "
    "L0), logits.json (what the target says where answers differ) and offline.json (acceptance predicted without the engine).",
    "instrument/: the same of the starts in which the parts of a step were timed.",
    "open_loop/: every request at every arrival rate, the server's own counters, settings and log.",
    "schedule.json, speculative_config.json: the draft lengths by batch size, as chosen from the grid, and as vLLM takes them.",
)


def raw_section(results: dict[str, Any]) -> Section:
    bullets = [
        *_command(results["context"]),
        f"starts/*.jsonl: one line per request ({count(results['requests'])} requests, {count(results['output_tokens'])} "
        "output tokens) with times, token ids, finish reason and accepted tokens of every step; one line per measured block "
        "with every engine step.",
        *FILES,
        "`eyas report DIRECTORY` recomputes every number of this page from those files, without an engine and without a GPU. "
        "results.json holds all numbers; its form is published as eval/report/results.schema.json.",
    ]
    return Section(TITLE, bullets=bullets, parts=[_failures(results)])


def _command(context: dict[str, Any]) -> list[str]:
    """The command that measured; a session of an earlier version did not keep it."""
    command = context.get("command")
    return [] if command is None else [f"Measured by `{shlex.join(command)}`."]


def _failures(results: dict[str, Any]) -> Section:
    if not results["failures"]:
        return Section("Failed starts", ["None."])
    words = (
        "A start that fails costs its arm the cells that it had not finished. The blocks that it had finished stand in the "
        "figures like those of a whole start; their number is said here."
    )
    rows = [
        [
            arm_label(results, each["arm"]),
            each["reason"],
            "\n".join(each["log_tail"]),
            str(each["start"]),
            count(each.get("kept_blocks")),
        ]
        for each in results["failures"]
    ]
    shown = table(["arm", "reason", "end of the log", "start", "blocks kept"], rows, text_columns=3)
    return Section("Failed starts", [words], [shown])
