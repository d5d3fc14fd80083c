"""The ceiling in plain words and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.eval.cost.ceiling_rows import REFERENCES


def ceiling_sentences(results: Mapping[str, Any]) -> list[str]:
    """Is a head worth training here, up to which concurrency, and what stands behind the answer."""
    return [
        _label(results),
        *_doubt(results),
        _answer(results),
        *_good_head(results),
        *_open_sizes(results),
        *_limit(results),
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
    for name, start in (("modest", "A head is"), ("good", "Only a very good head is")):
        best = _best(results["reach"][name], "yes")
        if best is not None:
            return (
                f"{start} worth training here {_where(results, name)}: one that accepts as the published "
                f"{_reference(results, name, best)} would decode {_speedup(best)} as fast as plain decoding {_place(best)}."
            )
    best = _best(results["reach"]["good"], "not settled")
    if best is not None:
        return (
            f"NOT SETTLED whether a head is worth training here: one that accepts as the published "
            f"{_reference(results, 'good', best)} would decode {_speedup(best)} as fast as plain decoding {_place(best)}, and "
            f"{results['worth']:.2f}x is what makes it worth the training; more starts (--starts) would tell."
        )
    return (
        "A head is not worth training here: even one that accepts as the best published heads "
        f"({REFERENCES['good'].name}) would not decode {results['worth']:.2f}x as fast as plain decoding at any measured "
        "batch size."
    )


def _good_head(results: Mapping[str, Any]) -> list[str]:
    """What a better head adds, where a modest one is worth it already."""
    good = _best(results["reach"]["good"], "yes")
    if _best(results["reach"]["modest"], "yes") is None or good is None:
        return []
    return [
        f"One as good as the {_reference(results, 'good', good)} would pay {_where(results, 'good')} "
        f"({_speedup(good)} {_place(good)})."
    ]


def _open_sizes(results: Mapping[str, Any]) -> list[str]:
    """Batch sizes at which an answer about a published head hangs on the noise of the starts."""
    if _best(results["reach"]["good"], "yes") is None:
        return []
    return [
        f"NOT SETTLED at {_sizes(sizes)} for a head as the {REFERENCES[name].name}: the intervals hold {results['worth']:.2f}x."
        for name in REFERENCES
        if (sizes := _at(results, name, "not settled"))
    ]


def _limit(results: Mapping[str, Any]) -> list[str]:
    """Where the best case ends. The measured sizes are in order."""
    found = results["reach"]["best_case"]
    measured = [each["batch_size"] for each in found]
    beyond, unknown = _at(results, "best_case", "no"), _at(results, "best_case", "not settled")
    words = []
    if beyond:
        suffix = beyond == measured[-len(beyond) :]
        where = f"From batch size {beyond[0]} on" if suffix else f"At {_sizes(beyond)}"
        until = f" (measured up to {measured[-1]})" if suffix else ""
        words.append(f"{where} even a head whose every draft is accepted is slower than plain decoding{until}.")
    if unknown:
        best = _best(found, "not settled")
        assert best is not None
        words.append(
            f"NOT SETTLED at {_sizes(unknown)} whether even a head whose every draft is accepted would pay: at best "
            f"{_speedup(best)} {_place(best)}."
        )
    if words:
        return words
    return [
        f"A head whose every draft is accepted would pay at every batch size measured; at {measured[-1]} it would be "
        f"{_speedup(found[-1])} (k={found[-1]['draft_length']})."
    ]


def _at(results: Mapping[str, Any], name: str, outcome: str) -> list[int]:
    """Measured batch sizes of this outcome."""
    return [each["batch_size"] for each in results["reach"][name] if each["outcome"] == outcome]


def _best(found: Sequence[Mapping[str, Any]], outcome: str) -> Mapping[str, Any] | None:
    return max((each for each in found if each["outcome"] == outcome), key=lambda each: each["speedup"], default=None)


def _where(results: Mapping[str, Any], name: str) -> str:
    """At which batch sizes the answer is yes: up to a concurrency where no smaller one is left out."""
    sizes = _at(results, name, "yes")
    if sizes != [each["batch_size"] for each in results["reach"][name]][: len(sizes)]:
        return f"at {_sizes(sizes)}"
    return "for up to " + ("1 request at a time" if sizes[-1] == 1 else f"{sizes[-1]} concurrent requests")


def _sizes(sizes: Sequence[int]) -> str:
    *some, last = map(str, sizes)
    return f"batch sizes {', '.join(some)} and {last}" if some else f"batch size {last}"


def _speedup(found: Mapping[str, Any]) -> str:
    interval = found["interval"]
    return f"{found['speedup']:.2f}x" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")


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


def _place(found: Mapping[str, Any]) -> str:
    return f"at batch size {found['batch_size']} with k={found['draft_length']}"


def _reference(results: Mapping[str, Any], name: str, found: Mapping[str, Any]) -> str:
    reference, length = results["references"][name], found["draft_length"]
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
