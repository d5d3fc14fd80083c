"""The stage that extracts the target's hidden states, and how a recipe stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.recipes.run import STATES_DIRECTORY, Run, available_cores
from eyas.recipes.stage import Stage, output_fingerprint
from eyas.recipes.train_stages import captured_layers, store_settings

SHARD_SAMPLE_BYTES = 1 << 24
"""Shards larger than this are identified by samples: each document in them carries its own checksum."""


def extract_stage(run: Run) -> Stage:
    """The target reads every token once; captured states and what the teacher needs are stored."""
    features = run.recipe.features
    layers = captured_layers(run)
    tokens_dir = run.directory("prepare")
    generated = run.directory("regenerate") / STATES_DIRECTORY if run.recipe.data.generation.keep_states else None

    def body(out_dir: Path) -> dict[str, Any]:
        return _extract(run, out_dir, layers=layers, generated=generated)

    settings = store_settings(run) | {
        "backend": features.backend,
        "capture_layers": layers if layers is None else list(layers),
        "batch_tokens": features.batch_tokens,
        "trust_remote_code": run.recipe.target.trust_remote_code,
    }
    inputs = {"target": run.target_fingerprint, "tokens": output_fingerprint(tokens_dir)}
    if generated is not None:
        inputs["states"] = output_fingerprint(run.directory("regenerate"), under=f"{STATES_DIRECTORY}/")
    return Stage(name="features", settings=settings, inputs=inputs, body=body, sample_above=SHARD_SAMPLE_BYTES)


def _extract(run: Run, out_dir: Path, *, layers: tuple[int, ...] | None, generated: Path | None) -> dict[str, Any]:
    from eyas.recipes.store_form import store_form

    features, threads = run.recipe.features, run.recipe.features.threads or available_cores()
    if features.backend == "vllm":
        from eyas.train.features.vllm_extract import extract_vllm

        return extract_vllm(
            out_dir,
            tokens_dir=run.directory("prepare"),
            target_dir=run.target_dir,
            capture_layers=layers,
            dtype=features.dtype,
            form=store_form(run.recipe),
            batch_tokens=features.batch_tokens,
            batch_size=features.batch_size,
            threads=threads,
            kv_cache_gib=run.recipe.score.kv_cache_gib,
            tensor_parallel_size=features.tensor_parallel_size,
            gpu_memory_utilization=features.gpu_memory_utilization,
            trust_remote_code=run.recipe.target.trust_remote_code,
            generated_states=generated,
        )
    from eyas.train.features.extract import extract

    return extract(
        out_dir,
        tokens_dir=run.directory("prepare"),
        target_dir=run.target_dir,
        capture_layers=layers,
        dtype=features.dtype,
        form=store_form(run.recipe),
        batch_tokens=features.batch_tokens,
        threads=threads,
        device_map=features.device_map,
        trust_remote_code=run.recipe.target.trust_remote_code,
        generated_states=generated,
    )
