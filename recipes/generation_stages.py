"""The stages in which the target writes: user turns of its own, and every answer anew.

Batch sizes and servers are left out of `settings`: they decide how fast an answer comes and not what it is made from.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.heads.files import fingerprint_file
from eyas.recipes.generation import backend, engine_settings, generation_length, target_chat
from eyas.recipes.load import resolve_builtin
from eyas.recipes.run import CONVERSATIONS_FILE, EVALUATION_PROMPTS, STATES_DIRECTORY, Run
from eyas.recipes.stage import Stage, without
from eyas.recipes.train_stages import captured_layers

if TYPE_CHECKING:
    from eyas.train.data.dialogues import Sampling
    from eyas.train.data.regenerate import TokenLimit
    from eyas.train.data.user_turns import UserTurnSettings

SYNTHESISED = "prompts.jsonl"


def synthesise_stage(run: Run) -> Stage:
    """The target writes user turns, in vLLM or on servers."""
    own = run.recipe.data.self_prompts
    topics, openers = _lines(own.topics), _lines(own.openers)

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.data.synthesise import synthesise

        chat = target_chat(run)
        with backend(run, chat=chat, work_dir=out_dir) as generate:
            return synthesise(
                out_dir,
                chat=chat,
                generate=generate,
                count=own.count,
                settings=_user_turns(run),
                topics=topics,
                openers=openers,
            )

    settings = without(own.model_dump(mode="json"), {"topics", "openers"}) | {
        "topics": topics,
        "openers": openers,
        "engine": engine_settings(run),
    }
    return Stage(name="synthesise", settings=settings, inputs={"target": run.target_fingerprint}, body=body)


def _user_turns(run: Run) -> UserTurnSettings:
    from eyas.train.data.user_turns import UserTurnSettings

    own = run.recipe.data.self_prompts
    return UserTurnSettings(
        temperature=own.temperature,
        min_p=own.min_p,
        max_tokens=own.max_tokens,
        min_characters=own.min_characters,
        max_characters=own.max_characters,
        languages=own.languages,
        seed=own.seed,
    )


def _sampling(run: Run) -> Sampling:
    from eyas.train.data.dialogues import Sampling

    generation = run.recipe.data.generation
    temperature = generation.temperature
    return Sampling(
        temperatures=temperature if isinstance(temperature, tuple) else (temperature,),
        heldout_temperature=generation.heldout_temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or 0,
        min_p=generation.min_p,
        max_tokens=generation.max_tokens,
        max_model_len=generation_length(run),
        max_repeated_share=generation.max_repeated_8gram_share,
        truncated=generation.truncated,
        seed=generation.seed,
    )


def _limit(run: Run) -> TokenLimit | None:
    """Where the answers stop: what is not trained on need not be made."""
    from eyas.train.data.cut import Cut
    from eyas.train.data.regenerate import TokenLimit

    data = run.recipe.data
    if data.max_train_tokens is None:
        return None
    cut = Cut(max_length=data.max_length, too_long=data.too_long)
    return TokenLimit(tokens=data.max_train_tokens, cut=cut, seed=run.recipe.seed)


def regenerate_stage(run: Run) -> Stage:
    """The target answers every assistant turn anew, in vLLM or on servers."""
    data, generation = run.recipe.data, run.recipe.data.generation
    collected = run.directory("collect")

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.data.follow_ups import FollowUps
        from eyas.train.data.regenerate import regenerate

        chat = target_chat(run)
        follow_ups = FollowUps(
            count=generation.follow_ups,
            user_turns=_user_turns(run),
            evaluation_prompts=collected / EVALUATION_PROMPTS if data.guard.enabled else None,
            ngram=data.guard.ngram,
        )
        states = _states_settings(run, out_dir) if generation.keep_states else None
        with backend(run, chat=chat, work_dir=out_dir, states=states) as generate:
            return regenerate(
                out_dir,
                conversations=collected / CONVERSATIONS_FILE,
                chat=chat,
                generate=generate,
                sampling=_sampling(run),
                follow_ups=follow_ups if generation.follow_ups else None,
                limit=_limit(run),
                on_bad_line=data.on_bad_line,
            )

    # How states are stored is not here: another way would not change an answer, and extraction makes what does not fit.
    speed = {
        "batch_size",
        "servers",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "dtype",
        "max_model_len",
        "keep_states",
    }
    settings = {
        "generation": without(generation.model_dump(mode="json"), speed),
        "user_turns": data.self_prompts.model_dump(mode="json") if generation.follow_ups else None,
        "engine": engine_settings(run),
        "guard": data.guard.model_dump(mode="json", include={"enabled", "ngram"}) if generation.follow_ups else None,
        "limit": None if (limit := _limit(run)) is None else asdict(limit),
    }
    inputs = {
        "target": run.target_fingerprint,
        "conversations": fingerprint_file(collected / CONVERSATIONS_FILE),
        "evaluation_prompts": fingerprint_file(collected / EVALUATION_PROMPTS),
    }
    return Stage(name="regenerate", settings=settings, inputs=inputs, body=body, describe=_describe_answers)


def _describe_answers(counts: dict[str, Any]) -> list[str]:
    dropped = ", ".join(f"{number} {reason}" for reason, number in counts.get("dropped", {}).items() if number)
    return [
        f"{counts['conversations']} conversations answered, {counts['answer_tokens']} answer tokens"
        + (f"; ended early or dropped: {dropped}" if dropped else "")
        + (f"; {left} not asked: data.max_train_tokens is reached" if (left := counts.get("not_needed")) else "")
    ]


def _states_settings(run: Run, out_dir: Path) -> dict[str, Any]:
    """What the engine needs to keep the states of its answers."""
    from eyas.recipes.store_form import store_form
    from eyas.train.features.states import generation_states_settings

    return generation_states_settings(
        out_dir / STATES_DIRECTORY,
        target_dir=run.target_dir,
        capture_layers=captured_layers(run),
        dtype=run.recipe.features.dtype,
        form=store_form(run.recipe),
        trust_remote_code=run.recipe.target.trust_remote_code,
    )


def _lines(reference: str | None) -> list[str]:
    if reference is None:
        return []
    path = resolve_builtin(reference)
    if not path.is_file():
        raise ValueError(f"data.self_prompts: no file {path}; name a text file with one entry a line, or null")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
