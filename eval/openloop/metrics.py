"""What a server says of itself on /metrics: counters before and after a measurement, and gauges while it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "num_drafts": "vllm:spec_decode_num_drafts_total",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache": "vllm:kv_cache_usage_perc",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Snapshot:
    """One reading. A counter that the server does not have is 0; `per_position` maps a draft position to acceptances."""

    counters: dict[str, int]
    gauges: dict[str, float]
    per_position: dict[int, int]


def read_metrics(text: str) -> Snapshot:
    """Read the Prometheus text format; values of several engines behind one server are added up."""
    wanted = {*COUNTERS.values(), *GAUGES.values()}
    sums: dict[str, float] = {}
    positions: dict[int, int] = {}
    for match in map(_LINE.match, text.splitlines()):
        if match is None:
            continue
        name, value = match["name"], match["value"]
        if name in wanted:
            sums[name] = sums.get(name, 0.0) + float(value)
        elif name == PER_POSITION and (position := _POSITION.search(match["labels"] or "")):
            positions[int(position[1])] = positions.get(int(position[1]), 0) + int(float(value))
    counters = {name: int(sums.get(metric, 0)) for name, metric in COUNTERS.items()}
    gauges = {name: sums.get(metric, 0.0) for name, metric in GAUGES.items()}
    return Snapshot(counters, gauges, positions)


def counted(before: Snapshot, after: Snapshot) -> tuple[dict[str, int], list[int]]:
    """What happened between two readings: counters by name, and acceptances by draft position."""
    counters = {name: after.counters[name] - before.counters[name] for name in COUNTERS}
    return counters, _dense({at: count - before.per_position.get(at, 0) for at, count in after.per_position.items()})


def _dense(positions: Mapping[int, int]) -> list[int]:
    return [positions.get(at, 0) for at in range(max(positions, default=-1) + 1)]
