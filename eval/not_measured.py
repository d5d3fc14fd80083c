"""What a session did not measure, said in its report: a reader must not take silence for a result."""

from __future__ import annotations

from typing import Any

ALWAYS = (
    "answer quality by tasks: the losslessness ladder stands for it, by comparing outputs and their distributions",
    "other targets, other hardware, other versions and modes of the engine, longer contexts, other draft lengths",
)


def not_measured(results: dict[str, Any]) -> list[str]:
    """One line per part that this session left out or could not do."""
    protocol = results["protocol"]
    lines = []
    if not results["open_loop"]:
        lines.append("request-rate (open-loop) load; the load is a closed loop of a fixed number of running requests")
    if not any(temperature > 0 for temperature in protocol["temperatures"]):
        lines.append("sampled decoding: every temperature of the protocol is 0")
    lines += results["time_not_measured"]
    if results["schedule"] is None:
        lines.append("a schedule of draft lengths by batch size")
    if results["lossless"]["passed"] is None:
        lines.append(f"losslessness: {results['lossless']['status']}")
    failed = sorted({failure["arm"] for failure in results["failures"]} - {row["arm"] for row in results["throughput"]})
    lines += [f"arm {arm}: none of its starts left a record (see failures)" for arm in failed]
    return [*lines, *ALWAYS]
