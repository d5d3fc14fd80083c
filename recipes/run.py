"""A run: a recipe with its target found, the names of its stages and where each keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from eyas.heads.files import fingerprint
from eyas.recipes.schema import Recipe

STAGE_NAMES: tuple[str, ...] = ("prepare", "extract", "train", "export", "score")
"""Stages a user can name as the last one, in order; `data_stage_names` come before them."""

CONVERSATIONS_FILE = "conversations.jsonl"
EVALUATION_PROMPTS = "evaluation_prompts.jsonl"
STATES_DIRECTORY = "states"
"""Inside the regenerate stage: hidden states of the pass that generated the answers."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recipe with everything that is known before its first stage.

    Attributes:
        not_the_target: why `target_dir` is a packaged config and not the target itself; None where it is the target.
    """

    recipe: Recipe
    run_dir: Path
    target_dir: Path
    target_fingerprint: str
    not_the_target: str | None = None

    def directory(self, stage: str) -> Path:
        """Where a stage's files lie; the extract stage is named after what it makes.

        A head from elsewhere, and arms without a head, are measured in directories of their own, so that the run's own
        measurement stays.
        """
        if stage == "score":
            return self.run_dir / self._score_name()
        return self.run_dir / ("features" if stage == "extract" else stage)

    def _score_name(self) -> str:
        score = self.recipe.score
        name = "score"
        if score.head is not None:
            head = Path(score.head).expanduser().resolve()
            name = f"score-{head.name}-{fingerprint(str(head))[:6]}"
        elif not score.draft_lengths and score.only is None:
            name = "score-without-head"
        return name if score.only is None else f"{name}-{score.only}"

    @property
    def conversations(self) -> Path:
        """The conversation file to prepare: with the target's answers when they were made anew, or as collected."""
        return self.directory("regenerate" if self.recipe.data.regenerate else "collect") / CONVERSATIONS_FILE


def scores_own_head(recipe: Recipe) -> bool:
    """Whether the score stage measures the head that this run trains, and not one from elsewhere or none at all."""
    return recipe.score.head is None and bool(recipe.score.draft_lengths)


def data_stage_names(recipe: Recipe) -> list[str]:
    """Names of the stages that make the conversations of `recipe`."""
    own = ["synthesise"] if recipe.data.self_prompts.count else []
    return [*own, "collect", *(["regenerate"] if recipe.data.regenerate else [])]


def stage_names(recipe: Recipe, *, last: str) -> list[str]:
    """Names of the stages of `recipe` up to and including `last`.

    Raises:
        ValueError: the recipe has no such stage.
    """
    assert last in STAGE_NAMES, last
    names = list(STAGE_NAMES[: STAGE_NAMES.index(last) + 1])
    if recipe.features.mode == "online" and "extract" in names:
        if last == "extract":
            raise ValueError(
                "features.mode=online has no extract stage, since the target runs while the head trains; run `eyas prepare` "
                "or `eyas train`"
            )
        names.remove("extract")
    if last == "score" and (recipe.score.only is not None or not scores_own_head(recipe)):
        names = ["score"]  # nothing is made before it is measured
    return [*data_stage_names(recipe), *names]


def open_run(recipe: Recipe) -> Run:
    """Find the target of `recipe` (a package target is unpacked, a hub target downloaded) and fingerprint it."""
    from eyas.heads.target_source import cache_root, resolve_target, target_fingerprint

    target_dir = resolve_target(recipe.target.model, revision=recipe.target.revision, cache_dir=cache_root())
    return Run(
        recipe=recipe,
        run_dir=recipe.run_directory,
        target_dir=target_dir,
        target_fingerprint=target_fingerprint(target_dir),
    )


def plan_run(recipe: Recipe) -> Run:
    """A run as far as it is known without weights: of a hub target only config and tokenizer are fetched. Where the hub
    cannot be asked, the config of a well-known target comes from the package."""
    from eyas.heads.hub import HubUnavailable
    from eyas.heads.target_source import cache_root, resolve_target
    from eyas.recipes.packaged_targets import packaged_targets

    target, reason = recipe.target, None
    try:
        directory = resolve_target(target.model, revision=target.revision, cache_dir=cache_root(), weights=False)
    except HubUnavailable as error:
        packaged = packaged_targets().get(target.model)
        if packaged is None or target.revision is not None:
            raise
        directory, reason = packaged, str(error)
    return Run(
        recipe=recipe,
        run_dir=recipe.run_directory,
        target_dir=directory,
        target_fingerprint="unknown",
        not_the_target=reason,
    )


def available_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))
