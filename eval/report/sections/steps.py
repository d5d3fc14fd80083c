"""F: where the time goes: step times by batch size, their parts, and whether the two ways of measuring them agree."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.figures.cost import split_figures
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.sections.capacity import capacity_section
from eyas.eval.report.values import count, listing, milliseconds, number, percent
from eyas.eval.timing.derive import MAX_DIFFERENCE
from eyas.eval.timing.perturbation import MAX_PERTURBATION

TITLE = "F. Where the time goes"
SPLIT_WORDS = (
    "From separate instrumented starts of each arm, in which the runner's calls are timed; never from the starts compared above. "
    "verify: the target's forward (of AR: its plain forward). overhead: scheduler, input preparation and all else. "
    "perturbation: what the instruments themselves added to a step, from neighbouring steps with and without them.",
)


def steps_section(results: dict[str, Any]) -> Section:
    parts = [
        _step_times(results),
        _split(results),
        _derived(results),
        _check(results),
        capacity_section(results),
    ]
    return Section(TITLE, parts=parts)


def _step_times(results: dict[str, Any]) -> Section:
    title = "Step times"
    rows = results.get("step_times") or []
    if not rows:
        return not_measured(title)
    words = (
        "Pure decode steps (no request is reading its prompt) with the nominal number of requests running, all starts of the "
        "grid. The schedule ran later, in a phase of its own, so its seconds are not among these."
    )
    ratios = {_key(row): row["ratio"] for row in results.get("time_derived") or []}
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            milliseconds(row["p50"]),
            milliseconds(row["p90"]),
            milliseconds(row["p99"]),
            ", ".join(milliseconds(value) for value in row["p50_by_start"]) or (row["why"] or ""),
            number(ratios.get(_key(row))),
            number(row["tokens_per_request"]),
            count(row["steps"]),
            percent(row["share_of_steps"]),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "batch size", "p50 [ms]", "p90 [ms]", "p99 [ms]", "p50 by start [ms]", "over AR (tau_min)"),
        *("tokens per request and step", "steps", "share of all steps"),
    ]
    return Section(title, [words], [table(columns, shown, text_columns=3)])


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("dataset", "temperature", "batch_size", "arm"))


def _split(results: dict[str, Any]) -> Section:
    title = "Draft, verify, sample, overhead"
    rows = results.get("time_split") or []
    reasons = results.get("time_not_measured") or []
    if not rows:
        return Section(title, ["Not measured in this session."], bullets=list(reasons))
    figures = split_figures(rows, results)
    tables = [_split_table(results, rows), _verify_table(results, rows)]
    words = [*SPLIT_WORDS, _settled(rows)]
    return Section(title, words, tables, bullets=list(reasons), figures=figures, alerts=_disturbed(rows))


def _disturbed(rows: list[dict[str, Any]]) -> list[str]:
    disturbed = sum(row["undisturbed"] is False for row in rows)
    if not disturbed:
        return []
    return [
        f"The instruments changed a step by more than {percent(MAX_PERTURBATION, 0)}, beyond chance, in {disturbed} of "
        f"{len(rows)} rows: there the parts are not those of an undisturbed step."
    ]


def _settled(rows: list[dict[str, Any]]) -> str:
    known = sum(row["undisturbed"] is True for row in rows)
    return f"In {known} of {len(rows)} rows the whole interval of the perturbation lies within {percent(MAX_PERTURBATION, 0)}."


def _split_table(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    parts = ("draft", "verify", "sample", "overhead")
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            row["clock"],
            str(row["batch_size"]),
            milliseconds(row["mean"]["step"]),
            *(f"{milliseconds(row['mean'][part])} ({percent(row['share'][part])})" for part in parts),
            _perturbation(row),
            count(row["steps"]),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "clock", "batch size", "step [ms]", *(f"{part} [ms]" for part in parts)),
        *("perturbation", "steps"),
    ]
    return table(columns, shown, text_columns=4, caption="Mean decode step by part (share of the step)")


def _perturbation(row: dict[str, Any]) -> str:
    interval = row["perturbation_interval"]
    shown = percent(row["perturbation"], 2)
    return shown if interval is None else f"{shown} ({' to '.join(percent(end, 2) for end in interval)})"


def _verify_table(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            number(row["drafted_per_request"]),
            number(row["verify_over_ar_forward"]),
            number(row["verify_over_ar_step"]),
            *(milliseconds(row["overhead"][part]) for part in ("schedule", "runner", "rest")),
        ]
        for row in rows
        if row["kind"] != "ar"
    ]
    columns = [
        *(*PLACE, "arm", "batch size", "drafted per request", "verify / AR forward", "verify / AR step"),
        *("scheduler [ms]", "runner [ms]", "rest [ms]"),
    ]
    return table(columns, shown, text_columns=3, caption="What verifying k + 1 tokens costs: T_verify(B, k) / T_AR(B)")


def _derived(results: dict[str, Any]) -> Section:
    title = "Derived from step times alone"
    rows = results.get("time_derived") or []
    if not rows:
        return not_measured(title)
    words = (
        "Nothing was instrumented here. extra: step time with drafting minus that of AR. verify (proxy): AR's step at as many "
        "requests as the verification reads tokens; an upper estimate where contexts are long. draft (proxy): what is left."
    )
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            milliseconds(row["ar_seconds"]),
            milliseconds(row["seconds"]),
            milliseconds(row["extra_seconds"]),
            milliseconds(row["extra_per_drafted_token"]),
            milliseconds(row["verify_proxy_seconds"]),
            milliseconds(row["draft_proxy_seconds"]),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "batch size", "AR step [ms]", "step [ms]", "extra [ms]", "extra per drafted token [ms]"),
        *("verify, proxy [ms]", "draft, proxy [ms]"),
    ]
    return Section(title, [words], [table(columns, shown, text_columns=3)])


def _check(results: dict[str, Any]) -> Section:
    title = "Do the two agree?"
    rows = results.get("time_check") or []
    if not rows:
        return not_measured(title, "It needs instrumented starts of AR and of the arm in the same cell.")
    worst = max(rows, key=lambda row: abs(row["difference_share"]))
    words = (
        "The parts of an arm minus those of AR must add up to the extra time of a step in the uninstrumented starts. Largest "
        f"difference: {percent(abs(worst['difference_share']))} of a step; they agree where it is at most "
        f"{percent(MAX_DIFFERENCE, 0)}, about what starts of a process differ by on their own."
    )
    apart = [row for row in rows if not row["agrees"]]
    alerts = [
        f"In {len(apart)} of {len(rows)} cells the parts do not add up to what the uninstrumented starts say, by more than "
        f"{percent(MAX_DIFFERENCE, 0)} of a step: do not quote the parts of a step there."
    ]
    parts = ("draft", "verify", "sample", "overhead")
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            "yes" if row["agrees"] else "NO",
            str(row["batch_size"]),
            listing([f"{part} {milliseconds(row['extra_by_part'][part])}" for part in parts]),
            milliseconds(row["extra_split"]),
            milliseconds(row["extra_derived"]),
            percent(row["difference_share"]),
            number(row["verify_over_proxy"]),
        ]
        for row in rows
    ]
    columns = [
        *(*PLACE, "arm", "agree", "batch size", "extra by part [ms]", "extra, split [ms]", "extra, derived [ms]"),
        *("difference / step", "step without draft / proxy"),
    ]
    marks = ["" if row["agrees"] else "slower" for row in rows]
    tables = [table(columns, shown, text_columns=4, row_marks=marks)]
    return Section(title, [words], tables, alerts=alerts if apart else [])
