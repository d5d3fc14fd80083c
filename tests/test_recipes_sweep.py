"""Sweeps: every combination a run of its own, what they share made once, one table at the end."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eyas.heads.files import read_json, write_json
from eyas.recipes.cli import app
from eyas.recipes.load import dump_recipe, load_recipe
from eyas.recipes.pipeline import run_until
from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_jobs import STAGES, plan_sweep
from eyas.recipes.sweep import link_stages, point_directory, ready_point, sweep_points, write_points
from eyas.recipes.sweep_table import write_table
from eyas.slurm.site import Site
from tests import tiny
from tests.slurm_runs import eyas, options
from tests.wandb_offline import inspected, offline_runs

SWEEP = {"train.learning_rate": [1e-3, 2e-3], "head.draft_vocab_size": [64, 128]}


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    values = {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "target": {"model": str(folder / "target")},
        "data": {"conversations": str(folder / "chats.jsonl"), "max_length": 64},
        "features": {"capture_layers": list(tiny.CAPTURE_LAYERS), "dtype": "float32", "batch_tokens": 512},
        "sweep": SWEEP,
    }
    return Recipe.model_validate(values | changes)


def test_points_are_all_combinations_the_last_key_fastest(tmp_path: Path) -> None:
    points = sweep_points(recipe_of(tmp_path))
    assert [tuple(point.values.values()) for point in points] == [(1e-3, 64), (1e-3, 128), (2e-3, 64), (2e-3, 128)]
    third = points[2].recipe
    assert (third.train.learning_rate, third.head.draft_vocab_size, third.sweep) == (2e-3, 64, {})
    assert third.run_directory == tmp_path / "run" / "sweep" / "2"
    assert third.name == "tiny-learning_rate-0.002-draft_vocab_size-64"
    assert {point.recipe.tracking.group for point in points} == {"tiny"}
    assert points[2].label == "learning_rate=0.002, draft_vocab_size=64"


def test_a_section_is_swept_as_a_whole(tmp_path: Path) -> None:
    """So that one loss takes the place of another, without the combination that has neither."""
    values = [{"forward_kl": 1.0}, {"forward_kl": 0.0, "log_acceptance": 1.0}]
    recipe = recipe_of(tmp_path, sweep={"train.losses": values}, train={"losses": {"reverse_kl": 0.5}})
    first, second = sweep_points(recipe)
    assert (first.recipe.train.losses.forward_kl, first.recipe.train.losses.log_acceptance) == (1.0, 0.0)
    assert (second.recipe.train.losses.forward_kl, second.recipe.train.losses.log_acceptance) == (0.0, 1.0)
    assert second.recipe.train.losses.reverse_kl == 0.5  # what a value does not name stays
    assert second.label == "losses=forward_kl=0.0 log_acceptance=1.0"
    assert second.recipe.name == "tiny-losses-forward_kl-0.0-log_acceptance-1.0"
    assert load_recipe(dumped(tmp_path, recipe)) == recipe


def dumped(folder: Path, recipe: Recipe) -> Path:
    path = folder / "dumped.yaml"
    path.write_text(dump_recipe(recipe))
    return path


def test_the_jobs_of_a_sweep(tmp_path: Path) -> None:
    site, wanted = Site(gpus_per_node=8), options(at_once=2, extract_tasks=3)
    links = plan_sweep(recipe_of(tmp_path), tmp_path, stages=STAGES, site=site, options=wanted)
    assert [(link.stage, link.after, link.condition) for link in links] == [
        ("prepare", None, "afterok"),
        ("extract", "prepare", "afterok"),
        ("seal", "extract", "afterok"),
        ("link", "seal", "afterok"),
        ("train", "link", "afterok"),
        ("table", "train", "afterany"),  # a head that diverged costs its row, not the table
    ]
    jobs = {link.stage: link.job for link in links}
    assert (jobs["extract"].array, jobs["train"].array) == ("0-2%2", "0-3%2")
    assert (jobs["link"].resources.gpus_per_node, jobs["table"].resources.gpus_per_node) == (0, 0)
    own = recipe_of(tmp_path, sweep={"features.capture_layers": [[1, 2, 3], [2, 4, 5]]})
    jobs = {link.stage: link.job for link in plan_sweep(own, tmp_path, stages=STAGES, site=site, options=wanted)}
    assert jobs["link"].resources.gpus_per_node == 8  # it extracts what combinations do not share


def test_a_sweep_ends_with_training(tmp_path: Path) -> None:
    path = dumped(tmp_path, recipe_of(tmp_path))
    said = eyas("slurm", "submit", str(path), "--stage", "export", "--dry-run", code=2)
    assert "a sweep ends with training and a table" in said
    assert f"{tmp_path}/run/sweep/N/recipe.yaml --stage export" in said


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"train.learning_rte": [1.0]}, "train.learning_rte: unknown key; did you mean train.learning_rate?"),
        ({"train.learning_rate": ["fast"]}, "train.learning_rate: got fast"),
        ({"train.learning_rate": [1e-3, -1.0]}, "train.learning_rate"),
        ({"train.losses": [1.0]}, "train.losses: is a section; a value of it is {field: value}, not 1.0 (number)"),
        ({"train.losses": [{"forward_lk": 1.0}]}, "train.losses.forward_lk: unknown key"),
        ({"train.losses": [{"forward_kl": 0}]}, "all losses are 0"),
    ],
)
def test_a_combination_that_the_schema_refuses(tmp_path: Path, sweep: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sweep_points(recipe_of(tmp_path, sweep=sweep))


@pytest.mark.parametrize(
    "sweep",
    [
        {"run_dir": ["a"]},
        {"score.max_tokens": [1]},
        {"tracking.project": ["a"]},
        {"seed": []},
        {"seed": [1, 1]},
        {"train.losses": [{"top_k": 1.0}], "train.losses.top_k": [1.0, 2.0]},
    ],
)
def test_a_sweep_that_is_none(tmp_path: Path, sweep: dict[str, list[Any]]) -> None:
    with pytest.raises(ValueError, match="sweep"):
        recipe_of(tmp_path, sweep=sweep)


def test_a_run_of_a_recipe_with_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`eyas sweep RECIPE` trains them all"):
        run_until(recipe_of(tmp_path), last="train", say=lambda _: None)
    with pytest.raises(ValueError, match="the recipe has no sweep"):
        sweep_points(recipe_of(tmp_path, sweep={}))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base run's data and features."""
    folder = tmp_path_factory.mktemp("swept")
    tiny.write_target(folder / "target")
    tiny.write_conversation_file(folder / "chats.jsonl", train=8, heldout=2)
    run_until(recipe_of(folder, sweep={}), last="extract", say=lambda _: None)
    return folder


def test_what_a_combination_does_not_change_is_linked(prepared: Path) -> None:
    recipe = recipe_of(prepared)
    first, *_ = write_points(recipe)
    assert link_stages(recipe, first) == ["collect", "prepare", "features"]
    assert link_stages(recipe, first) == ["collect", "prepare", "features"]
    directory = point_directory(recipe, 0)
    assert (directory / "features").resolve() == prepared / "run" / "features"
    assert yaml.safe_load((directory / "recipe.yaml").read_text())["train"]["learning_rate"] == 1e-3


def test_what_it_changes_is_made_anew_and_shared_with_the_next(prepared: Path) -> None:
    sweep = {"features.capture_layers": [[2, 4, 5]], "train.learning_rate": [1e-3, 2e-3]}
    recipe = recipe_of(prepared, sweep=sweep)
    first, second = write_points(recipe)
    assert link_stages(recipe, first)[-1] == "prepare"
    said: list[str] = []
    for point in (first, second):
        ready_point(recipe, point, say=said.append)
    own, linked = (point_directory(recipe, point.number) / "features" for point in (first, second))
    assert not own.is_symlink()
    assert linked.resolve() == own
    assert said[-1].endswith("collect, prepare, features shared")


def test_a_link_to_what_no_longer_fits_is_taken_away(prepared: Path) -> None:
    shutil.rmtree(prepared / "run" / "sweep")
    recipe = recipe_of(prepared, sweep={"train.learning_rate": [1e-3]})
    link_stages(recipe, *write_points(recipe))
    other = recipe_of(prepared, sweep={"features.batch_tokens": [256]})
    assert link_stages(other, *write_points(other)) == ["collect", "prepare"]
    assert not (point_directory(other, 0) / "features").exists()
    assert (prepared / "run" / "features").is_dir()


def test_the_command_trains_every_combination_and_writes_the_table(prepared: Path, tmp_path: Path) -> None:
    values = recipe_of(prepared).model_dump(mode="json")
    values["train"] |= {"epochs": 1, "batch_tokens": 64, "precision": "fp32", "evaluate_every": 1000, "ttt_steps": 1}
    values["sweep"] = {"train.learning_rate": [1e-3, 5e-2]}
    values["tracking"] |= {"trackers": ["wandb"], "mode": "offline"}
    path = tmp_path / "swept.yaml"
    path.write_text(yaml.safe_dump(values))
    result = CliRunner().invoke(app, ["sweep", str(path)])
    assert result.exit_code == 0, result.output
    found = read_json(prepared / "run" / "sweep" / "sweep.json")
    assert [run["values"] for run in found["runs"]] == [{"train.learning_rate": 1e-3}, {"train.learning_rate": 5e-2}]
    assert all(run["heldout_tau"] >= 1 for run in found["runs"])
    assert (prepared / "run" / "sweep" / "sweep.svg").read_text().startswith("<?xml")
    assert result.output.count("sweep ") >= 2
    assert [_in_wandb(prepared / "run" / "sweep" / run) for run in "01"] == [
        ("tiny", "tiny-learning_rate-0.001", 1e-3),
        ("tiny", "tiny-learning_rate-0.05", 5e-2),
    ]


def _in_wandb(run_dir: Path) -> tuple[str, str, float]:
    """Group, name and learning rate, as wandb's own reader finds them in the run that training left."""
    (run,) = offline_runs(run_dir / "train")
    described = next(row["run"] for row in inspected(run) if row["type"] == "run")
    config = inspected(run, "--summary")[0]["config"]
    return described["run_group"], described["display_name"], config["recipe"]["train"]["learning_rate"]


def test_the_table_has_the_best_first_and_names_what_is_missing(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    for number, tau in ((0, 1.5), (3, 1.9)):
        train = point_directory(recipe, number) / "train"
        train.mkdir(parents=True)
        found = {"heldout_tau": tau, "heldout_marginal": [0.4, 0.1], "chain_length": 2, "heldout_conversations": 4}
        write_json(train / "heldout.json", found)
        write_json(train / "manifest.json", {"seconds": 12.0})
    lines = write_table(recipe).read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and "---" not in line]
    assert rows[0] == [
        "run",
        "train.learning_rate",
        "head.draft_vocab_size",
        "held-out tau",
        "marginal acceptance",
        "training, s",
    ]
    assert rows[1] == ["3", "0.002", "128", "1.900", "0.400, 0.100", "12"]
    assert rows[2][0] == "0"
    assert {row[3] for row in rows[3:]} == {"not trained"}
    with pytest.raises(ValueError, match="no combination"):
        write_table(recipe_of(tmp_path, run_dir=str(tmp_path / "other")))
