"""The comparison of two runs as a document: what may be claimed, what differs, then the same cells side by side."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.names import PLACE, dataset_name, place
from eyas.eval.report.values import count, listing, number, p_value, span, times
from eyas.eval.report.words import MARKS

TITLE = "Two runs compared"
CLAIMS = ("second faster", "second slower", "no difference detected")


def comparison_sections(comparison: dict[str, Any]) -> list[Section]:
    return [_verdict(comparison), _differences(comparison), _cells(comparison), _unshared(comparison)]


def _verdict(comparison: dict[str, Any]) -> Section:
    cells = comparison["cells"]
    claims = [cell["claim"] for cell in cells]
    counted = listing([f"{claim} in {claims.count(claim)}" for claim in CLAIMS if claim in claims])
    refused = list(dict.fromkeys(claim for claim in claims if claim not in CLAIMS))
    changed = sum(cell["verdict_changed"] for cell in cells)
    sentences = [
        f"{len(cells)} cells in both runs: {counted or 'no claim about any of them'}.",
        f"First: {comparison['first']}. Second: {comparison['second']}.",
        f"{changed} of {len(cells)} verdicts changed.",
    ]
    alerts = [f"{claims.count(claim)} cells {claim}." for claim in refused]
    return Section("What may be claimed", [sentences[0], " ".join(sentences[1:])], alerts=alerts)


def _differences(comparison: dict[str, Any]) -> Section:
    if not comparison["differences"]:
        return Section("What differs between the runs", ["Nothing that was recorded."])
    words = (
        "A difference that blocks forbids a claim about speed: ratios measured with another target, engine, machine, decoding, "
        "protocol or other prompts are not comparable. Head, arms and recipe are what a comparison is about. Nor is anything claimed about a "
        "cell that may carry no verdict in its own run: synthetic acceptance, a void comparison, too few starts or prompts, outputs "
        "that differ, loops."
    )
    ordered = sorted(comparison["differences"], key=lambda each: not each["blocks"])
    rows = [
        [
            each["kind"],
            each["setting"],
            "yes" if each["blocks"] else "no",
            _shown(each["first"]),
            _shown(each["second"]),
        ]
        for each in ordered
    ]
    shown = table(["kind", "setting", "blocks", "first", "second"], rows, text_columns=5)
    return Section("What differs between the runs", [words], [shown])


def _shown(value: str | None) -> str:
    return "not there" if value is None else value


def _cells(comparison: dict[str, Any]) -> Section:
    words = (
        "relative: the second run's ratio to its own plain decoding over the first run's; its interval is recovered from the "
        "two intervals (MOVER). p (Holm): corrected for the number of cells."
    )
    return Section("The same cells", [words], [_ratios(comparison), _rates(comparison)])


def _ratios(comparison: dict[str, Any]) -> Table:
    rows, marks = [], []
    for cell in comparison["cells"]:
        one, other = cell["first"], cell["second"]
        values = [*place(cell), cell["arm"], str(cell["batch_size"]), cell["claim"], one["verdict"], other["verdict"]]
        values += [f"{times(each['ratio'])} ({span(each['interval'])})" for each in (one, other)]
        values += [times(cell["relative"]["ratio"], 3), span(cell["relative"]["interval"], 3), p_value(cell["p_holm"])]
        rows.append(values)
        marks.append([*[""] * 5, MARKS[one["verdict"]], MARKS[other["verdict"]], *[""] * 5])
    columns = [*PLACE, "arm", "batch size", "claim", "verdict, first", "verdict, second"]
    columns += ["ratio, first", "ratio, second", "relative", "95 % interval", "p (Holm)"]
    return table(columns, rows, text_columns=7, marks=marks)


def _rates(comparison: dict[str, Any]) -> Table:
    rows = []
    for cell in comparison["cells"]:
        sides = (cell["first"], cell["second"])
        values = [*place(cell), cell["arm"], str(cell["batch_size"])]
        values += [number(side["ar_tokens_per_second"], 1) for side in sides]
        values += [number(side["tokens_per_second"], 1) for side in sides]
        for name in ("starts", "prompts", "requests"):
            values += [count(side[name]) for side in sides]
        rows.append([*values, *(number(side["tau"]) for side in sides)])
    columns = [*PLACE, "arm", "batch size"]
    for name in ("AR tok/s", "tok/s", "starts", "prompts", "requests", "tau"):
        columns += [f"{name}, first", f"{name}, second"]
    return table(
        columns, rows, text_columns=3, caption="Absolute numbers: not compared, the machine's state is in them"
    )


def _unshared(comparison: dict[str, Any]) -> Section:
    bullets = [
        f"{dataset_name(dataset)}, temperature {temperature:g}, batch size {size}, {arm}: only in the {side} run"
        for side in ("first", "second")
        for dataset, temperature, size, arm in comparison[f"only_{side}"]
    ]
    return Section("Cells that one run lacks", [] if bullets else ["None."], bullets=bullets)


def comparison_text(comparison: dict[str, Any]) -> str:
    """The comparison for a terminal: what blocks, the cells, and how many claims."""
    lines = [
        f"{each['kind']} differs, {each['setting']}: {each['first']} | {each['second']}"
        for each in comparison["differences"]
        if each["blocks"]
    ]
    for cell in comparison["cells"]:
        one, other = cell["first"], cell["second"]
        lines.append(
            f"{', '.join(place(cell))}, batch size {cell['batch_size']}, {cell['arm']}: {times(one['ratio'])} -> "
            f"{times(other['ratio'])}, relative {times(cell['relative']['ratio'])} ({span(cell['relative']['interval'])}); "
            f"{one['verdict']} -> {other['verdict']}; {cell['claim']}"
        )
    return "\n".join([*lines, *_verdict(comparison).paragraphs])
