"""The results in plain words, and the table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.eval.report.document import number

MAIN_DATASET = "heldout"
DATASET_NAMES = {"heldout": "held-out chat", "humaneval": "HumanEval"}


def verdict_sentences(results: dict[str, Any]) -> list[str]:
    """Where the head is faster and where it is slower, one sentence per kind of verdict, the main dataset first."""
    cells = [cell for cell in results["cells"] if cell["dataset"] == MAIN_DATASET]
    faster = [cell for cell in cells if cell["verdict"] == "SUPPORTED"]
    almost = [cell for cell in cells if cell["verdict"] == "INCONCLUSIVE" and cell["interval"][0] > 1]
    refused = [cell for cell in cells if cell["verdict"] == "NOT SUPPORTED"]
    slower = [cell for cell in cells if cell["verdict"] == "SLOWER"]
    unclear = [cell for cell in cells if cell["verdict"] == "INCONCLUSIVE" and cell["interval"][0] <= 1]
    sentences = []
    if faster:
        sentences.append(f"The head is faster than plain decoding (SUPPORTED) at {_places(faster)}.")
    if almost:
        reasons = "; ".join(dict.fromkeys(cell["reason"].removeprefix("measured faster, but ") for cell in almost))
        sentences.append(f"The head measured faster at {_places(almost)}, which stays INCONCLUSIVE: {reasons}.")
    if refused:
        sentences.append(
            f"The head measured faster at {_places(refused)}, but its outputs differ from plain decoding: NOT "
            "SUPPORTED."
        )
    if not faster + almost + refused:
        sentences.append("The head is nowhere measured faster than plain decoding beyond the noise.")
    if slower:
        sentences.append(f"The head is SLOWER than plain decoding at {_places(slower)}.")
    if unclear:
        sentences.append(f"No clear difference (the interval includes 1) at {_places(unclear)}.")
    return sentences + _other_datasets(results)


def _other_datasets(results: dict[str, Any]) -> list[str]:
    """One sentence per dataset besides the main one, with every verdict in it."""
    others = dict.fromkeys(cell["dataset"] for cell in results["cells"] if cell["dataset"] != MAIN_DATASET)
    sentences = []
    for dataset in others:
        parts = [
            f"batch size {cell['batch_size']}, k={cell['draft_length']}: {cell['ratio']:.2f}x, {cell['verdict']}"
            for cell in results["cells"]
            if cell["dataset"] == dataset
        ]
        sentences.append(f"On {DATASET_NAMES[dataset]}: {'; '.join(parts)}.")
    return sentences


def _places(cells: Sequence[dict[str, Any]]) -> str:
    """ "batch size 1 (k=3: 1.23x), batch size 2 (k=3: 1.10x, k=1: 1.12x)"."""
    by_size: dict[int, list[str]] = {}
    for cell in cells:
        by_size.setdefault(cell["batch_size"], []).append(f"k={cell['draft_length']}: {cell['ratio']:.2f}x")
    return ", ".join(f"batch size {size} ({', '.join(ratios)})" for size, ratios in by_size.items())


def best_k_sentence(results: dict[str, Any]) -> str:
    """The best measured draft length per batch size, k = 0 being plain decoding."""
    rows = [row for row in results["best_k"] if row["dataset"] == MAIN_DATASET]
    parts = [f"{row['batch_size']}: k={row['draft_length']}" for row in rows]
    return f"best k by batch size (0 = plain decoding): {', '.join(parts)}"


def terminal_table(results: dict[str, Any]) -> str:
    """The main table as plain text for a terminal, with the best k below it."""
    header = ["batch size", "k", "AR tok/s", "head tok/s", "ratio", "tau", "verdict"]
    rows = [
        [
            str(cell["batch_size"]),
            str(cell["draft_length"]),
            number(cell["ar_tokens_per_second"], 1),
            number(cell["head_tokens_per_second"], 1),
            f"{cell['ratio']:.2f}x",
            number(cell["tau_step_weighted"]),
            cell["verdict"],
        ]
        for cell in results["cells"]
        if cell["dataset"] == MAIN_DATASET
    ]
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [header, *rows]]
    return "\n".join([*lines, best_k_sentence(results)])
