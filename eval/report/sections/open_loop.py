"""Part of D: load by arrival rate against a real server."""

from __future__ import annotations

from typing import Any

from eyas.eval.latency import MIN_FOR_P99
from eyas.eval.openloop.latency import FORMULAS
from eyas.eval.openloop.rates import SATURATION_RULE
from eyas.eval.openloop.rows import CLIENT_RULE, highest_sustained
from eyas.eval.records import AR
from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.figures.open_loop import open_loop_figures
from eyas.eval.report.names import arm_label, dataset_name
from eyas.eval.report.values import MISSING, count, listing, milliseconds, number, percent, span, times

TITLE = "Open loop: requests that arrive on their own"
Row = dict[str, Any]


def open_loop_section(results: dict[str, Any]) -> Section:
    rows = results.get("open_loop") or []
    if not rows:
        return not_measured(TITLE, "The load was a closed loop only.")
    served = [row for row in rows if row["starts"]]
    if not served:
        return Section(TITLE, ["No rate was served to its end by any arm."], alerts=_alerts(results, rows))
    goodput = served[0]["goodput"]
    words = [
        "Poisson arrivals at a real `vllm serve`, streamed by a client on the same machine. Latency counts from the scheduled "
        "arrival, so waiting for a slow server or client is in it.",
        _what_was_asked(served[0]),
        f"Service levels: TTFT at most {number(goodput['slo_ttft_ms'], 0)} ms and TPOT at most {number(goodput['slo_tpot_ms'], 0)} "
        f"ms; goodput counts answers that meet both. {CLIENT_RULE}",
        SATURATION_RULE,
    ]
    tables = [
        _summary(results, rows),
        _latency(results, served),
        *_ratios(results, served),
        _delivered(results, served),
        _queueing(results, served),
    ]
    bullets = [f"{formula}." for formula in FORMULAS.values()]
    return Section(
        TITLE, words, tables, bullets=bullets, figures=open_loop_figures(results, served), alerts=_alerts(results, rows)
    )


def _what_was_asked(row: Row) -> str:
    ends = "the end of an answer ignored" if row["fixed_length"] else "answers end by themselves"
    return (
        f"Prompts: {dataset_name(row['dataset'])}, {row['prompts']} independent ones, each served once per rate and start; temperature "
        f"{row['temperature']:g}, {row['max_tokens']} tokens at most, {ends}."
    )


def _alerts(results: dict[str, Any], rows: list[Row]) -> list[str]:
    found = []
    served = [row for row in rows if row["starts"]]
    if served and served[0]["requests"] < served[0]["wanted"] * served[0]["starts"]:
        found.append(
            f"The open loop had {served[0]['requests'] // served[0]['starts']} prompts of the {served[0]['wanted']} that were asked "
            "for; none was repeated."
        )
    for row in rows:
        where = f"{arm_label(results, row['arm'])} at {row['rate']:g} requests/s"
        found += [f"{where}, start {lost['start']}: no result ({lost['reason']})." for lost in row["failed_cells"]]
        if row.get("failures"):
            failed = sum(row["failures"].values())
            why = listing([f"{reason}: {n}" for reason, n in row["failures"].items()])
            found.append(
                f"{where}: {failed} of {row['requests']} requests failed ({why}). Its latencies are those of the others, and "
                "there is no ratio."
            )
        if (row.get("client") or {}).get("too_slow"):
            found.append(f"{where}: the client was too slow; its latencies are too long.")
        if row.get("synthetic"):
            found.append(f"{where}: synthetic acceptance, no result.")
    for arm, why in {row["arm"]: row["void"] for row in rows if row.get("void")}.items():
        found.append(f"{arm_label(results, arm)} is not comparable with plain decoding in the open loop: {why}.")
    return found


def _summary(results: dict[str, Any], rows: list[Row]) -> Table:
    shown = [
        [
            arm_label(results, row["arm"]),
            number(row["highest_sustained_rate"]),
            number(row["lowest_saturated_rate"]),
            number(row["best_goodput"]),
        ]
        for row in highest_sustained(rows)
    ]
    columns = ["arm", "sustained up to", "saturated from", "best goodput"]
    return table(columns, shown, text_columns=1, caption="Rates in requests per second")


def _latency(results: dict[str, Any], rows: list[Row]) -> Table:
    shown = [
        [
            arm_label(results, row["arm"]),
            f"{row['rate']:g}",
            row["load"] or MISSING,
            *(_percentiles(row[name], unit="s") for name in ("ttft", "e2e")),
            *(_percentiles(row[name], unit="ms") for name in ("tpot", "chunk_gap")),
            f"{count(row['answered'])} ({count(row['prompts'])})",
        ]
        for row in rows
    ]
    columns = [
        *("arm", "arrivals [1/s]", "load", "TTFT [s]", "total latency [s]", "TPOT [ms]", "chunk gap [ms]"),
        "answers (prompts)",
    ]
    return table(
        columns,
        shown,
        text_columns=3,
        caption=(
            f"Latency: p50 / p90 / p99. No p99 below {MIN_FOR_P99} independent prompts: it would be the slowest of them"
        ),
    )


def _ratios(results: dict[str, Any], rows: list[Row]) -> list[Table]:
    """Every arm at every rate beside plain decoding, or why it is not; no table without another arm."""
    others = [row for row in rows if row["arm"] != AR]
    told_why = any(row["no_ratio"] for row in others)
    shown = [
        [
            arm_label(results, row["arm"]),
            f"{row['rate']:g}",
            *([row["no_ratio"] or ""] if told_why else []),
            *(_ratio((row["ratio_to_ar"] or {}).get(name)) for name in ("throughput", "ttft", "tpot", "e2e")),
        ]
        for row in others
    ]
    texts = ["arm", "arrivals [1/s]", *(["no ratio because"] if told_why else [])]
    caption = "Ratios to plain decoding, of means over starts, with 95 % intervals"
    columns = [*texts, "throughput", "TTFT", "TPOT", "total latency"]
    return [table(columns, shown, text_columns=len(texts), caption=caption)] if shown else []


def _percentiles(values: dict[str, float] | None, *, unit: str) -> str:
    if values is None:
        return MISSING
    show = milliseconds if unit == "ms" else number
    return " / ".join(show(values[name]) for name in ("p50", "p90", "p99"))


def _ratio(value: Row | None) -> str:
    if value is None:
        return MISSING
    return (
        times(value["ratio"]) if value["interval"] is None else f"{times(value['ratio'])} ({span(value['interval'])})"
    )


def _delivered(results: dict[str, Any], rows: list[Row]) -> Table:
    shown = [
        [
            arm_label(results, row["arm"]),
            f"{row['rate']:g}",
            number(row["tokens_per_second"], 1),
            number(row["goodput"]["requests_per_second"]),
            percent(row["goodput"]["share"]),
            " / ".join(number(row["rates"][name]) for name in ("scheduled", "sent", "answered")),
            f"{count(row['answered'])} of {count(row['requests'])}",
            listing([f"{reason} {n}" for reason, n in row["failures"].items()]) or "none",
            number((row["acceptance"] or {}).get("tau_engine"), 3),
            str(row["starts"]),
        ]
        for row in rows
    ]
    columns = [
        *("arm", "arrivals [1/s]", "tok/s", "goodput [1/s]", "goodput share"),
        *("rate scheduled / sent / answered", "answered", "failures", "tau, engine", "starts"),
    ]
    return table(columns, shown, text_columns=2, caption="What was delivered")


def _queueing(results: dict[str, Any], rows: list[Row]) -> Table:
    shown = [
        [
            arm_label(results, row["arm"]),
            f"{row['rate']:g}",
            *(
                _percentiles(row["queueing"][name], unit="ms")
                for name in ("client_lag", "connection_wait", "server_queue")
            ),
            number(row["queueing"]["waiting_max"], 0),
            _percentiles(row["running"]["sampled"], unit="s"),
            number(row["running"]["under_way"], 1),
            percent(row["running"]["kv_cache_max"]),
            count(row["preemptions"]),
        ]
        for row in rows
    ]
    columns = [
        *(
            "arm",
            "arrivals [1/s]",
            "client lag [ms]",
            "wait for a connection [ms]",
            "server queue [ms]",
            "most waiting",
        ),
        *("running", "under way (mean)", "KV cache, most", "preemptions"),
    ]
    return table(columns, shown, text_columns=2, caption="Where requests waited: p50 / p90 / p99")
