"""The ceiling in plain words and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.eval.cost.ceiling_rows import REFERENCES


def ceiling_sentences(results: Mapping[str, Any]) -> list[str]:
    """Is a head worth training here, up to which concurrency, and what stands behind the answer."""
    return [
        _label(results),
        *_doubt(results),
        _answer(results),
        *_good_head(results),
        _limit(results),
        _validation(results),
        "Decode steps only: reading prompts gains nothing from a head, so throughput gains less than is said here.",
    ]


def _label(results: Mapping[str, Any]) -> str:
    return results["label"][0].upper() + results["label"][1:] + "."


def _doubt(results: Mapping[str, Any]) -> list[str]:
    """Why the answer that follows is not settled, if it is not."""
    found, reasons = results["validated"], []
    if found["agree"] < found["cells"] or not found["cells"]:
        reasons.append(
            "step times depend on the acceptance length in "
            f"{found['cells'] - found['agree']} of {found['cells']} cells, which they should not: something else was running"
            if found["cells"]
            else "no cell could be checked for a step time that does not depend on acceptance"
        )
    if results["start_sd"] is None:
        reasons.append("one start per arm shows no chance to compare with")
    return [f"NOT SETTLED, take what follows as a hint: {'; '.join(reasons)}."] if reasons else []


def _answer(results: Mapping[str, Any]) -> str:
    modest, good = results["up_to"]["modest"], results["up_to"]["good"]
    if modest is not None:
        return (
            f"A head is worth training here for up to {_concurrent(modest)}: "
            f"one that accepts as the published {_reference(results, 'modest', modest)} would decode "
            f"{modest['best_speedup']:.2f}x as fast as plain decoding {_place(modest)}."
        )
    if good is not None:
        return (
            f"Only a very good head is worth training here, for up to {_concurrent(good)}: "
            f"one that accepts as the published {_reference(results, 'good', good)} would decode "
            f"{good['best_speedup']:.2f}x as fast as plain decoding {_place(good)}."
        )
    return (
        "A head is not worth training here: even one that accepts as the best published heads "
        f"({REFERENCES['good'].name}) would not decode {results['worth']:.2f}x as fast as plain decoding at the smallest "
        "measured batch size."
    )


def _good_head(results: Mapping[str, Any]) -> list[str]:
    """What a better head adds, where a modest one is worth it already."""
    modest, good = results["up_to"]["modest"], results["up_to"]["good"]
    if modest is None or good is None:
        return []
    return [
        f"One as good as the {_reference(results, 'good', good)} would pay for up to {_concurrent(good)} "
        f"({good['best_speedup']:.2f}x {_place(good)})."
    ]


def _limit(results: Mapping[str, Any]) -> str:
    """Where the best case ends. The measured sizes are in order."""
    sizes = list(dict.fromkeys(row["batch_size"] for row in results["rows"]))
    ceiling = results["up_to"]["ceiling"]
    beyond = [size for size in sizes if ceiling is None or size > ceiling["batch_size"]]
    if beyond:
        return (
            f"From batch size {beyond[0]} on even a head whose every draft is accepted is slower than plain decoding."
        )
    best = max((row for row in results["rows"] if row["batch_size"] == sizes[-1]), key=lambda row: row["best_case"])
    return (
        f"A head whose every draft is accepted would pay at every batch size measured; at {sizes[-1]} it would be "
        f"{best['best_case']:.2f}x (k={best['draft_length']})."
    )


def _validation(results: Mapping[str, Any]) -> str:
    found = results["validated"]
    if not found["cells"]:
        return "No cell has step times at two acceptance lengths."
    words = (
        f"The two synthetic acceptance lengths gave the same step time in {found['agree']} of {found['cells']} cells "
        f"(largest difference {found['largest_difference']:.1%})"
    )
    if found["agree"] == found["cells"]:
        return f"{words}: a step costs the same however much is accepted, so these figures hold for any head of this shape."
    return f"{words}. Where they differ, the figures are as uncertain as that difference: more starts, or a quieter machine."


def _concurrent(found: Mapping[str, Any]) -> str:
    return "1 request at a time" if found["batch_size"] == 1 else f"{found['batch_size']} concurrent requests"


def _place(found: Mapping[str, Any]) -> str:
    return f"at batch size {found['best_batch_size']} with k={found['best_draft_length']}"


def _reference(results: Mapping[str, Any], name: str, found: Mapping[str, Any]) -> str:
    reference, length = results["references"][name], found["best_draft_length"]
    return f"{reference['name']} does (tau {reference['taus'][str(length)]:.2f} at k={length})"


def ceiling_table(results: Mapping[str, Any]) -> str:
    """One line per batch size and draft length."""
    header = ["batch size", "k", "AR ms", "SD ms", "tau needed", "of", "drafts accepted", "at best", "modest", "good"]
    lines = [header]
    for row in results["rows"]:
        share = row["needed_share"]
        needed = f"{row['tau_min']:.2f}"
        if row["tau_min_interval"] is not None:
            low, high = row["tau_min_interval"]
            needed += f" ({low:.2f}-{high:.2f})"
        lines.append(
            [
                str(row["batch_size"]),
                str(row["draft_length"]),
                f"{1000 * row['ar_step_seconds']:.1f}",
                f"{1000 * row['step_seconds']:.1f}",
                needed,
                str(row["draft_length"] + 1),
                "impossible" if share > 1 else f"{max(0.0, share):.0%}",
                f"{row['best_case']:.2f}x",
                f"{row['modest']:.2f}x",
                f"{row['good']:.2f}x",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
