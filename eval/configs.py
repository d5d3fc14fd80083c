"""What the resolved configurations of the starts differ in, and whether that voids the comparison.

Arms may differ in `speculative_config` and in what vLLM makes of it by itself; each such consequence is listed here with its
reason. Any other difference means that two machines, versions or settings were compared, and not two ways of decoding: the
arm's cells then have no verdict, whatever their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.eval.records import AR, StartRecord

_OWN_CACHE = "the head's own KV cache takes its share"
FORCED = {
    "observability_config.per_request_spec_decode_metrics": "vLLM refuses the metrics without a head",
    "scheduler_config.max_num_scheduled_tokens": "set only when tokens are drafted",
    "scheduler_config.async_scheduling": "chosen by vLLM per speculative method",
    "parallel_config.disable_nccl_for_dp_synchronization": "follows async scheduling; nothing runs in data parallel here",
    "cache_config.num_gpu_blocks": _OWN_CACHE,
    "cache_config.kv_cache_size_tokens": _OWN_CACHE,
    "cache_config.kv_cache_max_concurrency": _OWN_CACHE,
    "model_runner_v2": "vLLM chooses its model runner by the method of an arm",
    "compilation_config.cudagraph_capture_sizes": "a decode step of a drafting engine holds k + 1 tokens per request",
    "compilation_config.max_cudagraph_capture_size": "a decode step of a drafting engine holds k + 1 tokens per request",
    "compilation_config.cudagraph_mode": "vLLM gives up full graphs where the number of verified tokens changes",
    "compilation_config.fast_moe_cold_start": "off whenever tokens are drafted; without effect on models without experts",
}
"""Settings that vLLM itself sets differently when it drafts, and why."""

LEFTOVERS = (
    "compilation_config.cache_dir",
    "compilation_config.local_cache_dir",
    "compilation_config.traced_files",
    "compilation_config.compilation_time",
    "compilation_config.encoder_compilation_time",
    "machine.environment.TORCHINDUCTOR_CACHE_DIR",
)
"""What compiling leaves behind in the configuration and the environment; vLLM's own comparison leaves it out too."""

MEASURED = {
    "cache_config.num_gpu_blocks": "vLLM measures the free memory at every start",
    "cache_config.kv_cache_size_tokens": "vLLM measures the free memory at every start",
    "cache_config.kv_cache_max_concurrency": "vLLM measures the free memory at every start",
}
"""Settings that may differ a little between two starts of one arm."""

MEASURED_TOLERANCE = 0.02
"""Relative difference of a measured setting between two starts without a head that is no difference of settings."""

MACHINE = ("packages", "cpu", "cpu_count", "gpus", "torch_threads", "environment")
"""Facts of the machine that must be the same for all starts; load averages are of course not."""


def config_differences(starts: Sequence[StartRecord]) -> list[dict[str, Any]]:
    """Resolved settings, other than `speculative_config`, in which a start differs from the first AR start.

    Each difference says whether it is forced by serving a head (and why) or stands to be explained.
    """
    baselines = [start for start in starts if start.arm == AR]
    if not baselines:
        return []
    reference = _flatten(baselines[0].description)
    differences: dict[tuple[str, str], dict[str, Any]] = {}
    for start in starts:
        settings = _flatten(start.description)
        for name in sorted({*reference, *settings}):
            if reference.get(name) != settings.get(name):
                differences[start.arm, name] = {
                    "arm": start.arm,
                    "setting": name,
                    "ar": reference.get(name),
                    "value": settings.get(name),
                    "forced": _forced(name, reference.get(name), settings.get(name), drafts=start.draft_length > 0),
                }
    return list(differences.values())


def _forced(name: str, reference: Any, value: Any, *, drafts: bool) -> str | None:
    if drafts:
        return FORCED.get(name)
    if name in MEASURED and isinstance(reference, int | float) and isinstance(value, int | float):
        near = abs(value - reference) <= MEASURED_TOLERANCE * abs(reference)
        return MEASURED[name] if near else None
    return None


def void_reasons(differences: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Arm -> why its comparison with AR is void. A difference between two AR starts stands under AR and voids all."""
    settings: dict[str, list[str]] = {}
    for difference in differences:
        if difference["forced"] is None:
            settings.setdefault(difference["arm"], []).append(difference["setting"])
    return {arm: f"the engines differ in {', '.join(names)}" for arm, names in settings.items()}


def void_by_arm(differences: Sequence[dict[str, Any]], *, arms: Sequence[str]) -> dict[str, str]:
    """Every arm of `arms` whose cells can have no verdict, and why."""
    own = void_reasons(differences)
    shared = {} if AR not in own else dict.fromkeys(arms, f"two starts of plain decoding differ: {own[AR]}")
    return shared | {arm: reason for arm, reason in own.items() if arm != AR}


def _flatten(description: dict[str, Any]) -> dict[str, Any]:
    """`section.name` -> value for every setting of the engine and every fact of the machine that must be equal."""
    machine = {f"machine.{name}": description["machine"].get(name) for name in MACHINE}
    flat: dict[str, Any] = {}
    for section, value in {**description["engine"], **machine}.items():
        if section == "speculative_config":
            continue
        if isinstance(value, dict):
            flat.update({f"{section}.{name}": inner for name, inner in value.items()})
        else:
            flat[section] = value
    return {name: value for name, value in flat.items() if name not in LEFTOVERS}
