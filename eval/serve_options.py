"""A vLLM server that runs the engine as the grid measured it: its settings, and the options and environment they become.

Every server command of the project is made here, that of the open loop and the one that a schedule is handed over with,
so that neither forgets a setting of the grid's engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eyas.eval.plan import StartPlan
from eyas.eval.records import StartRecord

WHOLE_PROMPT_TOKENS = 4096
"""Tokens of a step where prompts are read whole, at least: vLLM's own default for a CPU."""

CPU_ENVIRONMENT = ("LD_PRELOAD", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")
"""Of `heads.serving.engine_environment`, what makes an engine on a CPU as fast and as large as the measured one."""


def whole_prompt_tokens(max_model_len: int) -> int:
    """Tokens of a step that read any prompt whole.

    On CPU vLLM fails on a seeded request whose prompt it reads in parts ("CPU Generator does not use offset"), so there
    prompts are read whole in the grid's engines and in servers.
    """
    return max(max_model_len, WHOLE_PROMPT_TOKENS)


@dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """The engine behind a server. Arms differ in `speculative_config` only.

    Attributes:
        max_num_seqs: requests the engine runs at once; later ones wait inside the server.
        prefix_caching: when on, the cache is emptied before every measurement.
        tensor_parallel_size: GPUs that the target is split over.
        gpu_memory_utilization: share of a GPU's memory; None = vLLM's default. Not passed on CPU.
        max_num_batched_tokens: tokens of a step; None = vLLM's default, which on a GPU is smaller for a server than for
            the grid's engines. Not looked at on CPU (`whole_prompt_tokens`).
    """

    target_dir: str
    trust_remote_code: bool
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int
    enforce_eager: bool
    prefix_caching: bool
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    speculative_config: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def served_engine(
    plan: StartPlan, *, measured: Sequence[StartRecord], speculative_config: dict[str, Any] | None = None
) -> ServedEngine:
    """A server with the engine settings of the grid.

    Args:
        plan: of the grid.
        measured: finished starts of the grid; the size of a step is taken from what vLLM resolved there.
        speculative_config: of the arm; None is plain decoding.
    """
    return ServedEngine(
        target_dir=plan.target_dir,
        trust_remote_code=plan.trust_remote_code,
        dtype=plan.dtype,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        seed=plan.seed,
        enforce_eager=plan.enforce_eager,
        prefix_caching=plan.prefix_caching,
        tensor_parallel_size=plan.tensor_parallel_size,
        gpu_memory_utilization=plan.gpu_memory_utilization,
        max_num_batched_tokens=resolved_step_tokens(measured),
        speculative_config=speculative_config,
    )


def resolved_step_tokens(starts: Sequence[StartRecord]) -> int | None:
    """`max_num_batched_tokens` as the first of the starts resolved it; None without starts, or where it is not stored."""
    if not starts:
        return None
    return starts[0].description["engine"].get("scheduler_config", {}).get("max_num_batched_tokens")


def engine_options(engine: ServedEngine, *, on_cpu: bool) -> list[str]:
    """The options of a server's command line that settle its engine, word by word.

    Nothing is taken from the target's generation_config.json: measured sampling is explicit. Without a speculative
    configuration the server decodes plainly.
    """
    options: dict[str, object] = {
        "--dtype": engine.dtype,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--seed": engine.seed,
        "--generation-config": "vllm",
        "--tensor-parallel-size": engine.tensor_parallel_size,
    }
    switches = ["--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching"]
    switches += ["--enforce-eager"] if engine.enforce_eager else []
    switches += ["--trust-remote-code"] if engine.trust_remote_code else []
    step_tokens = whole_prompt_tokens(engine.max_model_len) if on_cpu else engine.max_num_batched_tokens
    if on_cpu:
        switches.append("--no-enable-chunked-prefill")
    elif engine.gpu_memory_utilization is not None:
        options["--gpu-memory-utilization"] = engine.gpu_memory_utilization
    if step_tokens is not None:
        options["--max-num-batched-tokens"] = step_tokens
    if engine.speculative_config is not None:
        options["--speculative-config"] = json.dumps(engine.speculative_config)
    return [str(part) for option in options.items() for part in option] + switches


def environment_to_serve(environment: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """The variables of an engine's environment that a server needs to be as fast and as large as was measured."""
    return {name: environment[name] for name in CPU_ENVIRONMENT if name in environment} if on_cpu else {}
