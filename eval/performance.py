"""Throughput, latency and running batch of every cell and arm, the fastest arm of each cell, and looping answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eyas.eval.acceptance.loops import is_loop
from eyas.eval.latency import latency_summary, throughput
from eyas.eval.lengths import length_rows
from eyas.eval.records import AR, ArmFacts, Blocks, CellKey, CellRecord, Cells, Phase
from eyas.eval.stats import geometric_mean
from eyas.eval.verdict import best_arm

Place = tuple[CellKey, str, list[Blocks]]


def performance_results(phases: Mapping[Phase, Cells], arms: Mapping[str, ArmFacts]) -> dict[str, list[dict[str, Any]]]:
    """All that results.json holds about speed itself; comparisons between arms are the verdict's.

    Every row names its phase: the schedule is measured after the grid, beside starts of plain decoding of its own, and
    numbers of two phases do not stand beside each other.
    """
    places = [({"phase": phase}, place) for phase, cells in phases.items() for place in _walk(cells, arms)]
    return {
        "best_k": [{"phase": "grid"} | row for row in best_draft_lengths(phases.get("grid", {}), arms)],
        "throughput": [phase | _place(key, arm) | throughput_row(starts) for phase, (key, arm, starts) in places],
        "latency": [phase | _place(key, arm) | latency_row(starts) for phase, (key, arm, starts) in places],
        "running": [phase | _place(key, arm) | running_row(starts) for phase, (key, arm, starts) in places],
        "loops": [{"phase": phase} | row for phase, cells in phases.items() for row in loop_rows(cells, arms)],
        "lengths": [{"phase": phase} | row for phase, cells in phases.items() for row in length_rows(cells, arms)],
    }


def _walk(cells: Cells, arms: Mapping[str, ArmFacts]) -> Iterator[Place]:
    for key, by_arm in cells.items():
        for arm in arms:
            if arm in by_arm:
                yield key, arm, by_arm[arm]


def _place(key: CellKey, arm: str) -> dict[str, Any]:
    return {**key._asdict(), "arm": arm}


def start_throughput(blocks: Sequence[CellRecord]) -> float:
    """Output tokens per second of a cell in one start: geometric mean over its blocks."""
    return geometric_mean([throughput(block) for block in blocks])


def throughput_row(starts: Sequence[Blocks]) -> dict[str, Any]:
    """Throughput of one arm in one cell: per start, over all starts, per running request; preemptions; harness share."""
    blocks = [block for start in starts for block in start]
    rates = [start_throughput(start) for start in starts]
    running = _mean([block.mean_running for block in blocks])
    rate = geometric_mean(rates)
    return {
        "requests": len(starts[0][0].requests),
        "tokens_per_second_by_start": rates,
        "tokens_per_second": rate,
        "tokens_per_second_per_running_request": rate / running,
        "requests_per_second": geometric_mean([len(block.requests) / block.makespan for block in blocks]),
        "mean_running": running,
        "makespan": _mean([block.makespan for block in blocks]),
        "preemptions": sum(block.counters["preemptions"] for block in blocks),
        "harness_share": sum(block.harness_seconds for block in blocks) / sum(block.makespan for block in blocks),
    }


def latency_row(starts: Sequence[Blocks]) -> dict[str, Any]:
    """The four latencies, prompt and answer lengths and finish reasons, over all requests of all starts."""
    blocks = [block for start in starts for block in start]
    requests = [request for block in blocks for request in block.requests]
    reasons = [request.finish_reason for request in requests]
    return {
        **latency_summary(blocks),
        "mean_prompt_tokens": _mean([request.n_in for request in requests]),
        "mean_output_tokens": _mean([request.n_out for request in requests]),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


def running_row(starts: Sequence[Blocks]) -> dict[str, Any]:
    """The batch that really ran, weighted by the seconds of each step; requests that the engine let wait are not in it.

    `at_nominal` is the share of the time at which the full batch ran; `held_back_steps` counts steps in which a submitted
    request waited, so that a smaller batch ran than was asked for.
    """
    blocks = [block for start in starts for block in start]
    steps = sorted((step.running, step.seconds) for block in blocks for step in block.steps)
    seconds = np.array([each[1] for each in steps])
    reached = np.cumsum(seconds) / seconds.sum()
    nominal = blocks[0].batch_size
    return {
        "mean": float(np.average([running for running, _ in steps], weights=seconds)),
        "p10": steps[int(np.searchsorted(reached, 0.1))][0],
        "p50": steps[int(np.searchsorted(reached, 0.5))][0],
        "max": steps[-1][0],
        "at_nominal": float(sum(each[1] for each in steps if each[0] >= nominal) / seconds.sum()),
        "held_back_steps": sum(block.counters.get("held_back_steps", 0) for block in blocks),
        "steps": len(steps),
    }


def best_draft_lengths(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """Per cell: the fastest measured arm, plain decoding (k = 0) included; what nobody would serve is no candidate.

    That is arms whose acceptance is made up, and controls: plain decoding under another name.
    """
    rows = []
    for key, by_arm in cells.items():
        rates = {
            arm: geometric_mean([start_throughput(start) for start in by_arm[arm]])
            for arm, facts in arms.items()
            if arm in by_arm and not facts.synthetic and (arm == AR or facts.speculative_config is not None)
        }
        if not rates:
            continue
        best = best_arm(rates)
        ratio = rates[best] / rates[AR] if AR in rates else None
        row = _place(key, best) | {"draft_length": arms[best].draft_length}
        rows.append(row | {"tokens_per_second": rates[best], "ratio": ratio})
    return rows


def loop_rows(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """Per dataset, temperature and arm: share of answers flagged as looping, over all batch sizes and starts."""
    rows = []
    for dataset, temperature in dict.fromkeys((key.dataset, key.temperature) for key in cells):
        for arm in arms:
            requests = [
                request
                for key, name, starts in _walk(cells, arms)
                if (key.dataset, key.temperature, name) == (dataset, temperature, arm)
                for start in starts
                for block in start
                for request in block.requests
            ]
            if requests:
                flagged = sum(is_loop(request) for request in requests)
                row = {"dataset": dataset, "temperature": temperature, "arm": arm, "requests": len(requests)}
                rows.append(row | {"flagged": flagged, "share": flagged / len(requests)})
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
