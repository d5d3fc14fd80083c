"""The last stage of a run: the head in real vLLM beside plain decoding and other ways of drafting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eyas.heads.files import fingerprint_directory, fingerprint_file, read_json, write_json
from eyas.recipes.run import Run, available_cores, data_stage_names, scores_own_head, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.score_settings import (
    checks_of,
    engine_of,
    load_of,
    prompt_file,
    repeats_of,
    resolved_arm,
    sources_of,
    template_options,
)
from eyas.recipes.stage import MANIFEST, Stage, output_fingerprint, read_manifest, refresh_files, without
from eyas.recipes.tracked import tracking_settings

if TYPE_CHECKING:
    from eyas.eval.lossless.run import Predict
    from eyas.eval.settings import Subject

MORE_STARTS = ("starts_per_arm", "budget_minutes")
"""Settings by which a session is only longer: its finished starts stay when they change."""


def score_stage(run: Run) -> Stage:
    """Real vLLM with and without the head, and the report on it."""
    head_dir = scored_head(run)
    name = run.directory("score").name
    settings = score_settings(run)
    inputs = score_inputs(run, head_dir)

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.eval.score import score

        subject = _subject(run, head_dir)
        adopt_starts(run.directory("score"), out_dir, settings=settings, inputs=inputs)
        counts = score(
            out_dir,
            subject=subject,
            sources=sources_of(run),
            load=load_of(run.recipe.score),
            repeats=repeats_of(run.recipe.score),
            engine=engine_of(run.recipe.score),
            checks=checks_of(run.recipe.score),
            predict=_predict(run, head_dir),
            context=score_context(run),
            say=lambda line: typer.echo(f"score: {line}"),
        )
        if scores_own_head(run.recipe):
            _track_report(run, out_dir)
        return counts

    return Stage(
        name=name,
        settings=settings,
        inputs=inputs,
        body=body,
        refresh=lambda directory: _refresh_report(run, directory),
    )


def only_arm(recipe: Recipe, name: str) -> Recipe:
    """`recipe` that measures one of its arms, and plain decoding, in a directory of its own.

    Raises:
        ValueError: the recipe has no such arm.
    """
    score = recipe.score
    arms = [f"k{length}" for length in score.draft_lengths] + list(score.arms)
    if name not in arms:
        raise ValueError(f"--arm {name}: the recipe has no such arm; it has {', '.join(arms)}")
    lengths = tuple(length for length in score.draft_lengths if name == f"k{length}")
    own = {
        "draft_lengths": lengths,
        "arms": {} if lengths else {name: score.arms[name]},
        "schedule": False,
        "only": name,
    }
    return recipe.model_copy(update={"score": score.model_copy(update=own)})


def scored_head(run: Run) -> Path | None:
    """The head directory that is measured; None when only other arms are."""
    if not run.recipe.score.draft_lengths:
        return None
    given = run.recipe.score.head
    return run.directory("export") if given is None else Path(given).expanduser()


def score_settings(run: Run) -> dict[str, Any]:
    """The settings that change what is measured, with machine-dependent defaults filled in."""
    score = run.recipe.score
    return without(score.model_dump(mode="json"), {"timeout_s", "head", "only"}) | {
        "threads": score.threads or available_cores(),
        "template_options": template_options(run),
    }


def score_inputs(run: Run, head_dir: Path | None) -> dict[str, str]:
    """Fingerprints of everything that the stage reads."""
    inputs = {"target": run.target_fingerprint, "conversations": fingerprint_file(run.conversations)}
    if head_dir is not None:
        own = scores_own_head(run.recipe)
        inputs["head"] = output_fingerprint(head_dir) if own else head_fingerprint(head_dir)
    for name, prompts in run.recipe.score.prompt_sets.items():
        inputs[f"prompt set {name}"] = fingerprint_file(prompt_file(name, prompts.path))
    return inputs


def adopt_starts(finished: Path, out_dir: Path, *, settings: dict[str, Any], inputs: dict[str, str]) -> None:
    """Begin with the starts of a finished session that differs from this one in its number of starts only.

    The session's id comes along, so that the longer session is the shorter one continued.
    """
    if any((out_dir / "starts").glob("*")) or not (finished / MANIFEST).is_file():
        return
    manifest = read_manifest(finished)
    same = without(manifest["settings"], MORE_STARTS) == json.loads(json.dumps(without(settings, MORE_STARTS)))
    if not same or manifest["inputs"] != inputs:
        return
    for name in ("starts", "instrument", "lossless", "open_loop"):
        if (finished / name).is_dir():
            shutil.copytree(finished / name, out_dir / name, dirs_exist_ok=True)
    shutil.copy2(finished / "session.json", out_dir / "session.json")


def _subject(run: Run, head_dir: Path | None) -> Subject:
    """What is measured. A head that the engine could not serve on this target is refused here, before any engine starts."""
    from eyas.eval.settings import Subject

    score, trust = run.recipe.score, run.recipe.target.trust_remote_code
    method = None
    if head_dir is not None:
        method = servable_kind(head_dir, target_dir=run.target_dir, trust_remote_code=trust)
    return Subject(
        target_dir=run.target_dir,
        trust_remote_code=trust,
        head_dir=head_dir,
        method=method,
        draft_lengths=score.draft_lengths,
        others={name: resolved_arm(config) for name, config in score.arms.items()},
        schedule=score.schedule,
    )


def _predict(run: Run, head_dir: Path | None) -> Predict | None:
    """Offline acceptance of the head at its longest chain."""
    from eyas.heads.prediction import acceptance_predictor

    score = run.recipe.score
    if head_dir is None:
        return None
    return acceptance_predictor(
        head_dir,
        target_dir=run.target_dir,
        draft_length=max(score.draft_lengths),
        dtype=score.lossless.dtype,
        trust_remote_code=run.recipe.target.trust_remote_code,
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
    own = scores_own_head(run.recipe)
    made = stage_names(run.recipe, last="export") if own else data_stage_names(run.recipe)
    manifests = {name: read_manifest(run.directory(name)) for name in made}
    head = scored_head(run)
    return {
        "name": run.recipe.name,
        "head": None if head is None else str(head),
        "training": _training(run) if own else {"metrics": [], "heldout": None},
        "recipe": run.recipe.model_dump(mode="json"),
        "target": {"directory": str(run.target_dir), "fingerprint": run.target_fingerprint},
        "stages": {name: {key: found[key] for key in ("counts", "seconds")} for name, found in manifests.items()},
    }


def _training(run: Run) -> dict[str, Any]:
    """Metrics of the training, and what it measured on held-out conversations at the end (heldout.json), if it did."""
    from eyas.train.tracking import METRICS_NAME, read_metrics

    directory = run.directory("train")
    heldout = directory / "heldout.json"
    return {
        "metrics": read_metrics(directory / METRICS_NAME),
        "heldout": read_json(heldout) if heldout.is_file() else None,
    }
