"""The last stage of a run: the head in real vLLM beside plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from eyas.heads.files import fingerprint_directory, fingerprint_file, read_json, write_json
from eyas.recipes.run import Run, available_cores, data_stage_names, stage_names
from eyas.recipes.stage import Stage, output_fingerprint, read_manifest, refresh_files, without
from eyas.recipes.tracked import tracking_settings


def score_stage(run: Run) -> Stage:
    """Real vLLM with and without the head, and the report on it."""
    score_settings = run.recipe.score
    given = score_settings.head
    head_dir = run.directory("export") if given is None else Path(given).expanduser()
    threads = score_settings.threads or available_cores()

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.eval.score import score
        from eyas.heads.prediction import acceptance_predictor

        method = servable_kind(
            head_dir, target_dir=run.target_dir, trust_remote_code=run.recipe.target.trust_remote_code
        )
        counts = score(
            out_dir,
            target_dir=run.target_dir,
            trust_remote_code=run.recipe.target.trust_remote_code,
            template_options=run.recipe.data.template_options,
            head_dir=head_dir,
            method=method,
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
        if given is None:
            _track_report(run, out_dir)
        return counts

    settings = without(score_settings.model_dump(mode="json"), {"timeout_s", "head"}) | {
        "threads": threads,
        "template_options": run.recipe.data.template_options,
    }
    inputs = {
        "target": run.target_fingerprint,
        "head": output_fingerprint(head_dir) if given is None else head_fingerprint(head_dir),
        "conversations": fingerprint_file(run.conversations),
    }
    return Stage(
        name=run.directory("score").name,
        settings=settings,
        inputs=inputs,
        body=body,
        refresh=lambda directory: _refresh_report(run, directory),
    )


def _track_report(run: Run, directory: Path) -> None:
    """Keep the report with the wandb run of the training, where there is one."""
    from eyas.train.tracking import add_to_finished_run

    add_to_finished_run(
        tracking_settings(run, stage="score"),
        trained_in=run.directory("train"),
        work_dir=directory,
        path=directory / "report.html",
        kind="report",
        say=lambda line: typer.echo(f"score: {line}"),
    )


def _refresh_report(run: Run, directory: Path) -> None:
    """Write the report anew when earlier stages tell other counts, though what they made did not change."""
    from eyas.eval.report.build import build_report

    context = score_context(run)
    if read_json(directory / "context.json") != json.loads(json.dumps(context)):
        write_json(directory / "context.json", context)
        build_report(directory)
        refresh_files(directory)


def servable_kind(head_dir: Path, *, target_dir: Path, trust_remote_code: bool) -> str:
    """Kind of the head in a directory, which is also vLLM's name of the method.

    Raises:
        ValueError: vLLM would refuse or misread the head; every error is named.
    """
    from eyas.heads.formats.check import check_head, errors
    from eyas.heads.formats.read import read_files

    problems = errors(check_head(head_dir, target_dir=target_dir, trust_remote_code=trust_remote_code))
    if problems:
        raise ValueError(f"{head_dir} cannot be served: " + "; ".join(problems))
    return read_files(head_dir).config.kind


def head_fingerprint(head_dir: Path) -> str:
    """Identity of a head directory from elsewhere.

    Raises:
        ValueError: there is no such directory.
    """
    if not (head_dir / "config.json").is_file():
        raise ValueError(f"{head_dir}: no head directory (no config.json); see `eyas check {head_dir}`")
    return fingerprint_directory(head_dir, patterns=("config.json", "*.safetensors"))


def score_context(run: Run) -> dict[str, Any]:
    """What a report tells about where the head comes from: the recipe, and each earlier stage's counts and seconds."""
    from eyas.train.tracking import METRICS_NAME, read_metrics

    if run.recipe.score.head is not None:
        made = data_stage_names(run.recipe)
        metrics: list[dict[str, Any]] = []
    else:
        made = stage_names(run.recipe, last="export")
        metrics = read_metrics(run.directory("train") / METRICS_NAME)
    manifests = {name: read_manifest(run.directory(name)) for name in made}
    return {
        "name": run.recipe.name,
        "head": str(run.directory("export") if run.recipe.score.head is None else run.recipe.score.head),
        "training": {"metrics": metrics},
        "recipe": run.recipe.model_dump(mode="json"),
        "target": {"directory": str(run.target_dir), "fingerprint": run.target_fingerprint},
        "stages": {name: {key: found[key] for key in ("counts", "seconds")} for name, found in manifests.items()},
    }
