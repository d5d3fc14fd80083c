"""From raw records to results: every number of the report, as one JSON-able dict. Needs no engine and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.eval.acceptance import acceptance_summary, is_loop
from eyas.eval.grid import config_differences
from eyas.eval.latency import latency_summary, throughput
from eyas.eval.records import AR, CellRecord, StartRecord, cells_by_arm, draft_lengths
from eyas.eval.stats import LEVEL, bootstrap_ratio, geometric_mean, null_spread
from eyas.eval.verdict import Lossless, best_arm, judge

SCHEMA = 1
BOOTSTRAP_SEED = 20260101

Cells = dict[tuple[str, int], dict[str, list[CellRecord]]]

NOT_MEASURED = (
    "request-rate (open-loop) load; the load is a closed loop of a fixed number of running requests",
    "answer quality: the lossless check stands for it, by comparing outputs token by token",
    "sampled decoding, unless the protocol below says a temperature above 0",
    "other targets, other hardware, other engine modes, long contexts, other draft lengths",
    "how a step's time splits into drafting, verification and overhead",
)


def compute_results(
    starts: list[StartRecord],
    *,
    failures: list[dict[str, Any]],
    fidelity: dict[str, Any] | None,
    protocol: dict[str, Any],
    context: dict[str, Any],
) -> dict[str, Any]:
    """All results of a session.

    Args:
        starts: the finished starts.
        failures: starts that failed, as recorded.
        fidelity: fidelity.json, or None when the check has not run.
        protocol: protocol.json.
        context: context.json, stored unchanged.
    """
    cells, lengths = cells_by_arm(starts), draft_lengths(starts)
    requests = [request for start in starts for cell in start.cells for request in cell.requests]
    return {
        "schema": SCHEMA,
        "context": context,
        "protocol": protocol,
        "arms": lengths,
        "starts": {arm: sum(start.arm == arm for start in starts) for arm in lengths},
        "requests": len(requests),
        "output_tokens": sum(request.n_out for request in requests),
        "interval_level": LEVEL,
        "cells": compare_cells(cells, lengths, lossless=lossless_outcome(fidelity)),
        "null": ar_against_ar(cells),
        "best_k": best_draft_lengths(cells, lengths),
        "throughput": [_throughput_row(*key, arm, group) for key, arm, group in _walk(cells, lengths)],
        "latency": [_latency_row(*key, arm, group) for key, arm, group in _walk(cells, lengths)],
        "acceptance": acceptance_by_arm(cells, lengths),
        "loops": loops(cells, lengths),
        "fidelity": fidelity,
        "config_differences": config_differences(starts),
        "engines": _engines(starts),
        "failures": failures,
        "not_measured": list(NOT_MEASURED),
    }


def lossless_outcome(fidelity: dict[str, Any] | None) -> Lossless:
    if fidelity is None or fidelity["status"] != "done":
        return "not run"
    return "passed" if fidelity["lossless"]["passed"] else "failed"


def compare_cells(cells: Cells, lengths: Mapping[str, int], *, lossless: Lossless) -> list[dict[str, Any]]:
    """Every head arm against AR in every cell that both have: ratio, interval, tau, verdict."""
    rows = []
    for (dataset, batch_size), arms in cells.items():
        for arm in lengths:
            if arm == AR or AR not in arms or arm not in arms:
                continue
            row = {"dataset": dataset, "batch_size": batch_size, "arm": arm, "draft_length": lengths[arm]}
            rows.append(row | _compare(arms[AR], arms[arm], draft_length=lengths[arm], lossless=lossless))
    return rows


def _compare(
    plain: list[CellRecord], drafted: list[CellRecord], *, draft_length: int, lossless: Lossless
) -> dict[str, Any]:
    interval = bootstrap_ratio(plain, drafted, seed=BOOTSTRAP_SEED)
    spread = null_spread(plain)
    verdict = judge(interval, spread=spread, ar_starts=len(plain), head_starts=len(drafted), lossless=lossless)
    acceptance = acceptance_summary([r for cell in drafted for r in cell.requests], draft_length=draft_length)
    return {
        "requests": len(plain[0].requests),
        "ar_tokens_per_second": geometric_mean([throughput(cell) for cell in plain]),
        "head_tokens_per_second": geometric_mean([throughput(cell) for cell in drafted]),
        "ratio": interval.ratio,
        "interval": [interval.low, interval.high],
        "null_spread": spread,
        "tau_step_weighted": acceptance["tau_step_weighted"],
        "tau_request_mean": acceptance["tau_request_mean"],
        "verdict": verdict.word,
        "reason": verdict.reason,
    }


def ar_against_ar(cells: Cells) -> list[dict[str, Any]]:
    """Per cell: throughput of each AR start and fastest over slowest."""
    return [
        {
            "dataset": dataset,
            "batch_size": batch_size,
            "tokens_per_second": [throughput(cell) for cell in arms[AR]],
            "spread": null_spread(arms[AR]),
        }
        for (dataset, batch_size), arms in cells.items()
        if AR in arms
    ]


def best_draft_lengths(cells: Cells, lengths: Mapping[str, int]) -> list[dict[str, Any]]:
    """Per cell: the measured arm with the highest throughput, plain decoding (k = 0) included."""
    rows = []
    for (dataset, batch_size), arms in cells.items():
        rates = {arm: geometric_mean([throughput(cell) for cell in group]) for arm, group in arms.items()}
        best = best_arm(rates)
        ratio = rates[best] / rates[AR] if AR in rates else None
        row = {"dataset": dataset, "batch_size": batch_size, "arm": best, "draft_length": lengths[best]}
        rows.append(row | {"tokens_per_second": rates[best], "ratio": ratio})
    return rows


def acceptance_by_arm(cells: Cells, lengths: Mapping[str, int]) -> list[dict[str, Any]]:
    """Per dataset and head arm: acceptance in the cell with the most prompts, over all its starts.

    One cell and not all of them: smaller cells serve the first prompts of the larger ones, so pooling would count
    those prompts several times.
    """
    rows = []
    for dataset in dict.fromkeys(key[0] for key in cells):
        for arm, length in lengths.items():
            groups = {size: arms[arm] for (name, size), arms in cells.items() if name == dataset and arm in arms}
            if arm == AR or not groups:
                continue
            size = max(groups, key=lambda size: (len(groups[size][0].requests), size))
            requests = [request for cell in groups[size] for request in cell.requests]
            row = {"dataset": dataset, "arm": arm, "draft_length": length, "batch_size": size}
            rows.append(
                row | {"counters": _sum_counters(groups[size])} | acceptance_summary(requests, draft_length=length)
            )
    return rows


def loops(cells: Cells, lengths: Mapping[str, int]) -> list[dict[str, Any]]:
    """Per dataset and arm: share of answers flagged as looping, over all cells and starts."""
    rows = []
    for dataset in dict.fromkeys(key[0] for key in cells):
        for arm in lengths:
            groups = [arms[arm] for (name, _), arms in cells.items() if name == dataset and arm in arms]
            requests = [request for group in groups for cell in group for request in cell.requests]
            if requests:
                flagged = sum(is_loop(request) for request in requests)
                row = {"dataset": dataset, "arm": arm, "requests": len(requests), "flagged": flagged}
                rows.append(row | {"share": flagged / len(requests)})
    return rows


def _walk(cells: Cells, lengths: Mapping[str, int]) -> list[tuple[tuple[str, int], str, list[CellRecord]]]:
    return [(key, arm, arms[arm]) for key, arms in cells.items() for arm in lengths if arm in arms]


def _throughput_row(dataset: str, batch_size: int, arm: str, group: list[CellRecord]) -> dict[str, Any]:
    rates = [throughput(cell) for cell in group]
    answered = [len(cell.requests) / cell.makespan for cell in group]
    running = sum(cell.mean_running for cell in group) / len(group)
    rate = geometric_mean(rates)
    return {
        "dataset": dataset,
        "batch_size": batch_size,
        "arm": arm,
        "requests": len(group[0].requests),
        "tokens_per_second_by_start": rates,
        "tokens_per_second": rate,
        "tokens_per_second_per_running_request": rate / running,
        "requests_per_second": geometric_mean(answered),
        "mean_running": running,
        "makespan": sum(cell.makespan for cell in group) / len(group),
        "preemptions": sum(cell.counters["preemptions"] for cell in group),
    }


def _latency_row(dataset: str, batch_size: int, arm: str, group: list[CellRecord]) -> dict[str, Any]:
    requests = [request for cell in group for request in cell.requests]
    reasons = [request.finish_reason for request in requests]
    return {
        "dataset": dataset,
        "batch_size": batch_size,
        "arm": arm,
        **latency_summary(group),
        "mean_prompt_tokens": sum(request.n_in for request in requests) / len(requests),
        "mean_output_tokens": sum(request.n_out for request in requests) / len(requests),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


def _sum_counters(group: list[CellRecord]) -> dict[str, int]:
    return {name: sum(cell.counters[name] for cell in group) for name in group[0].counters}


def _engines(starts: list[StartRecord]) -> dict[str, Any]:
    """The resolved engine and machine of the first start of each arm, and each start's load average."""
    engines: dict[str, Any] = {}
    for start in starts:
        engine = engines.setdefault(start.arm, {**start.description, "load_averages": []})
        engine["load_averages"].append(start.description["machine"]["load_average_before"][0])
    return engines
