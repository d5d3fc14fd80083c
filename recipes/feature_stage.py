"""The stage that extracts the target's hidden states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from eyas.recipes.run import STATES_DIRECTORY, Run, available_cores
from eyas.recipes.stage import Stage, output_fingerprint
from eyas.recipes.train_stages import captured_layers, store_settings

SHARD_SAMPLE_BYTES = 1 << 24
"""Shards larger than this are identified by samples: each document in them carries its own checksum."""


def extract_stage(run: Run) -> Stage:
    """The target reads every token once; captured states and what the teacher needs are stored."""
    tokens_dir = run.directory("prepare")

    def body(out_dir: Path) -> dict[str, Any]:
        counts = extract_body(run, out_dir)
        remove_traces(out_dir)
        return counts

    inputs = {"target": run.target_fingerprint, "tokens": output_fingerprint(tokens_dir)}
    if run.recipe.data.generation.keep_states:
        inputs["states"] = output_fingerprint(run.directory("regenerate"), under=f"{STATES_DIRECTORY}/")
    return Stage(
        name="features",
        settings=extract_settings(run),
        inputs=inputs,
        body=body,
        describe=_describe,
        sample_above=SHARD_SAMPLE_BYTES,
    )


def extract_settings(run: Run) -> dict[str, Any]:
    """What decides the numbers in the store."""
    layers = captured_layers(run)
    return store_settings(run) | {
        "backend": run.recipe.features.backend,
        "capture_layers": layers if layers is None else list(layers),
        "batch_tokens": run.recipe.features.batch_tokens,
        "trust_remote_code": run.recipe.target.trust_remote_code,
    }


def _describe(counts: dict[str, Any]) -> list[str]:
    taken = f", {counts['from_generation']} of them kept from generation" if counts["from_generation"] else ""
    per_token = counts["bytes"] / max(counts["tokens"], 1)
    return [f"{counts['documents']} documents{taken}, {counts['tokens']} tokens, {per_token:,.0f} bytes a token"]


def remove_traces(store: Path) -> None:
    """What extractors leave beside the shards; with it a store would differ from one that nothing disturbed."""
    from eyas.train.features.shards import CLAIMS_DIRECTORY

    shutil.rmtree(store / CLAIMS_DIRECTORY, ignore_errors=True)
    for pattern in ("vllm-*.plan.json", "vllm-*.log", ".*.safetensors.*"):
        for path in store.glob(pattern):
            path.unlink(missing_ok=True)


def extract_body(run: Run, out_dir: Path) -> dict[str, Any]:
    """Fill the store in `out_dir`, beside whatever other processes do the same."""
    from eyas.recipes.store_form import store_form

    features, threads = run.recipe.features, run.recipe.features.threads or available_cores()
    layers = captured_layers(run)
    states = run.directory("regenerate") / STATES_DIRECTORY
    generated = states if run.recipe.data.generation.keep_states and (states / "index.json").is_file() else None
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
