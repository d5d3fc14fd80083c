"""What a session did not measure, said in its report: a reader must not take silence for a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HELDOUT = "heldout"

ALWAYS = (
    "answer quality by tasks: the losslessness ladder stands for it, by comparing outputs and their distributions",
    "other targets, other hardware, other versions and modes of the engine, longer contexts, other draft lengths",
)


def not_measured(results: dict[str, Any]) -> list[str]:
    """One line per part that this session left out or could not do."""
    protocol = results["protocol"]
    lines = _beyond_open_loop(results)
    if not any(temperature > 0 for temperature in protocol["temperatures"]):
        lines.append("sampled decoding: every temperature of the protocol is 0")
    lines += [*results["time_not_measured"], *_beyond_time_split(results)]
    if results["schedule"] is None:
        lines.append("a schedule of draft lengths by batch size")
    lines += _beyond_ladder(results, results["lossless"])
    failed = sorted({failure["arm"] for failure in results["failures"]} - {row["arm"] for row in results["throughput"]})
    lines += [f"arm {arm}: none of its starts left a record (see failures)" for arm in failed]
    return [*lines, *ALWAYS]


def _beyond_ladder(results: dict[str, Any], lossless: dict[str, Any]) -> list[str]:
    """What the losslessness ladder did not decide, and cells whose losslessness rests on it by inference only."""
    if lossless["status"] == "not run":
        return [f"losslessness: {lossless['why']}"]
    protocol, head = results["protocol"], "losslessness by inference only"
    lines = _undecided_arms(results, lossless)
    if protocol["dtype"] != lossless["dtype"]:
        lines.append(
            f"{head}: in {protocol['dtype']}, as the cells ran; the ladder's engines ran in {lossless['dtype']}"
        )
    others = [name for name in protocol["prompt_sets"] if name != HELDOUT]
    if others:
        lines.append(f"{head}: on {_listed(others)}; the ladder serves held-out prompts")
    lines += _beyond_sampled_levels(protocol["temperatures"], lossless, head=head)
    batch = lossless["L1"].get("batch_size")
    larger = [size for size in protocol["batch_sizes"] if batch is not None and size > batch]
    if larger:
        lines.append(f"{head}: at batch size {_listed(larger)}; the ladder's largest batch is {batch}")
    if protocol["max_tokens"] > lossless["max_tokens"]:
        lines.append(f"{head}: behind token {lossless['max_tokens']} of an answer, where the ladder's answers end")
    if lossless["quantised"]:
        lines.append(
            "whether differing greedy answers of the quantised target are ties: no forward but the engine's own could say"
        )
    return lines


def _beyond_sampled_levels(temperatures: Sequence[float], lossless: dict[str, Any], *, head: str) -> list[str]:
    """Temperatures above 0 at which L3 and L4 did not sample."""
    level, hot = lossless["L3"], [each for each in temperatures if each > 0]
    if level["status"] != "done":
        return [f"losslessness at temperature {_listed(hot)}: {level['why']}"] if hot else []
    others = [each for each in hot if each != lossless["temperature"]]
    return (
        [f"{head}: at temperature {_listed(others)}; L3 and L4 sampled at {lossless['temperature']:g}"]
        if others
        else []
    )


def _undecided_arms(results: dict[str, Any], lossless: dict[str, Any]) -> list[str]:
    """Arms that draft in earnest and of which the ladder says nothing, or not all that was asked."""
    covered = {name for row in lossless["arms"] for name in row["stands_for"]}
    lines = [
        f"losslessness of {row['arm']}: undecided, see section H" for row in lossless["arms"] if row["passed"] is None
    ]
    missed = [
        name
        for name, facts in results["arms"].items()
        if facts["speculative_config"] is not None and not facts["synthetic"] and name not in covered
    ]
    return lines + [f"losslessness of {name}: the ladder did not serve it" for name in missed]


def _beyond_open_loop(results: dict[str, Any]) -> list[str]:
    rows = results["open_loop"]
    if not rows:
        return ["request-rate (open-loop) load; the load is a closed loop of a fixed number of running requests"]
    return [f"request-rate load {where}" for where in _elsewhere(results, rows)]


def _beyond_time_split(results: dict[str, Any]) -> list[str]:
    """The time split is of a part of the session only."""
    rows = results["time_split"]
    if not rows:
        return []
    timed = {row["arm"] for row in rows}
    without = [arm for arm in results["arms"] if arm not in timed]
    lines = [f"where the time goes {where}" for where in _elsewhere(results, rows)]
    lines.append("where the time goes in more than one start of an arm")
    return [*lines, *([f"where the time goes in these arms: {_listed(without)}"] if without else [])]


def _elsewhere(results: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A clause when the session measured prompts or temperatures that `rows` do not have."""
    served = dict.fromkeys((row["dataset"], row["temperature"]) for row in rows)
    every = {(row["dataset"], row["temperature"]) for row in results["protocol"]["requests"]}
    if every <= set(served):
        return []
    places = _listed([f"{dataset} at temperature {temperature:g}" for dataset, temperature in served])
    return [f"on other prompts and temperatures than {places}"]


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
