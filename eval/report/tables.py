"""The tables of the performance part of the report."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Table, milliseconds, number, percent, table
from eyas.eval.report.words import DATASET_NAMES


def main_table(results: dict[str, Any]) -> Table:
    cells = results["cells"]
    rows = [
        [
            DATASET_NAMES[cell["dataset"]],
            cell["verdict"],
            str(cell["batch_size"]),
            str(cell["draft_length"]),
            number(cell["ar_tokens_per_second"], 1),
            number(cell["head_tokens_per_second"], 1),
            f"{cell['ratio']:.2f}x",
            f"{cell['interval'][0]:.2f} to {cell['interval'][1]:.2f}",
            number(cell["tau_step_weighted"]),
            str(cell["requests"]),
        ]
        for cell in cells
    ]
    columns = [
        "prompts",
        "verdict",
        "batch size",
        "k",
        "AR tok/s",
        "head tok/s",
        "ratio",
        "95 % interval",
        "tau",
        "requests",
    ]
    return table(columns, rows, text_columns=2, emphasised=[cell["verdict"] == "SLOWER" for cell in cells])


def reasons_table(results: dict[str, Any]) -> Table:
    rows = [
        [
            DATASET_NAMES[cell["dataset"]],
            cell["verdict"],
            cell["reason"],
            str(cell["batch_size"]),
            str(cell["draft_length"]),
        ]
        for cell in results["cells"]
    ]
    return table(["prompts", "verdict", "reason", "batch size", "k"], rows, text_columns=3, caption="Reasons")


def latency_table(results: dict[str, Any], quantity: str, *, unit: str, caption: str) -> Table:
    """Percentiles of one latency quantity; `unit` is "s" or "ms"."""
    show = milliseconds if unit == "ms" else number
    rows = []
    for row in results["latency"]:
        values = row[quantity] or {"mean": None, "p50": None, "p90": None, "p99": None}
        figures = [show(values[name]) for name in ("mean", "p50", "p90", "p99")]
        rows.append([DATASET_NAMES[row["dataset"]], row["arm"], str(row["batch_size"]), *figures])
    columns = ["prompts", "arm", "batch size", *(f"{name} [{unit}]" for name in ("mean", "p50", "p90", "p99"))]
    return table(columns, rows, text_columns=2, caption=caption)


def throughput_table(results: dict[str, Any]) -> Table:
    rows = [
        [
            DATASET_NAMES[row["dataset"]],
            row["arm"],
            str(row["batch_size"]),
            number(row["tokens_per_second"], 1),
            ", ".join(number(rate, 1) for rate in row["tokens_per_second_by_start"]),
            number(row["tokens_per_second_per_running_request"], 1),
            number(row["requests_per_second"]),
            number(row["mean_running"], 1),
            number(row["makespan"], 1),
            str(row["preemptions"]),
        ]
        for row in results["throughput"]
    ]
    columns = [
        *("prompts", "arm", "batch size", "tok/s", "by start", "tok/s per running request"),
        *("requests/s", "mean running", "makespan [s]", "preemptions"),
    ]
    return table(columns, rows, text_columns=2)


def outputs_table(results: dict[str, Any]) -> Table:
    rows = [
        [
            DATASET_NAMES[row["dataset"]],
            row["arm"],
            ", ".join(f"{reason} {count}" for reason, count in row["finish_reasons"].items()),
            str(row["batch_size"]),
            number(row["mean_prompt_tokens"], 1),
            number(row["mean_output_tokens"], 1),
        ]
        for row in results["latency"]
    ]
    columns = ["prompts", "arm", "ended by", "batch size", "prompt tokens (mean)", "output tokens (mean)"]
    return table(columns, rows, text_columns=3, caption="How answers ended")


def best_k_table(results: dict[str, Any]) -> Table:
    rows = [
        [
            DATASET_NAMES[row["dataset"]],
            "plain decoding" if row["draft_length"] == 0 else "head",
            str(row["batch_size"]),
            str(row["draft_length"]),
            number(row["tokens_per_second"], 1),
            "n/a" if row["ratio"] is None else f"{row['ratio']:.2f}x",
        ]
        for row in results["best_k"]
    ]
    return table(["prompts", "best arm", "batch size", "best k", "tok/s", "over AR"], rows, text_columns=2)


def null_table(results: dict[str, Any]) -> Table:
    rows = [
        [
            DATASET_NAMES[row["dataset"]],
            str(row["batch_size"]),
            ", ".join(number(rate, 1) for rate in row["tokens_per_second"]),
            "n/a" if row["spread"] is None else f"{row['spread']:.3f}x",
        ]
        for row in results["null"]
    ]
    return table(["prompts", "batch size", "AR tok/s by start", "fastest / slowest"], rows, text_columns=1)


def acceptance_table(results: dict[str, Any]) -> Table:
    rows = [
        [
            DATASET_NAMES[row["dataset"]],
            str(row["draft_length"]),
            number(row["tau_step_weighted"], 3),
            number(row["tau_request_mean"], 3),
            number(row["tau_without_loops"], 3),
            " / ".join(number(value) for value in row["tau_request_percentiles"] or []),
            percent(row["draft_acceptance_rate"]),
            str(row["steps"]),
            str(row["requests"]),
            str(row["batch_size"]),
        ]
        for row in results["acceptance"]
    ]
    columns = [
        *(
            "prompts",
            "k",
            "tau, step-weighted",
            "tau, request mean",
            "tau without loops",
            "per request p10 / p50 / p90",
        ),
        *("drafts accepted", "steps", "requests", "batch size"),
    ]
    return table(columns, rows, text_columns=1)


def positions_table(results: dict[str, Any]) -> Table:
    rows = []
    for row in results["acceptance"]:
        for index, marginal in enumerate(row["marginal"]):
            figures = [
                number(marginal, 4),
                number(row["conditional"][index], 4),
                number(row["tau_at_shorter_chains"][index], 3),
            ]
            rows.append([DATASET_NAMES[row["dataset"]], str(row["draft_length"]), str(index + 1), *figures])
    columns = ["prompts", "k", "position", "marginal", "conditional", "tau if the chain ended here"]
    return table(columns, rows, text_columns=1, caption="By position in the chain")


def histogram_table(results: dict[str, Any]) -> Table:
    longest = max((row["draft_length"] for row in results["acceptance"]), default=0)
    rows = [
        [
            DATASET_NAMES[row["dataset"]],
            str(row["draft_length"]),
            *(str(count) for count in row["histogram"]),
            *[""] * (longest - row["draft_length"]),
        ]
        for row in results["acceptance"]
    ]
    columns = ["prompts", "k", *(f"{count} accepted" for count in range(longest + 1))]
    return table(columns, rows, text_columns=1, caption="Steps by number of accepted tokens")


def reconciliation_table(results: dict[str, Any]) -> Table:
    rows = []
    for row in results["acceptance"]:
        tally = row["reconciliation"]
        residual = f"{tally['residual']} ({percent(tally['residual_share'])})"
        counted = [str(tally[name]) for name in ("output_tokens", "requests", "steps", "accepted")]
        engine = [str(row["counters"][name]) for name in ("num_drafts", "num_accepted_tokens")]
        rows.append([DATASET_NAMES[row["dataset"]], str(row["draft_length"]), *counted, residual, *engine])
    columns = [
        "prompts",
        "k",
        "output tokens",
        "requests",
        "steps",
        "accepted",
        "residual",
        "engine: drafts",
        "engine: accepted",
    ]
    return table(columns, rows, text_columns=1, caption="Reconciliation with the output")
