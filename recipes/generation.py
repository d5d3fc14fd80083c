"""Who answers when the target is to write text: vLLM on this machine, or OpenAI-compatible servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.recipes.run import Run, available_cores

if TYPE_CHECKING:
    from eyas.heads.chat import TargetChat
    from eyas.train.data.answers import Generate


def target_chat(run: Run) -> TargetChat:
    """Tokenizer and template of the target, with the recipe's template options."""
    from eyas.heads.chat import TargetChat

    return TargetChat(
        run.target_dir,
        trust_remote_code=run.recipe.target.trust_remote_code,
        template_options=run.recipe.data.template_options,
    )


def generation_length(run: Run) -> int:
    """Tokens of a prompt and its answer together at most."""
    return run.recipe.data.generation.max_model_len or run.recipe.score.max_model_len


def generation_dtype(run: Run) -> str:
    """Type of the target when it answers on this machine."""
    return run.recipe.data.generation.dtype or run.recipe.features.dtype


def engine_settings(run: Run) -> dict[str, Any]:
    """What of the engine changes what the target says; servers are taken to run the target as this machine would."""
    return {
        "dtype": generation_dtype(run),
        "max_model_len": generation_length(run),
        "template_options": run.recipe.data.template_options,
        "trust_remote_code": run.recipe.target.trust_remote_code,
    }


@contextmanager
def backend(run: Run, *, chat: TargetChat, work_dir: Path, states: dict[str, Any] | None = None) -> Iterator[Generate]:
    """The backend that a recipe asks for; a local engine ends with the block.

    Args:
        states: what a local engine needs to keep the hidden states of its answers, or None.
    """
    generation = run.recipe.data.generation
    if generation.servers.urls:
        yield _servers(run, chat=chat, work_dir=work_dir)
        return
    from eyas.train.data.generate import EngineSettings, OfflineEngine

    settings = EngineSettings(
        target_dir=run.target_dir,
        dtype=generation_dtype(run),
        max_model_len=generation_length(run),
        batch_size=generation.batch_size,
        seed=generation.seed,
        threads=available_cores(),
        kv_cache_gib=run.recipe.score.kv_cache_gib,
        tensor_parallel_size=generation.tensor_parallel_size,
        gpu_memory_utilization=generation.gpu_memory_utilization,
        trust_remote_code=run.recipe.target.trust_remote_code,
        states=states,
    )
    with OfflineEngine(settings, work_dir=work_dir) as engine:
        yield engine


def _servers(run: Run, *, chat: TargetChat, work_dir: Path) -> Generate:
    from eyas.train.data.servers import Servers, ServerSettings

    servers = run.recipe.data.generation.servers
    settings = ServerSettings(
        urls=servers.urls,
        model=servers.model,
        concurrency=servers.concurrency,
        timeout_s=servers.timeout_s,
        retries=servers.retries,
        dead_after_s=servers.dead_after_s,
        api_key_variable=servers.api_key_variable,
    )
    return Servers(
        settings,
        chat=chat,
        max_model_len=generation_length(run),
        work_dir=work_dir,
        seed=run.recipe.data.generation.seed,
    )
