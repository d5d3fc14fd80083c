"""D, the answers themselves: which loop, how they ended, and how long prompts and answers were."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.names import PLACE, arm_label, by_phase, place
from eyas.eval.report.values import count, number, percent

WORDS = (
    "A looping answer repeats more than 30 % of its 8-grams. Loops are easy to draft and flatter acceptance; they are "
    "counted, not removed. length: the answer was cut at the limit of tokens; stop: it ended by itself. Lengths are in tokens; "
    "a range stands with the number of prompts or answers in it."
)
QUANTILES = ("mean", "min", "p10", "p50", "p90", "max")


def answers_section(results: dict[str, Any]) -> Section:
    shown = [_loops(results, mine, caption=caption) for mine, caption in by_phase(results["loops"], "Looping answers")]
    shown += [
        _ends(results, mine, caption=caption) for mine, caption in by_phase(results["latency"], "How answers ended")
    ]
    for quantity, caption in (("prompt_tokens", "Length of prompts"), ("output_tokens", "Length of answers")):
        shown += [
            _lengths(results, mine, quantity, caption=full) for mine, full in by_phase(results["lengths"], caption)
        ]
    return Section("Answers", [WORDS], shown)


def _loops(results: dict[str, Any], mine: list[dict[str, Any]], *, caption: str) -> Table:
    rows = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            count(row["flagged"]),
            count(row["requests"]),
            percent(row["share"]),
        ]
        for row in mine
    ]
    return table([*PLACE, "arm", "flagged", "answers", "share"], rows, text_columns=3, caption=caption)


def _ends(results: dict[str, Any], mine: list[dict[str, Any]], *, caption: str) -> Table:
    rows = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            ", ".join(f"{reason} {n}" for reason, n in row["finish_reasons"].items()),
            str(row["batch_size"]),
            number(row["mean_prompt_tokens"], 1),
            number(row["mean_output_tokens"], 1),
        ]
        for row in mine
    ]
    columns = [*PLACE, "arm", "ended by", "batch size", "prompt tokens (mean)", "output tokens (mean)"]
    return table(columns, rows, text_columns=4, caption=caption)


def _lengths(results: dict[str, Any], mine: list[dict[str, Any]], quantity: str, *, caption: str) -> Table:
    """One row per set and arm; of prompts one per set, since all arms read the same."""
    chosen = mine if quantity == "output_tokens" else _one_per_place(mine)
    rows = []
    for row in chosen:
        found = row[quantity]
        arm = [arm_label(results, row["arm"])] if quantity == "output_tokens" else []
        spread = ", ".join(f"{low}-{high}: {n}" for low, high, n in found["histogram"])
        figures = [count(found["n"]), *(number(found[name], 0) for name in QUANTILES)]
        rows.append([*place(row), *arm, spread, *figures])
    names = [*PLACE, *(["arm"] if quantity == "output_tokens" else []), "how many of which length"]
    return table([*names, "n", *QUANTILES], rows, text_columns=len(names), caption=caption)


def _one_per_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({(row["dataset"], row["temperature"]): row for row in reversed(rows)}.values())[::-1]
