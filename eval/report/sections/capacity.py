"""Part of F: which steps a captured graph covers, and what a head takes from the KV cache."""

from __future__ import annotations

from typing import Any

from eyas.eval.records import AR
from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.names import arm_label
from eyas.eval.report.values import MISSING, count, number, percent

TITLE = "Graphs and memory"
GRAPH_WORDS = (
    "A decode step of B requests with k drafts reads B (k + 1) tokens. FULL: one captured graph runs it; PIECEWISE: graphs between "
    "the attention calls; eager: no graph covers so many tokens, so every kernel is launched by the host. By the resolved "
    "configuration and the rule of vLLM 0.32, not observed step by step; for methods other than a head, at their longest draft."
)
MEMORY_WORDS = (
    "KV cache: tokens of context that the engine has room for. A head's own layers keep a cache too, and its weights take "
    "memory: what it has less than AR is context, or requests, that no longer fit."
)


def capacity_section(results: dict[str, Any]) -> Section:
    cost = results.get("cost") or {}
    graphs = [row for row in cost.get("graphs") or [] if row["graph"] is not None]
    memory = [row for row in cost.get("memory") or [] if row["kv_tokens"] is not None]
    if not graphs and not memory:
        return not_measured(TITLE, "The resolved configuration of these starts does not tell.")
    words = [GRAPH_WORDS] if graphs else []
    if graphs and all(row["graph"] == "eager" for row in graphs):
        words.append("Here every step of every arm runs eagerly: no graph is captured (a CPU, or enforce_eager).")
    words += [MEMORY_WORDS] if memory else []
    tables = ([_graphs(results, graphs)] if graphs else []) + ([_memory(results, memory)] if memory else [])
    return Section(TITLE, words, tables, alerts=_alerts(results, graphs))


def _alerts(results: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Drafting that leaves the graphs where plain decoding does not: the cost is one of k, not of the head."""
    plain = {row["batch_size"]: row["graph"] for row in rows if row["draft_length"] == 0 and row["arm"] == AR}
    left = [
        f"{arm_label(results, row['arm'])} at {row['batch_size']}"
        for row in rows
        if row["graph"] == "eager" and plain.get(row["batch_size"], "eager") != "eager"
    ]
    if not left:
        return []
    return [
        f"No captured graph covers decode steps where plain decoding has one: {', '.join(left)} (arm at batch size). A larger "
        "cudagraph_capture_sizes may make these arms faster than was measured."
    ]


def _graphs(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    by_place = {(row["batch_size"], row["arm"]): row for row in rows}
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    shown = [
        [str(size), *(_graph(by_place[size, arm]) if (size, arm) in by_place else MISSING for arm in arms)]
        for size in sizes
    ]
    columns = ["batch size", *(arm_label(results, arm) for arm in arms)]
    return table(columns, shown, text_columns=0, caption="What covers a decode step (tokens of it)", matrix=True)


def _graph(row: dict[str, Any]) -> str:
    return f"{row['graph']} ({count(row['tokens'])})"


def _memory(results: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    shown = [
        [
            arm_label(results, row["arm"]),
            count(row["kv_tokens"]),
            count(row["kv_tokens_lost"]),
            percent(row["kv_share_lost"]),
            MISSING if row["head_bytes"] is None else number(row["head_bytes"] / 2**20, 1),
        ]
        for row in rows
    ]
    columns = ["arm", "KV cache [tokens]", "less than AR [tokens]", "less than AR", "head's files [MiB]"]
    return table(columns, shown, text_columns=1, caption="Memory")
