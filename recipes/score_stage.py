"""The last stage of a run: the head in real vLLM beside plain decoding and other ways of drafting."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eyas.heads.files import fingerprint_file, read_json, write_json
from eyas.recipes.run import Run, available_cores, scores_own_head
from eyas.recipes.schema import Recipe
from eyas.recipes.score_context import measured_context, score_context
from eyas.recipes.score_continue import adopt_starts, is_same_grid
from eyas.recipes.score_heads import arm_fingerprints, head_fingerprint, require_servable_arm, servable_head
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
from eyas.recipes.stage import Stage, output_fingerprint, refresh_files, without
from eyas.recipes.tracked import tracking_settings

if TYPE_CHECKING:
    from eyas.eval.lossless.run import Predict
    from eyas.eval.settings import Subject
    from eyas.heads.config import HeadConfig


def score_stage(run: Run) -> Stage:
    """Real vLLM with and without the head, and the report on it."""
    head_dir = scored_head(run)
    name = run.directory("score").name
    settings = score_settings(run)
    inputs = score_inputs(run, head_dir)

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.eval.score import score

        head = _servable(run, head_dir)
        adopt_starts(run.directory("score"), out_dir, settings=settings, inputs=inputs)
        counts = score(
            out_dir,
            subject=_subject(run, head_dir, method=None if head is None else head.kind),
            sources=sources_of(run),
            load=load_of(run.recipe.score),
            repeats=repeats_of(run.recipe.score),
            engine=engine_of(run.recipe.score),
            checks=checks_of(run.recipe.score),
            predict=_predict(run, head_dir),
            context=score_context(run, head_dir) | measured_context(run, head_dir=head_dir, head=head),
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
        precious="starts/*.jsonl",
        continues=partial(is_same_grid, settings, inputs),
    )


def arm_numbered(recipe: Recipe, number: int) -> str:
    """The name of an arm by its number, from 0: the tasks of an array know only that.

    Raises:
        ValueError: the recipe has fewer arms.
    """
    arms = recipe.score.arm_names
    if number >= len(arms):
        raise ValueError(f"--arm-number {number}: the recipe has {len(arms)} arms, from 0: {', '.join(arms)}")
    return arms[number]


def only_arm(recipe: Recipe, name: str) -> Recipe:
    """`recipe` that measures one of its arms, and plain decoding, in a directory of its own.

    Raises:
        ValueError: the recipe has no such arm.
    """
    score, arms = recipe.score, recipe.score.arm_names
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
    return inputs | arm_fingerprints(run.recipe.score.arms)


def _servable(run: Run, head_dir: Path | None) -> HeadConfig | None:
    """The measured head. What the engine could not serve on this target is refused here, before any engine starts."""
    trust = run.recipe.target.trust_remote_code
    for name, config in run.recipe.score.arms.items():
        require_servable_arm(name, config, target_dir=run.target_dir, trust_remote_code=trust)
    if head_dir is None:
        return None
    return servable_head(head_dir, target_dir=run.target_dir, trust_remote_code=trust)


def _subject(run: Run, head_dir: Path | None, *, method: str | None) -> Subject:
    from eyas.eval.settings import Subject

    score = run.recipe.score
    return Subject(
        target_dir=run.target_dir,
        trust_remote_code=run.recipe.target.trust_remote_code,
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

    told = read_json(directory / "context.json")
    context = told | json.loads(json.dumps(score_context(run, scored_head(run))))
    if told != context:
        write_json(directory / "context.json", context)
        build_report(directory)
        refresh_files(directory)
