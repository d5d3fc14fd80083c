"""D: total latency, per-token latency, throughput and their ratios, each in a table of its own, under closed-loop load."""

from __future__ import annotations

from typing import Any

from eyas.eval import latency
from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.figures.latency import cdf_figures, frontier_figures
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.sections.open_loop import open_loop_section
from eyas.eval.report.values import MISSING, count, milliseconds, number, percent, span, times

TITLE = "D. Performance"
STATISTICS = ("mean", "p50", "p90", "p99")
PAIRED = (("tpot_ratio", "TPOT"), ("e2e_ratio", "total latency"), ("ttft_ratio", "TTFT"))


def performance_section(results: dict[str, Any]) -> Section:
    words = (
        "Four different quantities, never mixed: total latency, per-token latency, throughput, and the ratio to plain "
        "decoding. The load here is a closed loop; the open loop has its own part."
    )
    parts = [
        _total_latency(results),
        _token_latency(results),
        _throughput(results),
        _ratios(results),
        _answers(results),
        open_loop_section(results),
    ]
    return Section(TITLE, [words], parts=parts)


def _total_latency(results: dict[str, Any]) -> Section:
    words = f"{latency.E2E_FORMULA}. {latency.TTFT_FORMULA}. Over all requests of all starts of the arm."
    shown = [
        _latency_table(results, "e2e", unit="s", caption="Total latency (E2E)"),
        _latency_table(results, "ttft", unit="ms", caption="Time to first token (TTFT)"),
    ]
    return Section("Total latency", [words], shown, figures=cdf_figures(results))


def _token_latency(results: dict[str, Any]) -> Section:
    words = (
        "The chunk gap is the time between chunks of tokens as they leave the engine. With drafting a chunk holds several "
        "tokens, so it is not a per-token latency and must not be compared as one."
    )
    shown = [
        _latency_table(results, "tpot", unit="ms", caption="Per-token latency (TPOT)"),
        _latency_table(results, "chunk_gap", unit="ms", caption="Chunk gap"),
    ]
    return Section("Per-token latency", [latency.TPOT_FORMULA + ".", words], shown)


def _latency_table(results: dict[str, Any], quantity: str, *, unit: str, caption: str) -> Table:
    """Percentiles of one latency quantity; `unit` is "s" or "ms"."""
    show = milliseconds if unit == "ms" else number
    rows = []
    for row in results["latency"]:
        values = row[quantity] or dict.fromkeys(STATISTICS)
        figures = [show(values[name]) for name in STATISTICS]
        rows.append([*place(row), arm_label(results, row["arm"]), str(row["batch_size"]), *figures])
    columns = [*PLACE, "arm", "batch size", *(f"{name} [{unit}]" for name in STATISTICS)]
    return table(columns, rows, text_columns=3, caption=caption)


def _throughput(results: dict[str, Any]) -> Section:
    words = [
        latency.THROUGHPUT_FORMULA + ".",
        "Mean running: time average of requests in flight; it falls below the batch size when the last requests end. "
        "Harness: share of the wall time spent outside the engine's calls.",
    ]
    running = {(r["dataset"], r["temperature"], r["batch_size"], r["arm"]): r for r in results.get("running") or []}
    rows = []
    for row in results["throughput"]:
        logged = running.get((row["dataset"], row["temperature"], row["batch_size"], row["arm"]), {})
        rows.append(
            [
                *place(row),
                arm_label(results, row["arm"]),
                str(row["batch_size"]),
                number(row["tokens_per_second"], 1),
                ", ".join(number(rate, 1) for rate in row["tokens_per_second_by_start"]),
                number(row["tokens_per_second_per_running_request"], 1),
                number(row["requests_per_second"]),
                number(row["mean_running"], 1),
                number(logged.get("p50"), 0),
                number(row["makespan"], 1),
                count(row["preemptions"]),
                percent(row.get("harness_share"), 2),
            ]
        )
    columns = [
        *(*PLACE, "arm", "batch size", "tok/s", "by start", "tok/s per running request", "requests/s"),
        *("mean running", "running p50", "makespan [s]", "preemptions", "harness"),
    ]
    return Section("Throughput", words, [table(columns, rows, text_columns=3)], figures=frontier_figures(results))


def _ratios(results: dict[str, Any]) -> Section:
    if not results["cells"]:
        return not_measured("Ratios to plain decoding")
    words = (
        "Latencies: below 1 is faster than plain decoding; throughput: above 1. Intervals at 95 % resample starts, then "
        "blocks, then prompts. Total latency compares answers that may differ in length at temperature above 0; per-token "
        "latency does not."
    )
    rows = [
        [
            *place(cell),
            arm_label(results, cell["arm"]),
            str(cell["batch_size"]),
            _with_interval(cell),
            *(_with_interval(cell.get(key)) for key, _ in PAIRED),
        ]
        for cell in results["cells"]
    ]
    columns = [*PLACE, "arm", "batch size", "throughput", *(name for _, name in PAIRED)]
    return Section("Ratios to plain decoding", [words], [table(columns, rows, text_columns=3)])


def _with_interval(value: dict[str, Any] | None) -> str:
    return MISSING if value is None else f"{times(value['ratio'])} ({span(value['interval'])})"


def _answers(results: dict[str, Any]) -> Section:
    words = (
        "A looping answer repeats more than 30 % of its 8-grams. Loops are easy to draft and flatter acceptance; they are "
        "counted, not removed. length: the answer was cut at the limit of tokens; stop: it ended by itself."
    )
    loops = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            count(row["flagged"]),
            count(row["requests"]),
            percent(row["share"]),
        ]
        for row in results["loops"]
    ]
    ends = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            ", ".join(f"{reason} {n}" for reason, n in row["finish_reasons"].items()),
            str(row["batch_size"]),
            number(row["mean_prompt_tokens"], 1),
            number(row["mean_output_tokens"], 1),
        ]
        for row in results["latency"]
    ]
    shown = [
        table([*PLACE, "arm", "flagged", "answers", "share"], loops, text_columns=3, caption="Looping answers"),
        table(
            [*PLACE, "arm", "ended by", "batch size", "prompt tokens (mean)", "output tokens (mean)"],
            ends,
            text_columns=4,
            caption="How answers ended",
        ),
    ]
    return Section("Answers", [words], shown)
