"""What vLLM itself sets differently when it drafts, why, and in which direction: the excuses of a comparison.

A difference in the other direction, such as more room for the KV cache with a head than without, is none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MEASURED_TOLERANCE = 0.02
"""Relative difference of a measured setting between two starts that is no difference of settings."""

_GRAPHS = {
    "NONE": 0,
    "PIECEWISE": 1,
    "FULL_DECODE_ONLY": 2,
    "FULL_AND_PIECEWISE": 3,
    "FULL": 4,
    # as a server tells them
    "0": 0,
    "1": 1,
    "[2, 0]": 2,
    "[2, 1]": 3,
    "2": 4,
}
"""vLLM's modes of graph capture, by how much of a step is replayed."""


class Consequence(NamedTuple):
    """Why drafting changes a setting, and whether a change from AR's value to the arm's is that consequence."""

    reason: str
    follows: Callable[[Any, Any], bool]


def _is_set(reference: Any, value: Any) -> bool:
    return reference is None and value is not None


def _is_switched_off(reference: Any, value: Any) -> bool:
    return reference is True and value is False


def _is_not_more(reference: Any, value: Any) -> bool:
    return _are_numbers(reference, value) and value <= (1 + MEASURED_TOLERANCE) * reference


def _is_not_less(reference: Any, value: Any) -> bool:
    return (reference or 0) <= (value or 0)


def _are_both_captured(reference: Any, value: Any) -> bool:
    return bool(reference) and bool(value)


def _replays_less(reference: Any, value: Any) -> bool:
    before, after = _GRAPHS.get(str(reference)), _GRAPHS.get(str(value))
    return before is not None and after is not None and _GRAPHS["NONE"] < after < before


def _are_near(reference: Any, value: Any) -> bool:
    return _are_numbers(reference, value) and abs(value - reference) <= MEASURED_TOLERANCE * abs(reference)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


_OWN_CACHE = Consequence("the head's own KV cache takes its share", _is_not_more)
_OWN_LAYERS = Consequence("the head's own layers are counted too", _is_not_less)
_GRAPH_SIZES = Consequence("a decode step of a drafting engine holds k + 1 tokens per request", _are_both_captured)

FORCED = {
    "observability_config.per_request_spec_decode_metrics": Consequence(
        "vLLM refuses the metrics without a head",
        lambda reference, value: reference == "none" and value in ("detailed", "summary"),
    ),
    "scheduler_config.max_num_scheduled_tokens": Consequence("set only when tokens are drafted", _is_set),
    "scheduler_config.async_scheduling": Consequence(
        "vLLM switches it off for speculative methods that cannot do it", _is_switched_off
    ),
    "parallel_config.disable_nccl_for_dp_synchronization": Consequence(
        "follows async scheduling; nothing runs in data parallel here", _is_switched_off
    ),
    "cache_config.num_gpu_blocks": _OWN_CACHE,
    "cache_config.kv_cache_size_tokens": _OWN_CACHE,
    "cache_config.kv_cache_max_concurrency": _OWN_CACHE,
    "model_runner_v2": Consequence("vLLM's second model runner does not know every method", _is_switched_off),
    "compilation_config.cudagraph_capture_sizes": _GRAPH_SIZES,
    "compilation_config.max_cudagraph_capture_size": _GRAPH_SIZES,
    "compilation_config.cudagraph_mode": Consequence(
        "vLLM gives up full graphs where the number of verified tokens changes", _replays_less
    ),
    "compilation_config.fast_moe_cold_start": Consequence(
        "off whenever tokens are drafted; without effect on models without experts", _is_switched_off
    ),
    "compilation_config.enabled_custom_ops": _OWN_LAYERS,
    "compilation_config.disabled_custom_ops": _OWN_LAYERS,
}
"""Settings that vLLM itself sets differently when it drafts; a name stands for all that lies below it, too."""

MEASURED = dict.fromkeys(
    ("cache_config.num_gpu_blocks", "cache_config.kv_cache_size_tokens", "cache_config.kv_cache_max_concurrency"),
    "vLLM measures the free memory at every start",
)
"""Settings that may differ a little between two starts of one arm, and why."""


def forced_reason(name: str, reference: Any, value: Any, *, drafts: bool) -> str | None:
    """Why a setting of an arm differs from plain decoding's as it must; None when it need not."""
    if not drafts:
        return measured_reason(name, reference, value)
    consequence = FORCED.get(name) or FORCED.get(name.rpartition(".")[0])
    return consequence.reason if consequence is not None and consequence.follows(reference, value) else None


def measured_reason(name: str, reference: Any, value: Any) -> str | None:
    """Why a setting differs between two engines that were told the same; None when it must not."""
    return MEASURED[name] if name in MEASURED and _are_near(reference, value) else None
