"""What the resolved configurations of the starts differ in, and whether that voids the comparison.

Arms may differ in `speculative_config` and in what vLLM makes of it by itself (`eyas.eval.forced`), and starts of one arm in
nothing. Any other difference means that two machines, versions or settings were compared, and not two ways of decoding: the
arm's cells then have no verdict, whatever their ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eyas.eval.forced import forced_reason, measured_reason
from eyas.eval.records import AR, StartRecord

SPECULATIVE = "speculative_config"
"""The section by which arms are meant to differ."""

LEFTOVERS = (
    "compilation_config.cache_dir",
    "compilation_config.local_cache_dir",
    "compilation_config.traced_files",
    "compilation_config.compilation_time",
    "compilation_config.encoder_compilation_time",
    "machine.environment.TORCHINDUCTOR_CACHE_DIR",
)
"""What compiling leaves behind in the configuration and the environment; vLLM's own comparison leaves it out too."""

MACHINE = (
    "python",
    "packages",
    "vllm_commit",
    "cuda",
    "cpu",
    "cpu_count",
    "memory_gib",
    "gpus",
    "gpu_limits",
    "torch_threads",
    "environment",
)
"""Facts of the machine that must be the same for all starts; load averages are of course not."""


class Resolved(NamedTuple):
    """One engine as it was resolved: its settings by their dotted names."""

    arm: str
    drafts: bool
    settings: Mapping[str, Any]


def config_differences(starts: Sequence[StartRecord]) -> list[dict[str, Any]]:
    """Resolved settings in which a start differs from the first AR start, or from the first one of its own arm."""
    return compare_settings(
        [Resolved(start.arm, start.draft_length > 0, flat_settings(start.description)) for start in starts]
    )


def compare_settings(engines: Sequence[Resolved]) -> list[dict[str, Any]]:
    """What every engine differs in from the first one of plain decoding, and from the first one of its own arm.

    Each difference names the arm it was found `against`, and says why it is `forced`, by drafting or by how vLLM measures
    memory, or stands to be explained (None).
    """
    first = {engine.arm: engine for engine in reversed(engines)}
    if AR not in first:
        return []
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for engine in engines:
        for against in dict.fromkeys((AR, engine.arm)):
            for difference in _compare(engine, first[against]):
                key = engine.arm, against, difference["setting"]
                if key not in found or difference["forced"] is None:
                    found[key] = difference
    return list(found.values())


def _compare(engine: Resolved, reference: Resolved) -> list[dict[str, Any]]:
    same_arm = engine.arm == reference.arm
    differences = []
    for name in sorted({*reference.settings, *engine.settings}):
        ours, theirs = reference.settings.get(name), engine.settings.get(name)
        if ours == theirs or (not same_arm and name.partition(".")[0] == SPECULATIVE):
            continue
        forced = (
            measured_reason(name, ours, theirs) if same_arm else forced_reason(name, ours, theirs, drafts=engine.drafts)
        )
        differences.append(
            {
                "arm": engine.arm,
                "against": reference.arm,
                "setting": name,
                "reference": ours,
                "value": theirs,
                "forced": forced,
            }
        )
    return differences


def void_reasons(differences: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Arm -> why its comparison with AR is void. A difference between two AR starts stands under AR and voids all."""
    found: dict[str, dict[str, list[str]]] = {}
    for difference in differences:
        if difference["forced"] is None:
            words = "two of its starts" if difference["against"] == difference["arm"] != AR else "the engines"
            found.setdefault(difference["arm"], {}).setdefault(words, []).append(difference["setting"])
    return {
        arm: "; ".join(f"{words} differ in {', '.join(names)}" for words, names in settings.items())
        for arm, settings in found.items()
    }


def void_by_arm(differences: Sequence[dict[str, Any]], *, arms: Sequence[str]) -> dict[str, str]:
    """Every arm of `arms` whose cells can have no verdict, and why."""
    own = void_reasons(differences)
    shared = {} if AR not in own else dict.fromkeys(arms, f"two starts of plain decoding differ: {own[AR]}")
    return shared | {arm: reason for arm, reason in own.items() if arm != AR}


def flat_settings(description: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of the engine, and every fact of the machine that must be equal, by its dotted name."""
    machine = {name: description["machine"].get(name) for name in MACHINE}
    flat = flatten({**description["engine"], "machine": machine})
    return {name: value for name, value in flat.items() if name not in LEFTOVERS}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested objects by their dotted names. An empty object is a leaf."""
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            flat |= flatten(inner, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = inner
    return flat
