"""The stages of a run: what each is made from, which settings change it, and which function fills it.

The data stages are here, training and export in train_stages.py, the measurement in score_stage.py.

One short function per stage unpacks the recipe into the values that its body takes; below this file no recipe
travels. Stages are built one after the other, because what a stage is made from is the files of the stages before it.
`settings` of a stage holds what changes its result. Threads, logging and checkpoint intervals are left out, so that
changing them never throws work away; the score stage keeps threads and cache, because there speed is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.heads.files import fingerprint_file
from eyas.recipes.load import resolve_builtin
from eyas.recipes.run import Run, available_cores
from eyas.recipes.score_stage import score_stage
from eyas.recipes.stage import Stage, output_fingerprint, without
from eyas.recipes.train_stages import captured_layers, export_stage, train_stage


def regenerate_stage(run: Run) -> Stage:
    """The target writes the conversations, in vLLM."""
    recipe, generation = run.recipe, run.recipe.data.generation
    dtype, max_model_len = recipe.features.dtype, recipe.score.max_model_len

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.data.regenerate import EngineSettings, regenerate

        return regenerate(
            out_dir,
            engine=EngineSettings(
                target_dir=run.target_dir,
                dtype=dtype,
                max_model_len=max_model_len,
                batch_size=generation.batch_size,
                seed=generation.seed,
                threads=available_cores(),
                kv_cache_gib=recipe.score.kv_cache_gib,
            ),
            topics=resolve_builtin("builtin:topics.txt"),
            openers=resolve_builtin("builtin:openers.txt"),
            self_prompts=generation.self_prompts,
            chitchat=generation.chitchat,
            chatterbot=generation.chatterbot,
            evals=generation.evals,
            heldout_prompts=generation.heldout_prompts,
            temperature=generation.temperature,
            min_p=generation.min_p,
            max_tokens=generation.max_tokens,
            max_repeated_8gram_share=generation.max_repeated_8gram_share,
            trust_remote_code=recipe.target.trust_remote_code,
        )

    settings = {
        "generation": generation.model_dump(mode="json"),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "trust_remote_code": recipe.target.trust_remote_code,
    }
    inputs = {
        "target": run.target_fingerprint,
        "topics": fingerprint_file(resolve_builtin("builtin:topics.txt")),
        "openers": fingerprint_file(resolve_builtin("builtin:openers.txt")),
    }
    return Stage(name="regenerate", settings=settings, inputs=inputs, body=body)


def prepare_stage(run: Run) -> Stage:
    """Conversations become token ids with an exact answer mask, split into training and held-out."""
    data, target = run.recipe.data, run.recipe.target

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.data.prepare import prepare

        return prepare(
            out_dir,
            target_dir=run.target_dir,
            conversations=run.conversations,
            max_length=data.max_length,
            max_train_tokens=data.max_train_tokens,
            on_bad_line=data.on_bad_line,
            trust_remote_code=target.trust_remote_code,
            seed=run.recipe.seed,
        )

    settings = {
        "max_length": data.max_length,
        "max_train_tokens": data.max_train_tokens,
        "on_bad_line": data.on_bad_line,
        "trust_remote_code": target.trust_remote_code,
        "seed": run.recipe.seed,
    }
    inputs = {"target": run.target_fingerprint, "conversations": fingerprint_file(run.conversations)}
    return Stage(name="prepare", settings=settings, inputs=inputs, body=body)


def extract_stage(run: Run) -> Stage:
    """The target reads every token once; captured and last hidden states are stored."""
    features, target = run.recipe.features, run.recipe.target
    tokens_dir = run.directory("prepare")
    layers = captured_layers(run)

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.features.extract import extract

        return extract(
            out_dir,
            tokens_dir=tokens_dir,
            target_dir=run.target_dir,
            capture_layers=layers,
            dtype=features.dtype,
            batch_tokens=features.batch_tokens,
            threads=features.threads or available_cores(),
            trust_remote_code=target.trust_remote_code,
        )

    settings = without(features.model_dump(mode="json"), {"threads"})
    settings["capture_layers"] = layers if layers is None else list(layers)
    settings["trust_remote_code"] = target.trust_remote_code
    inputs = {"target": run.target_fingerprint, "tokens": output_fingerprint(tokens_dir)}
    return Stage(name="features", settings=settings, inputs=inputs, body=body)


STAGES: dict[str, Callable[[Run], Stage]] = {
    "regenerate": regenerate_stage,
    "prepare": prepare_stage,
    "extract": extract_stage,
    "train": train_stage,
    "export": export_stage,
    "score": score_stage,
}
