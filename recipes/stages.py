"""The stages of a run: what each is made from, which settings change it, and which function fills it.

One short function per stage unpacks the recipe into the values that its body takes; below this file no recipe
travels. Stages are built one after the other, because what a stage is made from is the files of the stages before it.
`settings` of a stage holds what changes its result. Threads, logging and checkpoint intervals are left out, so that
changing them never throws work away; the score stage keeps threads and cache, because there speed is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.heads.files import fingerprint_file
from eyas.recipes.estimate import checkpoint_bytes, head_parameters, num_captured, read_target_shape
from eyas.recipes.load import resolve_builtin
from eyas.recipes.run import Run, available_cores, stage_names
from eyas.recipes.schema import Train
from eyas.recipes.stage import Stage, output_fingerprint, read_manifest, require_free_bytes

if TYPE_CHECKING:
    from eyas.train.loop import LoopSettings


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

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.features.extract import extract

        return extract(
            out_dir,
            tokens_dir=tokens_dir,
            target_dir=run.target_dir,
            capture_layers=features.capture_layers,
            dtype=features.dtype,
            batch_tokens=features.batch_tokens,
            threads=features.threads or available_cores(),
            trust_remote_code=target.trust_remote_code,
        )

    settings = _without(features.model_dump(mode="json"), {"threads"})
    settings["trust_remote_code"] = target.trust_remote_code
    inputs = {"target": run.target_fingerprint, "tokens": output_fingerprint(tokens_dir)}
    return Stage(name="features", settings=settings, inputs=inputs, body=body)


def train_stage(run: Run) -> Stage:
    """The head learns; its best checkpoint by held-out tau is `train/head/`."""
    recipe, head, train = run.recipe, run.recipe.head, run.recipe.train
    features_dir, tokens_dir = run.directory("extract"), run.directory("prepare")

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.run import HeadSizes, run_training

        parameters = head_parameters(
            head, target=read_target_shape(run.target_dir), captured=num_captured(recipe.features)
        )
        require_free_bytes(out_dir, needed=checkpoint_bytes(parameters), what="training (two checkpoints and the head)")
        return run_training(
            out_dir,
            features_dir=features_dir,
            tokens_dir=tokens_dir,
            target_dir=run.target_dir,
            sizes=HeadSizes(
                draft_vocab_size=head.draft_vocab_size,
                intermediate_size=head.intermediate_size,
                num_attention_heads=head.num_attention_heads,
                num_key_value_heads=head.num_key_value_heads,
                head_dim=head.head_dim,
            ),
            init_from_target=head.init_from_target,
            loop=loop_settings(train, seed=recipe.seed),
            weight_decay=train.weight_decay,
            betas=train.betas,
            precision="no" if train.precision == "fp32" else train.precision,
            evaluate_conversations=train.evaluate_conversations,
            threads=train.threads or available_cores(),
            tracker=train.tracker,
            run_name=recipe.name,
            trust_remote_code=recipe.target.trust_remote_code,
        )

    harmless = {"checkpoint_every", "log_every", "threads", "tracker"}
    settings = {
        "head": head.model_dump(mode="json"),
        "train": _without(train.model_dump(mode="json"), harmless),
        "seed": recipe.seed,
        "trust_remote_code": recipe.target.trust_remote_code,
    }
    inputs = {
        "target": run.target_fingerprint,
        "features": output_fingerprint(features_dir),
        "tokens": output_fingerprint(tokens_dir),
    }
    return Stage(name="train", settings=settings, inputs=inputs, body=body)


def loop_settings(train: Train, *, seed: int) -> LoopSettings:
    """The part of the training section that the step loop takes."""
    from eyas.train.loop import LoopSettings

    return LoopSettings(
        epochs=train.epochs,
        batch_tokens=train.batch_tokens,
        ttt_steps=train.ttt_steps,
        ttt_warmup_share=train.ttt_warmup_share,
        step_decay=train.step_decay,
        learning_rate=train.learning_rate,
        warmup_share=train.warmup_share,
        schedule=train.schedule,
        max_grad_norm=train.max_grad_norm,
        evaluate_every=train.evaluate_every,
        checkpoint_every=train.checkpoint_every,
        log_every=train.log_every,
        chain_length=train.chain_length,
        seed=seed,
    )


def export_stage(run: Run) -> Stage:
    """The head in the form that vLLM loads, in the type it is measured in."""
    train_dir, dtype = run.directory("train"), run.recipe.score.dtype

    def body(out_dir: Path) -> dict[str, Any]:
        import torch

        from eyas.heads.formats.vllm import export_head

        served = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
        return export_head(out_dir, head_dir=train_dir / "head", target_dir=run.target_dir, dtype=served)

    settings = run.recipe.export.model_dump(mode="json") | {"dtype": dtype}
    inputs = {"target": run.target_fingerprint, "head": output_fingerprint(train_dir, under="head/")}
    return Stage(name="export", settings=settings, inputs=inputs, body=body)


def score_stage(run: Run) -> Stage:
    """Real vLLM with and without the head, and the report on it."""
    score_settings = run.recipe.score
    head_dir = run.directory("export")
    threads = score_settings.threads or available_cores()

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.eval.score import score
        from eyas.heads.prediction import acceptance_predictor

        return score(
            out_dir,
            target_dir=run.target_dir,
            trust_remote_code=run.recipe.target.trust_remote_code,
            head_dir=head_dir,
            method=run.recipe.head.kind,
            draft_lengths=list(score_settings.draft_lengths),
            batch_sizes=list(score_settings.batch_sizes),
            starts_per_arm=score_settings.starts_per_arm,
            requests_per_batch_slot=score_settings.requests_per_batch_slot,
            min_requests=score_settings.min_requests,
            max_tokens=score_settings.max_tokens,
            temperature=score_settings.temperature,
            seed=score_settings.seed,
            humaneval_requests=score_settings.humaneval_requests,
            dtype=score_settings.dtype,
            max_model_len=score_settings.max_model_len,
            enforce_eager=score_settings.enforce_eager,
            threads=threads,
            kv_cache_gib=score_settings.kv_cache_gib,
            timeout_s=score_settings.timeout_s,
            fidelity_requests=score_settings.fidelity_requests,
            fidelity_max_tokens=score_settings.fidelity_max_tokens,
            fidelity_dtype=score_settings.fidelity_dtype,
            heldout_path=run.conversations,
            predict=acceptance_predictor(
                head_dir,
                target_dir=run.target_dir,
                draft_length=max(score_settings.draft_lengths),
                dtype=score_settings.fidelity_dtype,
                trust_remote_code=run.recipe.target.trust_remote_code,
            ),
            context=score_context(run),
        )

    settings = _without(score_settings.model_dump(mode="json"), {"timeout_s"}) | {"threads": threads}
    inputs = {
        "target": run.target_fingerprint,
        "head": output_fingerprint(head_dir),
        "conversations": fingerprint_file(run.conversations),
    }
    return Stage(name="score", settings=settings, inputs=inputs, body=body)


STAGES: dict[str, Callable[[Run], Stage]] = {
    "regenerate": regenerate_stage,
    "prepare": prepare_stage,
    "extract": extract_stage,
    "train": train_stage,
    "export": export_stage,
    "score": score_stage,
}


def score_context(run: Run) -> dict[str, Any]:
    """What a report tells about where the head comes from: the recipe, and each earlier stage's counts and seconds."""
    from eyas.train.tracking import METRICS_NAME, read_metrics

    manifests = {name: read_manifest(run.directory(name)) for name in stage_names(run.recipe, last="export")}
    return {
        "name": run.recipe.name,
        "training": {"metrics": read_metrics(run.directory("train") / METRICS_NAME)},
        "recipe": run.recipe.model_dump(mode="json"),
        "target": {"directory": str(run.target_dir), "fingerprint": run.target_fingerprint},
        "stages": {name: {key: found[key] for key in ("counts", "seconds")} for name, found in manifests.items()},
    }


def _without(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}
