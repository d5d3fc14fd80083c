"""Part of G: the fitted form, its constants, and its residuals."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.values import MISSING, listing, milliseconds, number, percent, significant


def fit_section(results: dict[str, Any]) -> Section:
    rules = results["cost"]["rules"]
    words = (
        "Three forms of a step's time were tried: linear in tokens and sequences; the same with the first N* tokens free "
        f"(roofline); straight lines between each arm's points (piecewise). Chosen: {rules['form']}. Constants in milliseconds: "
        "step, the fixed cost; token, one more token; sequence, one more request; draft, drafting a chain."
    )
    return Section("Fit and residuals", [words], [_fits(results), _forms(results), _residuals(results)])


def _fits(results: dict[str, Any]) -> Table:
    rows = [
        [
            *place(row),
            row["form"],
            _constants(results, row["constants"]),
            listing([str(size) for size in row["fitted_batch_sizes"]]),
            listing([str(size) for size in row["held_out_batch_sizes"]]) or "none",
            percent(row["start_sd"]),
        ]
        for row in results["cost"]["fit"]
    ]
    columns = [*PLACE, "form", "constants [ms]", "fitted on", "held out", "sd of a start"]
    return table(columns, rows, text_columns=6)


def _constants(results: dict[str, Any], constants: dict[str, float] | None) -> str:
    if constants is None:
        return MISSING
    parts = []
    for name, value in constants.items():
        what, _, arm = name.partition(":")
        label = f"{what} {arm_label(results, arm)}" if arm else what.replace("_", " ")
        parts.append(f"{label} {number(value, 0) if name == 'free_tokens' else significant(1000 * value)}")
    return ", ".join(parts)


def _forms(results: dict[str, Any]) -> Table:
    rows = [
        [
            *place(fit),
            form["form"],
            "yes" if form["chosen"] else "no",
            percent(form["left_out_error"]),
            percent(form["held_out_error"]),
        ]
        for fit in results["cost"]["fit"]
        for form in fit["forms"]
    ]
    columns = [*PLACE, "form", "chosen", "error in the choice", "error at held-out sizes"]
    return table(columns, rows, text_columns=4, caption="Forms")


def _residuals(results: dict[str, Any]) -> Table:
    rows = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            "held out" if row["held_out"] else "fitted",
            str(row["batch_size"]),
            milliseconds(row["measured_seconds"]),
            milliseconds(row["predicted_seconds"]),
            percent(row["relative_error"]),
        ]
        for row in results["cost"]["residuals"]
    ]
    columns = [*PLACE, "arm", "in the model", "batch size", "step, measured [ms]", "step, predicted [ms]", "residual"]
    return table(columns, rows, text_columns=4, caption="Residuals of step times")
