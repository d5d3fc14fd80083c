"""The stage that writes the head in the form that is served, with its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.heads.files import fingerprint_file, read_json
from eyas.recipes.run import Run
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import Stage, output_fingerprint, read_manifest
from eyas.recipes.train_stages import HARMLESS


def export_stage(run: Run) -> Stage:
    """The head in the form that is served, in the type it is measured in, with its model card."""
    recipe = run.recipe
    train_dir, dtype, form = run.directory("train"), recipe.score.dtype, recipe.export.format

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.heads.formats.export import export_head
        from eyas.heads.target import DTYPES

        return export_head(
            out_dir,
            head_dir=train_dir / "head",
            target_dir=run.target_dir,
            dtype=DTYPES[dtype],
            to=form,
            verifier=_target_name(run),
            draft_tokens=recipe.score.main_draft_length,
            card=_card(run),
            trust_remote_code=recipe.target.trust_remote_code,
        )

    # The card tells all of these, so a change of one makes the export stale.
    settings = recipe.export.model_dump(mode="json") | {
        "dtype": dtype,
        "target": recipe.target.model_dump(mode="json"),
        "draft_tokens": recipe.score.main_draft_length,
        "name": recipe.name,
        "training": _told_settings(recipe),
    }
    inputs = {
        "target": run.target_fingerprint,
        "head": output_fingerprint(train_dir, under="head/"),
        "heldout": fingerprint_file(train_dir / "heldout.json"),
        "conversations": read_manifest(run.directory("prepare"))["inputs"]["conversations"],
    }
    return Stage(name="export", settings=settings, inputs=inputs, body=body, describe=lambda counts: counts["warnings"])


def _target_name(run: Run) -> str:
    """What others can load the target by: its hub id, or else its directory here."""
    model = run.recipe.target.model
    is_hub_id = ":" not in model and not Path(model).expanduser().is_dir()
    return model if is_hub_id else str(run.target_dir)


def _told_settings(recipe: Recipe) -> dict[str, Any]:
    """What a model card tells about the training, in the recipe's own names."""
    silent = HARMLESS
    sections = {"head": recipe.head, "init": recipe.init, "train": recipe.train}
    return {"seed": recipe.seed} | {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in section.model_dump(mode="json").items()
        if key not in silent
    }


def _card(run: Run) -> str:
    from eyas.heads.card import model_card
    from eyas.heads.formats.read import read_files

    recipe, train_dir = run.recipe, run.directory("train")
    heldout = read_json(train_dir / "heldout.json")
    return model_card(
        name=recipe.name,
        base_model=recipe.target.model if ":" in recipe.target.model else _target_name(run),
        revision=recipe.target.revision,
        config=read_files(train_dir / "head").config,
        data_fingerprint=read_manifest(run.directory("prepare"))["inputs"]["conversations"],
        training=_told_settings(recipe),
        heldout=heldout,
        coverage=heldout["draft_coverage_heldout"],
        to=recipe.export.format,
        draft_tokens=recipe.score.main_draft_length,
    )
