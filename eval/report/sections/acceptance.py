"""E: acceptance: tau by both estimators, by position in the chain and in the answer, wasted tokens, reconciliation."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Figure, Section, Table, not_measured, table
from eyas.eval.report.figures.acceptance import chain_figure, longest_heads, output_figure
from eyas.eval.report.names import PLACE, arm_label, group_name, groups, of_group, place
from eyas.eval.report.sections.reconciliation import reconciliation_section
from eyas.eval.report.values import MISSING, count, listing, number, percent, span

TITLE = "E. Acceptance"
WORDS = (
    "From the counts of every verification step, in the cell with the most prompts, all starts. tau is tokens received per "
    "step that drafted, the target's own token among them. Step-weighted, it weighs long answers more; the request mean weighs "
    "every answer alike. All steps: with those in which nothing was drafted, which is what speed depends on. The engine's "
    "count: with the tokens that it accepted behind the end of an answer and nobody received; no speed goes with it.",
    "Intervals at 95 % are over prompts (conversations), by Student's t. Wasted: share of the verified positions that brought no "
    "token.",
)


def acceptance_section(results: dict[str, Any]) -> Section:
    rows = results.get("acceptance") or []
    if not rows:
        return not_measured(TITLE, "No arm drafted anything.")
    parts = [_chain(results, rows), _answer(results), _batches(results), _offline(results, rows)]
    tables = [_taus(results, rows), _drafted(results, rows)]
    return Section(TITLE, list(WORDS), tables, parts=[*parts, reconciliation_section(results)])


def _taus(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            _tau(row["tau"], row["tau_interval"]),
            _tau(row["tau_request_mean"], row["tau_request_mean_interval"]),
            _tau(row["tau_without_loops"], row["tau_without_loops_interval"]),
            " / ".join(number(value) for value in row["tau_request_percentiles"] or []) or MISSING,
            number(row["tau_all_steps"], 3),
            number(row["tau_engine"], 3),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "batch size", "tau, step-weighted", "tau, request mean", "tau without loops"),
        *("per request p10 / p50 / p90", "tau, all steps", "the engine's count"),
    ]
    return table(columns, shown, text_columns=3, caption="tau")


def _drafted(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            str(row["draft_length"]),
            percent(row["draft_acceptance_rate"]),
            percent((row["wasted"] or {}).get("share")),
            count(row["steps"]),
            count(row["requests"]),
        ]
        for row in rows
    ]
    columns = [*PLACE, "arm", "batch size", "longest k", "drafted tokens accepted", "wasted", "steps", "answers"]
    return table(columns, shown, text_columns=3, caption="What was drafted")


def _tau(value: float | None, interval: list[float] | None) -> str:
    return number(value, 3) if interval is None else f"{number(value, 3)} ({span(interval)})"


def _chain(results: dict[str, Any], rows: list[dict[str, Any]]) -> Section:
    words = (
        "marginal: share of all steps that accept at least so many drafted tokens. conditional: the same among the steps that "
        "accepted all before and drafted one more. Both are the engine's counts: a chain that the end of the answer cut short is no "
        "miss. The last column is tau, of tokens received, if every chain had been cut there."
    )
    positions = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(index + 1),
            percent(marginal),
            percent(row["conditional"][index]),
            number(row["tau_at_shorter_chains"][index], 3),
        ]
        for row in rows
        for index, marginal in enumerate(row["marginal"])
    ]
    columns = [*PLACE, "arm", "position", "marginal", "conditional", "tau if the chain ended here"]
    shown = [table(columns, positions, text_columns=3), _histogram(results, rows)]
    drawn = longest_heads(rows)
    figures = [chain_figure(results, drawn)] if drawn else []
    return Section("By position in the chain", [words], shown, figures=figures)


def _histogram(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    longest = max(len(row["histogram"]) for row in rows)
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            *(count(value) for value in row["histogram"]),
            *[""] * (longest - len(row["histogram"])),
        ]
        for row in rows
    ]
    columns = [*PLACE, "arm", "batch size", *(f"{accepted} accepted" for accepted in range(longest))]
    return table(columns, shown, text_columns=3, caption="Steps by number of accepted tokens")


def _answer(results: dict[str, Any]) -> Section:
    title = "By position in the answer"
    rows = results.get("acceptance_positions") or []
    if not rows:
        return not_measured(title)
    words = (
        "A step belongs to the bucket of the output position at which it began, with all that the engine accepted. Later buckets hold only longer answers; the "
        "last two columns follow the same answers, those that reach the last bucket, through all buckets."
    )
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            f"{row['from']} to {'the end' if row['to'] is None else row['to'] - 1}",
            _tau(row["tau"], row["interval"]),
            percent(row["first_position_rate"]),
            count(row["steps"]),
            count(row["requests"]),
            number(row["tau_of_longest"], 3),
            count(row["longest_requests"]),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "output position", "tau", "first drafted token accepted", "steps", "requests"),
        *("tau, longest answers", "longest answers"),
    ]
    return Section(title, [words], [table(columns, shown, text_columns=4)], figures=_answer_figures(results, rows))


def _answer_figures(results: dict[str, Any], rows: list[dict[str, Any]]) -> list[Figure]:
    """One line per prompts and temperature, for the head's arm with the longest chain."""
    lengths = {arm: facts["draft_length"] for arm, facts in results["arms"].items() if facts["kind"] == "head"}
    present = [arm for arm in lengths if any(row["arm"] == arm for row in rows)]
    if not present:
        return []
    arm = max(present, key=lambda name: lengths[name])
    return [output_figure([row for row in rows if row["arm"] == arm], draft_length=lengths[arm])]


def _batches(results: dict[str, Any]) -> Section:
    title = "By batch size"
    rows = results.get("acceptance_cells") or []
    if not rows:
        return not_measured(title)
    words = (
        "Acceptance is a property of head, prompts and decoding. Larger batches may serve more prompts; the common ones are those "
        "that every batch size of the same prompts and temperature serves, so only tau over them can be compared from size to size."
    )
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            _tau(row["tau"], row["tau_interval"]),
            _tau(row["tau_common"], row["tau_common_interval"]),
            number(row["tau_request_mean"], 3),
            number(row["tau_all_steps"], 3),
            count(row["steps"]),
            count(row["prompts"]),
            count(row["common_prompts"]),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "batch size", "tau, step-weighted", "tau, common prompts", "tau, request mean"),
        *("tau, all steps", "steps", "prompts", "common"),
    ]
    return Section(title, [words], [table(columns, shown, text_columns=3)], alerts=_uneven(rows))


def _uneven(rows: list[dict[str, Any]]) -> list[str]:
    """A warning where batch sizes did not serve the same prompts."""
    uneven = [row for row in rows if row["prompts"] > row["common_prompts"]]
    if not uneven:
        return []
    found = [f"{of_group(uneven, group)[0]['common_prompts']} of {group_name(*group)}" for group in groups(uneven)]
    return [
        f"Batch sizes served different prompts. Common to all sizes: {listing(found)}. What changes with the batch size may be "
        "the prompts, but for the column of the common ones."
    ]


def _offline(results: dict[str, Any], rows: list[dict[str, Any]]) -> Section:
    title = "Training's prediction beside served acceptance"
    found = [row for row in rows if row["offline"] is not None]
    if not found:
        return not_measured(title, "Training left no held-out acceptance with this head.")
    words = (
        "Training predicts tau on held-out answers as they stand in the data, walked greedily; serving measures it on the "
        "answers that the target gives here. Other texts, so the two may differ; on the same texts they are compared in section H."
    )
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            row["offline"]["estimator"],
            str(row["offline"]["draft_length"]),
            number(row["offline"]["offline_tau"], 3),
            number(row["offline"]["served_tau"], 3),
            percent(row["offline"]["relative_difference"]),
        ]
        for row in found
    ]
    columns = [*PLACE, "arm", "estimator", "k", "tau, training", "tau, served", "difference"]
    return Section(title, [words], [table(columns, shown, text_columns=4)])
