"""From the `score` section of a recipe to the plain values that `eyas.eval.score` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.eval.settings import (
    Checks,
    Engine,
    Load,
    LosslessSettings,
    OpenLoopSettings,
    PromptSet,
    PromptSources,
    Repeats,
)
from eyas.recipes.run import Run, available_cores
from eyas.recipes.schema_score import Score


def resolved_arm(config: dict[str, Any]) -> dict[str, Any]:
    """A `~` in the path of an arm's model means the home directory, as in every other path of a recipe."""
    if isinstance(config.get("model"), str):
        return {**config, "model": str(Path(config["model"]).expanduser())}
    return config


def sources_of(run: Run) -> PromptSources:
    score = run.recipe.score
    return PromptSources(
        heldout_path=run.conversations,
        heldout_turns=score.heldout_turns,
        humaneval_requests=score.humaneval_requests,
        sets={
            name: PromptSet(
                path=prompt_file(name, prompts.path),
                split=prompts.split,
                turns=prompts.turns,
                requests=prompts.requests,
            )
            for name, prompts in score.prompt_sets.items()
        },
        mix=score.mix,
        template_options=template_options(run),
    )


def prompt_file(name: str, path: str) -> Path:
    """A prompt set's file.

    Raises:
        ValueError: there is none.
    """
    found = Path(path).expanduser()
    if not found.is_file():
        raise ValueError(f"score.prompt_sets.{name}.path: {found} does not exist; name a JSONL file of prompts")
    return found


def template_options(run: Run) -> dict[str, Any]:
    own = run.recipe.score.template_options
    return dict(run.recipe.data.template_options if own is None else own)


def load_of(score: Score) -> Load:
    return Load(
        batch_sizes=score.batch_sizes,
        set_batch_sizes=score.set_batch_sizes or score.batch_sizes,
        temperatures=score.temperatures,
        top_p=score.top_p,
        top_k=score.top_k,
        seed=score.seed,
        max_tokens=score.max_tokens,
        fixed_length=score.fixed_length,
        requests_per_batch_slot=score.requests_per_batch_slot,
        min_requests=score.min_requests,
    )


def repeats_of(score: Score) -> Repeats:
    return Repeats(
        protocol=score.protocol,
        starts_per_arm=score.starts_per_arm,
        blocks=score.blocks,
        budget_minutes=score.budget_minutes,
    )


def engine_of(score: Score) -> Engine:
    return Engine(
        dtype=score.dtype,
        max_model_len=score.max_model_len,
        enforce_eager=score.enforce_eager,
        prefix_caching=score.prefix_caching,
        threads=score.threads or available_cores(),
        kv_cache_gib=score.kv_cache_gib,
        timeout_s=score.timeout_s,
        tensor_parallel_size=score.tensor_parallel_size,
        gpu_memory_utilization=score.gpu_memory_utilization,
    )


def checks_of(score: Score) -> Checks:
    return Checks(
        lossless=LosslessSettings(
            requests=score.lossless.requests,
            max_tokens=score.lossless.max_tokens,
            dtype=score.lossless.dtype,
            samples=score.lossless.samples,
        ),
        time_split=score.time_split,
        open_loop=OpenLoopSettings(
            rates=score.open_loop.rates,
            requests=score.open_loop.requests,
            max_connections=score.open_loop.max_connections,
            slo_ttft_ms=score.open_loop.slo_ttft_ms,
            slo_tpot_ms=score.open_loop.slo_tpot_ms,
        ),
    )
