"""The main table as plain text for a terminal."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.values import number, span, times
from eyas.eval.report.words import best_k_sentence, headline

COLUMNS = [*PLACE, "batch size", "arm", "AR tok/s", "tok/s", "ratio", "95 % interval", "verdict"]


def terminal_table(results: dict[str, Any]) -> str:
    """Every judged cell, slower ones too, then the verdict in words and the fastest arm per batch size."""
    rows = [
        [
            *place(cell),
            str(cell["batch_size"]),
            arm_label(results, cell["arm"]),
            number(cell["ar_tokens_per_second"], 1),
            number(cell["tokens_per_second"], 1),
            times(cell["ratio"]),
            span(cell["interval"]),
            cell["verdict"],
        ]
        for cell in results["cells"]
    ]
    return "\n".join([aligned([COLUMNS, *rows]), headline(results), best_k_sentence(results)])


def aligned(lines: list[list[str]]) -> str:
    """Columns set to the right, two spaces apart."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
