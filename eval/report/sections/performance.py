"""D: total latency, per-token latency, throughput and their ratios, each in a table of its own, under closed-loop load."""

from __future__ import annotations

from typing import Any

from eyas.eval import latency
from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.figures.latency import cdf_figures, frontier_figures
from eyas.eval.report.names import PLACE, arm_label, by_phase, place
from eyas.eval.report.sections.answers import answers_section
from eyas.eval.report.sections.open_loop import open_loop_section
from eyas.eval.report.values import MISSING, count, milliseconds, number, percent, span, times

TITLE = "D. Performance"
STATISTICS = ("mean", "p50", "p90", "p99")
RARE = (
    f"n: answers. A p99 needs {latency.MIN_FOR_P99} independent prompts; of fewer it would be about the slowest of them, so none "
    "is given."
)
PAIRED = (("tpot_ratio", "TPOT"), ("e2e_ratio", "total latency"), ("ttft_ratio", "TTFT"))


def performance_section(results: dict[str, Any]) -> Section:
    words = (
        "Four different quantities, never mixed: total latency, per-token latency, throughput, and the ratio to plain "
        "decoding. The load here is a closed loop; the open loop has its own part. The schedule is measured after the grid, "
        "beside starts of plain decoding of its own: its phase has tables of its own, because absolute numbers of two times "
        "do not compare."
    )
    parts = [
        _total_latency(results),
        _token_latency(results),
        _throughput(results),
        _ratios(results),
        answers_section(results),
        open_loop_section(results),
    ]
    return Section(TITLE, [words], parts=parts)


def _total_latency(results: dict[str, Any]) -> Section:
    words = f"{latency.E2E_FORMULA}. {latency.TTFT_FORMULA}. Over all requests of all starts of the arm. {RARE}"
    shown = [
        *_latency_tables(results, "e2e", unit="s", caption="Total latency (E2E)"),
        *_latency_tables(results, "ttft", unit="ms", caption="Time to first token (TTFT)"),
    ]
    return Section("Total latency", [words], shown, figures=cdf_figures(results))


def _token_latency(results: dict[str, Any]) -> Section:
    words = (
        "The chunk gap is the time between chunks of tokens as they leave the engine. With drafting a chunk holds several "
        "tokens, so it is not a per-token latency and must not be compared as one."
    )
    shown = [
        *_latency_tables(results, "tpot", unit="ms", caption="Per-token latency (TPOT)"),
        *_latency_tables(results, "chunk_gap", unit="ms", caption="Chunk gap"),
    ]
    return Section("Per-token latency", [f"{latency.TPOT_FORMULA}. {RARE}", words], shown)


def _latency_tables(results: dict[str, Any], quantity: str, *, unit: str, caption: str) -> list[Table]:
    """Percentiles of one latency quantity by phase; `unit` is "s" or "ms"."""
    show = milliseconds if unit == "ms" else number
    found = []
    for mine, caption_of_phase in by_phase(results["latency"], caption):
        rows = []
        for row in mine:
            values = row[quantity] or dict.fromkeys(("n", *STATISTICS))
            figures = [show(values[name]) for name in STATISTICS]
            place_of_row = [*place(row), arm_label(results, row["arm"]), str(row["batch_size"])]
            rows.append([*place_of_row, count(values["n"]), *figures])
        columns = [*PLACE, "arm", "batch size", "n", *(f"{name} [{unit}]" for name in STATISTICS)]
        found.append(table(columns, rows, text_columns=3, caption=caption_of_phase))
    return found


def _throughput(results: dict[str, Any]) -> Section:
    words = [
        latency.THROUGHPUT_FORMULA + ".",
        "Mean running: time average of the requests inside the engine; it falls below the batch size when the last requests "
        "end. Full batch: share of the time in which the whole batch ran. Waited: steps after which a submitted request still "
        "waited for the engine. Harness: share of the wall time spent outside the engine's calls.",
    ]
    shown = [
        _throughput_table(results, mine, caption=caption)
        for mine, caption in by_phase(results["throughput"], "Throughput")
    ]
    return Section("Throughput", words, shown, figures=frontier_figures(results))


def _throughput_table(results: dict[str, Any], mine: list[dict[str, Any]], *, caption: str) -> Table:
    running = {_key(row): row for row in results["running"]}
    rows = []
    for row in mine:
        logged = running[_key(row)]
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
                percent(logged["at_nominal"], 0),
                count(logged["held_back_steps"]),
                number(row["makespan"], 1),
                count(row["preemptions"]),
                percent(row["harness_share"], 2),
            ]
        )
    columns = [
        *(*PLACE, "arm", "batch size", "tok/s", "by start", "tok/s per running request", "requests/s"),
        *("mean running", "full batch", "waited", "makespan [s]", "preemptions", "harness"),
    ]
    return table(columns, rows, text_columns=3, caption=caption)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("phase", "dataset", "temperature", "batch_size", "arm"))


def _ratios(results: dict[str, Any]) -> Section:
    if not results["cells"]:
        return not_measured("Ratios to plain decoding")
    words = (
        "Latencies: below 1 is faster than plain decoding; throughput: above 1. Each arm against the AR starts of its own "
        "phase. Intervals at 95 % resample starts, and prompts jointly in all of them; blocks are drawn only where no arm has "
        "a second start. Total latency compares answers that may differ in length at temperature above 0; per-token latency "
        "does not."
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
