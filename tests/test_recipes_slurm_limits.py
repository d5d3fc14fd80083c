"""Time limits that no job could use, said before a job waits for them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_checks import check_time, measured_rate, seconds_of
from tests.slurm_runs import eyas, recipe_settings, shared_folder


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return shared_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("1-02:30:05", 95405)),
        *((each, math.inf) for each in ("0", "UNLIMITED", "infinite")),
    ],
)
def test_time_limits(time: str, seconds: float) -> None:
    assert seconds_of(time) == seconds


def test_a_limit_shorter_than_a_checkpoint_interval(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(recipe_settings(tmp_path, train={"checkpoint_every": 1000, "batch_tokens": 4000}))
    folder = tmp_path / "run" / "train.partial"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 10, "tokens_per_second": 2000.0}) + "\n")
    rate = measured_rate(tmp_path / "run")
    assert rate == 2000.0
    step = recipe.train.batch_tokens / 2000.0
    with pytest.raises(
        ValueError, match=r"leaves 1380 s of training, and train.checkpoint_every=1000 steps take about 2000 s"
    ):
        check_time(recipe, time="30", signal_seconds=300, step_seconds=step)
    check_time(recipe, time="1:00:00", signal_seconds=300, step_seconds=step)
    check_time(recipe, time="30", signal_seconds=300, step_seconds=None)


def trained(directory: Path, *, rate: float) -> None:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 10, "tokens_per_second": rate}) + "\n")


def test_before_anything_was_trained_it_says_that_it_does_not_know(shared: Path) -> None:
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--time", "1:00:00")
    assert "whether a checkpoint fits into 1:00:00 is not checked: nothing was trained in" in said


def test_more_nodes_take_less_time(shared: Path) -> None:
    words = ["slurm", "submit", str(shared / "tiny.yaml"), "train.batch_tokens=4000", "train.checkpoint_every=1000"]
    words += ["--stage", "train", "--time", "30"]
    eyas(*words)
    trained(shared / "run" / "train.partial", rate=2000.0)
    assert "steps take about 2000 s" in eyas(*words, code=2)
    eyas(*words, "--nodes", "2")


def test_each_combination_of_a_sweep_has_its_own_interval(shared: Path) -> None:
    swept = recipe_settings(shared, train={"batch_tokens": 4000}, sweep={"train.checkpoint_every": [10, 1000]})
    (shared / "tiny.yaml").write_text(yaml.safe_dump(swept))
    trained(shared / "run" / "sweep" / "0" / "train", rate=2000.0)
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--time", "30", code=2)
    assert "train.checkpoint_every=1000 steps take about 2000 s" in said
