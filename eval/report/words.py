"""The verdict in plain words, for somebody who runs a serving platform: where it pays, up to where, where it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.eval.records import AR
from eyas.eval.report.names import (
    arm_label,
    batch_sizes,
    drafting_arms,
    group_name,
    groups,
    is_control,
    of_group,
    of_phase,
    size_list,
)
from eyas.eval.report.values import listing, times

SUPPORTED, SLOWER, INCONCLUSIVE, REFUSED = "SUPPORTED", "SLOWER", "INCONCLUSIVE", "NOT SUPPORTED"
MARKS = {SUPPORTED: "supported", SLOWER: "slower", REFUSED: "refused", INCONCLUSIVE: ""}
"""Verdict -> style word of its table cell."""
SIGNS = {
    SUPPORTED: "\N{BLACK UP-POINTING TRIANGLE}",
    SLOWER: "\N{BLACK DOWN-POINTING TRIANGLE}",
    REFUSED: "\N{MULTIPLICATION SIGN}",
}
"""Verdict -> a sign that stands for it where colour is not seen."""

Row = dict[str, Any]


def headline(results: dict[str, Any]) -> str:
    """One or two sentences on the first group: does it pay, up to how many requests at once, and where does it cost?"""
    cells = [cell for cell in results["cells"] if not is_control(results, cell["arm"])]
    if not cells:
        return "Nothing to judge: no arm that drafts was measured beside plain decoding in the same cell."
    group = groups(cells)[0]
    mine = of_group(cells, group)
    sizes = batch_sizes(mine)
    paying, losing = _sizes_with(mine, SUPPORTED), _sizes_all(mine, SLOWER)
    where = f"on {group_name(*group)}"
    if paying:
        return f"{_paying_words(paying, sizes)} {where}.{_losing_words(results, mine)}"
    if losing == sizes:
        return f"Drafting does not pay {where}: every arm is slower than plain decoding at every batch size tested."
    refused = [cell for cell in mine if cell["verdict"] == REFUSED]
    if refused:
        return f"No speed-up can be claimed {where}: {refused[0]['reason']}.{_losing_words(results, mine)}"
    return f"Not shown to pay at any batch size {where}.{_losing_words(results, mine) or _undecided_words(mine)}"


def _undecided_words(cells: Sequence[Row]) -> str:
    """What was measured, where nothing could be decided."""
    faster = batch_sizes(cell for cell in cells if cell["interval"][0] > 1)
    slower = [size for size in batch_sizes(cells) if all(_below(c) for c in cells if c["batch_size"] == size)]
    parts = [f"some arm faster at {size_list(faster)}"] if faster else []
    parts += [f"every arm slower at {size_list(slower)}"] if slower else []
    return f" Measured, but not decided: {', '.join(parts)}." if parts else ""


def _below(cell: Row) -> bool:
    return cell["interval"][1] < 1


def _paying_words(paying: list[int], sizes: list[int]) -> str:
    if paying == sizes:
        return f"Drafting pays at every batch size tested ({listing([str(size) for size in sizes])})"
    if paying == sizes[: len(paying)]:
        running = "1 request" if paying[-1] == 1 else f"{paying[-1]} requests"
        return f"Drafting pays up to {running} at a time"
    return f"Drafting pays at {size_list(paying)}"


def _losing_words(results: dict[str, Any], cells: Sequence[Row]) -> str:
    """Every arm with a slower cell, and where."""
    slower = listing([f"{arm} {where}" for arm, where, _ in _by_arm(results, cells, verdict=SLOWER)])
    return f" Slower than plain decoding: {slower}." if slower else ""


def _sizes_with(cells: Sequence[Row], verdict: str) -> list[int]:
    """Batch sizes at which some arm has `verdict`."""
    return batch_sizes(cell for cell in cells if cell["verdict"] == verdict)


def _sizes_all(cells: Sequence[Row], verdict: str) -> list[int]:
    """Batch sizes at which every arm has `verdict`."""
    return [
        size
        for size in _sizes_with(cells, verdict)
        if all(c["verdict"] == verdict for c in cells if c["batch_size"] == size)
    ]


def verdict_bullets(results: dict[str, Any]) -> list[str]:
    """One short line per group: where it pays, where it costs (always), and how much stays undecided."""
    return [
        f"{group_name(*group)}: {_in_short(results, of_group(results['cells'], group))}"
        for group in groups(results["cells"])
    ]


def _in_short(results: dict[str, Any], cells: list[Row]) -> str:
    faster = [cell for cell in cells if cell["verdict"] == SUPPORTED]
    best = [
        max((c for c in faster if c["batch_size"] == size), key=lambda c: c["ratio"]) for size in batch_sizes(faster)
    ]
    shown = listing([f"{c['batch_size']} ({arm_label(results, c['arm'])}, {times(c['ratio'])})" for c in best])
    sentences = [f"faster at batch size {shown}." if best else "no arm is shown to be faster."]
    slower, refused = (_with_ratios(_by_arm(results, cells, verdict=word)) for word in (SLOWER, REFUSED))
    sentences.append(f"Slower: {slower}." if slower else "No arm is shown to be slower.")
    if refused:
        sentences.append(f"No claim allowed: {refused}.")
    undecided = sum(cell["verdict"] == INCONCLUSIVE for cell in cells)
    return " ".join([*sentences, f"{undecided} of {len(cells)} cells undecided."])


def _by_arm(results: dict[str, Any], cells: Sequence[Row], *, verdict: str) -> list[tuple[str, str, list[Row]]]:
    """Arms with cells of that verdict: name, at which batch sizes in words, the cells by batch size."""
    found = []
    for arm in drafting_arms(results):
        mine = sorted((cell for cell in cells if cell["arm"] == arm), key=lambda cell: cell["batch_size"])
        chosen = [cell for cell in mine if cell["verdict"] == verdict]
        if chosen:
            found.append((arm_label(results, arm), _where(chosen, mine), chosen))
    return found


def _with_ratios(found: Sequence[tuple[str, str, list[Row]]]) -> str:
    """ "k=5 from batch size 8 on (0.75x to 0.59x) and ngram at batch size 4 (0.96x)"."""
    parts = []
    for arm, where, cells in found:
        ends = dict.fromkeys([times(cells[0]["ratio"]), times(cells[-1]["ratio"])])
        parts.append(f"{arm} {where} ({' to '.join(ends)})")
    return listing(parts)


def _where(found: Sequence[Row], tested: Sequence[Row]) -> str:
    sizes = [cell["batch_size"] for cell in found]
    if len(found) == len(tested) > 1:
        return "at every batch size"
    if len(found) > 1 and sizes == [cell["batch_size"] for cell in tested][-len(found) :]:
        return f"from batch size {sizes[0]} on"
    return f"at {size_list(sizes)}"


def best_k_sentence(results: dict[str, Any]) -> str:
    """The fastest measured arm per batch size of the first group by the point estimate, and whether it is told from AR."""
    rows = results["best_k"]
    if not rows:
        return "No fastest arm: nothing was measured."
    group = groups(rows)[0]
    parts = [
        f"{arm_label(results, row['arm'])} at {row['batch_size']}{_doubt(results, row)}"
        for row in of_group(rows, group)
    ]
    return f"Highest point estimate by batch size, {group_name(*group)}: {', '.join(parts)}."


def _doubt(results: dict[str, Any], row: Row) -> str:
    """The largest of several noisy numbers is the fastest arm only where its difference from AR is beyond chance."""
    cells = of_phase(of_group(results["cells"], (row["dataset"], row["temperature"])), "grid")
    here = [c for c in cells if c["batch_size"] == row["batch_size"] and not is_control(results, c["arm"])]
    if row["arm"] == AR:
        close = [arm_label(results, cell["arm"]) for cell in here if cell["direction"] != "slower"]
        return f" (not distinguishable from {listing(close)})" if close else ""
    judged = any(cell["arm"] == row["arm"] and cell["direction"] == "faster" for cell in here)
    return "" if judged else " (not distinguishable from AR)"
