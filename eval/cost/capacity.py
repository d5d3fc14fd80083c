"""What drafting costs beside time: memory that the KV cache loses, and steps that no captured graph covers.

From the resolved configuration alone, by the rule of vLLM 0.32's CUDA graph dispatcher (vllm/v1/cudagraph_dispatcher.py): a
decode step of B requests reads B (k + 1) tokens, padded to the next captured size; above the largest it runs eagerly, which
costs time that a smaller k would not. This is what the configuration says, no observation of single steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eyas.eval.records import AR, ArmFacts

Graph = Literal["FULL", "PIECEWISE", "eager"]

_MODES: dict[str, tuple[str, str]] = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}
"""vLLM's `cudagraph_mode` -> graphs of steps in which every request reads k + 1 tokens, and of all other steps."""


def capacity_results(
    engines: Mapping[str, Mapping[str, Any]],
    arms: Mapping[str, ArmFacts],
    *,
    batch_sizes: Sequence[int],
    head_bytes: int | None,
) -> dict[str, list[dict[str, Any]]]:
    """`graphs`: per batch size and arm; `memory`: per arm.

    Args:
        engines: arm -> a description with the resolved `engine`.
        arms: what the arms are.
        batch_sizes: that were measured.
        head_bytes: size of the head's files; None where the session did not store it.
    """
    return {
        "graphs": [
            _graph_row(size, arm, facts, engines[arm]["engine"])
            for size in batch_sizes
            for arm, facts in arms.items()
            if arm in engines
        ],
        "memory": [
            _memory_row(arm, facts, engines, head_bytes=head_bytes) for arm, facts in arms.items() if arm in engines
        ],
    }


def _graph_row(batch_size: int, arm: str, facts: ArmFacts, engine: Mapping[str, Any]) -> dict[str, Any]:
    length = draft_length_at(facts, batch_size)
    as_found = facts.kind == "other" and bool(facts.speculative_config)
    tokens = batch_size * (length + 1)
    graph = graph_of(
        engine.get("compilation_config") or {},
        tokens=tokens,
        query_length=facts.draft_length + 1,
        # Other methods draft what they find, and a schedule may draft less than its longest: no uniform step.
        uniform=not as_found and length == facts.draft_length,
        max_num_seqs=(engine.get("scheduler_config") or {}).get("max_num_seqs") or batch_size,
    )
    return {"batch_size": batch_size, "arm": arm, "draft_length": length, "tokens": tokens, "graph": graph}


def draft_length_at(facts: ArmFacts, batch_size: int) -> int:
    """k of a step with this many requests: that of the range it lies in, or of the last range before it."""
    ranges = (facts.speculative_config or {}).get("num_speculative_tokens_per_batch_size") or []
    begun = [length for first, _, length in ranges if first <= batch_size]
    return begun[-1] if begun else facts.draft_length


def graph_of(
    compilation: Mapping[str, Any], *, tokens: int, query_length: int, uniform: bool, max_num_seqs: int
) -> Graph | None:
    """What covers a decode step of this many tokens; None where the configuration is not stored.

    Args:
        compilation: vLLM's resolved `compilation_config`.
        tokens: of the step.
        query_length: tokens per request for which graphs of uniform steps are captured.
        uniform: every request of the step reads `query_length` tokens.
        max_num_seqs: of the engine.
    """
    mode = compilation.get("cudagraph_mode")
    if mode not in _MODES:
        return None
    padded = min((size for size in compilation.get("cudagraph_capture_sizes") or [] if size >= tokens), default=None)
    if padded is None:
        return "eager"
    own, others = _MODES[mode]
    captured = mode == "FULL" or query_length <= padded <= query_length * max_num_seqs
    chosen = own if uniform and own == "FULL" and captured else others
    return "FULL" if chosen == "FULL" else "PIECEWISE" if chosen == "PIECEWISE" else "eager"


def _memory_row(
    arm: str, facts: ArmFacts, engines: Mapping[str, Mapping[str, Any]], *, head_bytes: int | None
) -> dict[str, Any]:
    tokens, plain = _kv_tokens(engines[arm]), _kv_tokens(engines[AR]) if AR in engines else None
    drafting = facts.kind in ("head", "schedule")
    return {
        "arm": arm,
        "kv_tokens": tokens,
        "kv_tokens_lost": None if tokens is None or plain is None else plain - tokens,
        "kv_share_lost": None if tokens is None or not plain else (plain - tokens) / plain,
        "head_bytes": head_bytes if drafting else None,
    }


def _kv_tokens(description: Mapping[str, Any]) -> int | None:
    """Tokens of context that the engine's KV cache holds; None where blocks or their size are not stored."""
    cache = description["engine"].get("cache_config") or {}
    blocks, size = cache.get("num_gpu_blocks"), cache.get("block_size")
    return None if blocks is None or size is None else blocks * size
