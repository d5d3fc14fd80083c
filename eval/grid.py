"""The experiment: which arms start in which order, and what the configurations of the arms differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.eval.launch import Launcher
from eyas.eval.plan import StartPlan
from eyas.eval.records import AR, StartRecord
from eyas.heads.files import read_json

FORCED = {
    "observability_config.per_request_spec_decode_metrics": "vLLM refuses the metrics without a head",
    "scheduler_config.max_num_scheduled_tokens": "set only when tokens are drafted",
    "scheduler_config.async_scheduling": "chosen by vLLM per speculative method",
    "cache_config.num_gpu_blocks": "the head's own KV cache takes its share",
    "cache_config.kv_cache_size_tokens": "the head's own KV cache takes its share",
    "cache_config.kv_cache_max_concurrency": "the head's own KV cache takes its share",
}
"""Differences between arms that follow from serving a head at all, and why."""


@dataclass(frozen=True)
class Arm:
    """One engine configuration. `draft_length` 0 and no `speculative_config` is plain decoding (AR)."""

    name: str
    speculative_config: dict[str, Any] | None
    draft_length: int


def order_of_starts(arms: Sequence[Arm], *, starts_per_arm: int) -> list[Arm]:
    """Forwards, backwards, forwards, ...: ar k3 k1 | k1 k3 ar | ...

    A machine that slows down steadily during an even number of rounds harms every arm alike.
    """
    rounds = [list(arms) if number % 2 == 0 else list(reversed(arms)) for number in range(starts_per_arm)]
    return [arm for one_round in rounds for arm in one_round]


def run_grid(directory: Path, *, plan: StartPlan, order: Sequence[Arm], launcher: Launcher) -> int:
    """Run every start of `order` with `plan`'s engine settings and cells; returns the number of finished starts.

    Starts that are complete are skipped. A start that crashes or runs out of time is recorded and left out.

    Raises:
        ValueError: no start of AR, or no start of any head arm, finished; names a log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stems = [directory / f"{number:03d}-{arm.name}" for number, arm in enumerate(order)]
    _remove_other_starts(directory, stems)
    finished: list[str] = []
    failed: dict[str, Path] = {}
    for number, (arm, stem) in enumerate(zip(order, stems, strict=True)):
        arm_plan = replace(plan, arm=arm.name, start=number, speculative_config=arm.speculative_config)
        if launcher.run(arm_plan, stem):
            finished.append(arm.name)
        else:
            failed[arm.name] = stem.with_suffix(".log")
    _require_both_sides(finished, failed)
    return len(finished)


def _remove_other_starts(directory: Path, stems: Sequence[Path]) -> None:
    """Files of starts that are not in this order, left by an earlier session, would enter the report."""
    kept = {stem.name for stem in stems}
    for path in directory.iterdir():
        if path.name.split(".")[0] not in kept:
            path.unlink()


def _require_both_sides(finished: Sequence[str], failed: dict[str, Path]) -> None:
    sides = {
        "plain decoding (AR)": [name for name in finished if name == AR],
        "the head": [name for name in finished if name != AR],
    }
    for side, names in sides.items():
        logs = [log for name, log in failed.items() if (name == AR) == (side != "the head")]
        if not names and logs:
            raise ValueError(
                f"every start of {side} failed, so there is nothing to compare; the reason stands at the end of "
                f"{logs[-1]}"
                ' ("timed out" in the .failed.json beside it: raise score.timeout_s)'
            )


def read_failures(directory: Path) -> list[dict[str, Any]]:
    """The recorded failures of a directory of starts."""
    return [read_json(path) for path in sorted(directory.glob("*.failed.json"))]


def config_differences(starts: Sequence[StartRecord]) -> list[dict[str, Any]]:
    """Resolved settings, other than `speculative_config`, in which a start differs from the first AR start.

    Each difference says whether it is forced by serving a head (and why) or stands to be explained.
    """
    baselines = [start for start in starts if start.arm == AR]
    if not baselines:
        return []
    reference = _flatten(baselines[0].description["engine"])
    differences: dict[tuple[str, str], dict[str, Any]] = {}
    for start in starts:
        settings = _flatten(start.description["engine"])
        for name in sorted({*reference, *settings}):
            if reference.get(name) != settings.get(name):
                differences[start.arm, name] = {
                    "arm": start.arm,
                    "setting": name,
                    "ar": reference.get(name),
                    "value": settings.get(name),
                    "forced": FORCED.get(name) if start.arm != AR else None,
                }
    return list(differences.values())


def _flatten(engine: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, value in engine.items():
        if section == "speculative_config":
            continue
        if isinstance(value, dict):
            flat.update({f"{section}.{name}": inner for name, inner in value.items()})
        else:
            flat[section] = value
    return flat
