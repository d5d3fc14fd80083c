"""protocol.json: how a session measured, as plain values, written before the first engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.eval.grid import Turn
from eyas.eval.sessions import Session
from eyas.eval.settings import Engine, Load, Repeats
from eyas.eval.workload import units


def describe_protocol(
    session: Session,
    *,
    turns: list[Turn],
    load: Load,
    repeats: Repeats,
    engine: Engine,
    template_options: Mapping[str, Any],
    starts_plan: dict[str, Any],
) -> dict[str, Any]:
    """What the report says about how it was measured. `starts_plan`: why there are so many starts."""
    plan = session.plan
    return {
        "session": plan.session,
        "protocol": repeats.protocol,
        "blocks": repeats.blocks,
        "starts_per_arm": starts_plan["starts_per_arm"],
        "plan": starts_plan,
        "order": [" + ".join(arm.name for arm in turn.arms) for turn in turns],
        "arms": {arm.name: arm.draft_length for arm in session.arms},
        "dtype": plan.dtype,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "enforce_eager": plan.enforce_eager,
        "prefix_caching": plan.prefix_caching,
        "threads": engine.threads,
        "kv_cache_gib": engine.kv_cache_gib,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "timeout_s": engine.timeout_s,
        "stop_token_ids": plan.stop_token_ids,
        "seed": load.seed,
        "temperatures": list(load.temperatures),
        "top_p": load.top_p,
        "top_k": load.top_k,
        "max_tokens": load.max_tokens,
        "fixed_length": load.fixed_length,
        "batch_sizes": list(load.batch_sizes),
        "template_options": dict(template_options),
        "requests": [
            {
                **cell.key._asdict(),
                "requests": len(cell.requests),
                "prompts": len(units(cell.requests)),
                "wanted": load.wanted(cell.batch_size),
            }
            for cell in plan.cells
        ],
        "prompt_sets": session.prompts.describe(),
    }
