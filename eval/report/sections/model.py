"""G: the cost model against measurement: tau_min, break-even, prediction at batch sizes it never saw, bounds, schedule."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.figures.cost import prediction_figure
from eyas.eval.report.figures.tau import tau_figures
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.sections.fit import fit_section
from eyas.eval.report.sections.schedule import schedule_section
from eyas.eval.report.values import MISSING, count, milliseconds, number, percent, span, times

TITLE = "G. Cost model against measurement"
Row = dict[str, Any]


def model_section(results: dict[str, Any]) -> Section:
    if not (results.get("cost") or {}).get("tau_min"):
        why = "It needs step times of plain decoding and of an arm that drafts in the same cells."
        return Section(TITLE, [not_measured("", why).paragraphs[0]], parts=[schedule_section(results)])
    parts = [
        _tau_min(results),
        _break_even(results),
        _prediction(results),
        fit_section(results),
        _leviathan(results),
        _oracle(results),
        schedule_section(results),
    ]
    return Section(TITLE, parts=parts)


def _tau_min(results: dict[str, Any]) -> Section:
    words = (
        "tau_min: step time with drafting over step time of plain decoding, the tokens that a step must bring to break even. tau: "
        "tokens per request and step as received; over the common prompts, those that every batch size has, so that its course over "
        "the batch size is not that of the prompts. Where tau > tau_min a decode step pays. If tau_min exceeds k + 1, no head of "
        "this length could pay at that batch size."
    )
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            "held out" if row["held_out"] else "fitted",
            str(row["batch_size"]),
            milliseconds(row["ar_step_seconds"]),
            milliseconds(row["step_seconds"]),
            number(row["tau_min"], 3),
            span(row["tau_min_interval"], 3),
            number(row["tau_min_predicted"], 3),
            number(row["tau"], 3),
            number(row["tau_common"], 3),
            times(row["decode_speedup"]),
        ]
        for row in results["cost"]["tau_min"]
    ]
    columns = [
        *(*PLACE, "arm", "in the model", "batch size", "AR step [ms]", "step [ms]", "tau_min", "95 % interval"),
        *("tau_min, model", "tau", "tau, common prompts", "decode speed-up"),
    ]
    marks = ["" if row["tau"] >= row["tau_min"] else "slower" for row in results["cost"]["tau_min"]]
    shaded = [[""] * 9 + [mark] * 4 for mark in marks]
    return Section(
        "tau_min against measured tau",
        [words],
        [table(columns, shown, text_columns=4, marks=shaded)],
        figures=tau_figures(results, salt="tau"),
    )


def _break_even(results: dict[str, Any]) -> Section:
    words = [
        "The batch size at which drafting stops paying, interpolated in log B between measured sizes; where it does not pay at the "
        "smallest size already, or pays twice, the ranges in which it does. Throughput: of the whole cell, prompts and thinning "
        "tail included. Decode steps: of steps alone, measured and by the model, which saw only the fitted batch sizes. A < or > "
        "means beyond the tested range. Groups with a single batch size have none.",
        f"95 % intervals: {results['cost']['rules']['break_even']}.",
    ]
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            *(_crossing(row[name]) for name in ("measured", "measured_decode", "predicted_decode")),
            number(row["closed_form"], 1),
            f"{row['smallest_tested']} to {row['largest_tested']}",
        ]
        for row in results["cost"]["break_even"]
        if row["smallest_tested"] < row["largest_tested"]
    ]
    columns = [
        *(
            *PLACE,
            "arm",
            "throughput, measured",
            "decode steps, measured",
            "decode steps, predicted",
            "closed form (linear)",
        ),
        "tested",
    ]
    return Section("Break-even batch size", words, [table(columns, shown, text_columns=3)])


def _crossing(found: Row | None) -> str:
    if found is None:
        return MISSING
    if found["interval_label"] is None:
        return found["label"]
    begins = found["begins_interval_label"]
    ends = found["interval_label"] if begins is None else f"begins {begins}, ends {found['interval_label']}"
    return f"{found['label']} ({ends})"


def _prediction(results: dict[str, Any]) -> Section:
    errors = results["cost"]["errors"]
    figure = prediction_figure(results)
    words = (
        f"At {count(errors['cells'])} held-out cells the median error of the predicted throughput ratio is "
        f"{percent(errors['median_relative_error'])}, that of the decode speed-up {percent(errors['median_decode_relative_error'])}."
        if errors["cells"]
        else "No batch size was held out (fewer than three were measured), so nothing was predicted."
    )
    rule = f"Held out by rule: {results['cost']['rules']['held_out']}."
    return Section(
        "Prediction at batch sizes the model never saw",
        [words, rule],
        [_prediction_table(results)],
        figures=[figure] if figure is not None else [],
    )


def _prediction_table(results: dict[str, Any]) -> Table:
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            "held out" if row["held_out"] else "fitted",
            str(row["batch_size"]),
            times(row["predicted"]),
            times(row["measured"]),
            percent(row["relative_error"]),
            times(row["decode_predicted"]),
            times(row["decode_measured"]),
            percent(row["decode_relative_error"]),
        ]
        for row in results["cost"]["speedup"]
    ]
    columns = [
        *(*PLACE, "arm", "in the model", "batch size", "throughput ratio, predicted", "measured", "error"),
        *("decode speed-up, predicted", "measured", "error"),
    ]
    return table(columns, shown, text_columns=4)


def _leviathan(results: dict[str, Any]) -> Section:
    title = "Leviathan's formula"
    rows = results["cost"]["leviathan"]
    if not rows:
        return not_measured(title)
    words = (
        "E[tokens] = (1 - alpha^(k+1)) / (1 - alpha) and speed-up = E[tokens] / (k c + 1), from one acceptance rate alpha and one "
        "cost ratio c taken at the smallest batch size. It does not know the batch size and stands here for comparison."
    )
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            number(row["alpha"], 3),
            number(row["cost_ratio"], 3),
            number(row["expected_tokens"], 3),
            number(row["tau"], 3),
            times(row["speedup"]),
        ]
        for row in rows
    ]
    columns = [*PLACE, "arm", "alpha", "c", "tokens per step, formula", "tau, measured", "speed-up, formula"]
    return Section(title, [words], [table(columns, shown, text_columns=3)])


def _oracle(results: dict[str, Any]) -> Section:
    title = "Oracle bound (simulated, not served)"
    rows = results["cost"]["oracle"]
    if not rows:
        return not_measured(title)
    words = (
        "An oracle that drafts exactly as many tokens as will be accepted, so that nothing is verified in vain: "
        f"{rows[0]['label']}. What lies between it and the best fixed k is all that a perfect choice of draft length could win."
    )
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            str(row["batch_size"]),
            number(row["drafts_per_step"]),
            times(row["speedup"]),
            f"{times(row['best_fixed_speedup'])} ({arm_label(results, row['best_fixed_arm'])})",
        ]
        for row in rows
    ]
    columns = [*PLACE, "trace of", "batch size", "drafts per step", "oracle, simulated", "best fixed k, decode steps"]
    return Section(title, [words], [table(columns, shown, text_columns=3)])
