"""E: acceptance: tau by both estimators, by position in the chain and in the answer, wasted tokens, reconciliation."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Figure, Section, Table, not_measured, table
from eyas.eval.report.figures.acceptance import chain_figure, output_figure
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.sections.reconciliation import reconciliation_section
from eyas.eval.report.values import MISSING, count, number, percent, span

TITLE = "E. Acceptance"
WORDS = (
    "From the engine's counts per verification step, in the cell with the most prompts, all starts. tau counts the target's "
    "own token. Step-weighted tau weighs long answers more, request-mean tau weighs every answer alike. tau over all steps "
    "counts steps in which nothing was drafted: speed depends on it. Within the answer: without tokens accepted behind its "
    "end, which nobody receives.",
    "Intervals at 95 % resample conversations. Wasted: share of the verified positions that brought no token.",
)


def acceptance_section(results: dict[str, Any]) -> Section:
    rows = results.get("acceptance") or []
    if not rows:
        return not_measured(TITLE, "No arm drafted anything.")
    parts = [_chain(results, rows), _answer(results), _batches(results), _offline(results, rows)]
    return Section(TITLE, list(WORDS), [_taus(results, rows)], parts=[*parts, reconciliation_section(results)])


def _taus(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["draft_length"]),
            _tau(row["tau_step_weighted"], row["tau_step_weighted_interval"]),
            _tau(row["tau_request_mean"], row["tau_request_mean_interval"]),
            number(row["tau_all_steps"], 3),
            number(row["tau_within_answer"], 3),
            _tau(row["tau_without_loops"], row["tau_without_loops_interval"]),
            " / ".join(number(value) for value in row["tau_request_percentiles"] or []) or MISSING,
            percent(row["draft_acceptance_rate"]),
            percent((row["wasted"] or {}).get("share")),
            count(row["steps"]),
            count(row["requests"]),
            str(row["batch_size"]),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "k", "tau, step-weighted", "tau, request mean", "tau, all steps", "tau within the answer"),
        *("tau without loops", "per request p10 / p50 / p90", "drafted tokens accepted", "wasted", "steps", "requests"),
        "batch size",
    ]
    return table(columns, shown, text_columns=3)


def _tau(value: float | None, interval: list[float] | None) -> str:
    return number(value, 3) if interval is None else f"{number(value, 3)} ({span(interval)})"


def _chain(results: dict[str, Any], rows: list[dict[str, Any]]) -> Section:
    words = (
        "marginal: share of all steps that accept at least so many drafted tokens. conditional: the same among the steps that "
        "accepted all before and drafted one more. The last column is tau if every chain had been cut there."
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
    figures = [chain_figure(rows)] if any(row["marginal"] for row in rows) else []
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
        "A step belongs to the bucket of the output position at which it began. Later buckets hold only longer answers; the "
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
    words = "Acceptance is a property of head, prompts and decoding. Where it moves with the batch size, other prompts were served."
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            _tau(row["tau_step_weighted"], row["tau_step_weighted_interval"]),
            number(row["tau_request_mean"], 3),
            number(row["tau_all_steps"], 3),
            count(row["steps"]),
            count(row["requests"]),
        ]
        for row in rows
    ]
    columns = [
        *PLACE,
        "arm",
        "batch size",
        "tau, step-weighted",
        "tau, request mean",
        "tau, all steps",
        "steps",
        "requests",
    ]
    return Section(title, [words], [table(columns, shown, text_columns=3)])


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
