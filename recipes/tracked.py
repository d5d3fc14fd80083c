"""What a recipe says about trackers, for the stages that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.recipes.provenance import git_state
from eyas.recipes.run import Run

if TYPE_CHECKING:
    from eyas.train.tracking import TrackingSettings


def tracking_settings(run: Run, *, stage: str) -> TrackingSettings:
    """Where the curves of a run go besides metrics.jsonl, for a stage that works in its partial directory."""
    from eyas.train.tracking import TrackingSettings

    recipe, tracking = run.recipe, run.recipe.tracking
    return TrackingSettings(
        kinds=tracking.trackers,
        name=recipe.name,
        kept_in=run.run_dir / stage,
        project=tracking.project,
        entity=tracking.entity,
        group=tracking.group,
        tags=tracking.tags,
        mode=tracking.mode,
        config={"recipe": recipe.model_dump(mode="json"), "git": git_state()},
    )
