"""Time limits that no job could use, said before a job waits for them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml

from eyas.recipes.slurm_limits import measured_rate, seconds_of
from tests import tiny
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


def trained(directory: Path, *, rate: float) -> None:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 10, "tokens_per_second": rate}) + "\n")


def limits(shared: Path, *words: str, time: str = "30", code: int = 0) -> str:
    """What is said of a training's time limit; 30 minutes leave 1380 s of training."""
    command = ["slurm", "submit", str(shared / "tiny.yaml"), "train.batch_tokens=4000", "--stage", "train"]
    return eyas(*command, "--time", time, *words, code=code)


def test_a_limit_shorter_than_a_checkpoint_interval(shared: Path) -> None:
    trained(shared / "run" / "train.partial", rate=2000.0)
    assert measured_rate(shared / "run") == 2000.0
    said = limits(shared, "train.checkpoint_every=1000", code=2)
    assert (
        "leaves 1380 s of training, and train.checkpoint_every=1000 steps take 2000 s or more (2,000 tokens/s" in said
    )
    assert limits(shared, "train.checkpoint_every=600").startswith("train: job")


def test_before_anything_was_trained_it_says_that_it_does_not_know(shared: Path) -> None:
    said = limits(shared, time="1:00:00")
    assert "whether a checkpoint fits into --time 1:00:00 is not checked: nothing was trained in" in said
    assert "name the nodes' hardware" in said


def test_an_estimate_that_cannot_be_made_says_why(shared: Path) -> None:
    assert "the target is not known here" in limits(shared, "--hardware", "h100")
    assert "--hardware h1000: not known; choose one of" in limits(shared, "--hardware", "h1000", "--dry-run", code=2)
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--hardware", "h100")
    assert said.startswith("train: no --time is given")


def test_before_anything_was_trained_named_hardware_gives_an_estimate(shared: Path) -> None:
    """That of `eyas plan`, for all devices of the job; what not even their full peak allows is refused."""
    shutil.rmtree(shared / "target")
    tiny.write_target(shared / "target")
    tiny.write_conversation_file(shared / "chats.jsonl", train=8, heldout=2)
    site = yaml.safe_load((shared / "site.yaml").read_text()) | {
        "hardware": "h100",
        "gpus_per_node": 8,
        "cpus_per_task": 32,
    }
    (shared / "site.yaml").write_text(yaml.safe_dump(site))
    layers = "features.capture_layers=[1,2,3]"
    planned = eyas("plan", str(shared / "tiny.yaml"), layers, "train.epochs=3")
    flops, tokens = (
        float(re.search(pattern, planned)[1].replace(",", ""))  # type: ignore[index]
        for pattern in (r"FLOPs: .* train ([\d.e+]+)", r"tokens: +([\d,]+) in")
    )
    expected = tokens * 3 / (flops / (0.25 * 989e12 * 16))
    said = limits(shared, layers, "train.epochs=3", "--nodes", "2")
    match = re.search(r"by estimate \d+ s from checkpoint to checkpoint \(([\d,]+) tokens/s, 16 x h100\)", said)
    assert match is not None, said
    assert float(match[1].replace(",", "")) == pytest.approx(expected, rel=0.01)
    assert said.splitlines()[0].endswith("--time leaves 1380 s: fits")
    slow = f"train.checkpoint_every={round(2 * 1380 * expected / 4000)}"
    assert "--time leaves 1380 s: does NOT fit" in limits(shared, layers, slow, "--nodes", "2")
    never = f"train.checkpoint_every={round(5 * 1380 * expected / 4000)}"
    refused = limits(shared, layers, never, "--nodes", "2", code=2)
    assert re.search(r"take 17\d\d s or more \([\d,]+ tokens/s, 16 x h100 at their peak\)", refused), refused


def test_of_data_that_are_elsewhere_the_share_of_answers_bounds_the_interval(shared: Path) -> None:
    """All tokens answers takes longest, none takes least: only what is too long even so is refused."""
    shutil.rmtree(shared / "target")
    tiny.write_target(shared / "target")
    elsewhere = ("features.capture_layers=[1,2,3]", "data.conversations=null", "data.sources=[{path: org/chats}]")
    on = ("--hardware", "h100")
    assert "the tokens are not known before `eyas prepare`" in limits(shared, *elsewhere, *on)
    few = (*elsewhere, "data.max_train_tokens=1000", *on)
    said = limits(shared, *few)
    match = re.search(r"by estimate at most \d+ s .* \(([\d,]+) tokens/s, 1 x h100, were all tokens answers\)", said)
    assert match is not None, said
    assert said.splitlines()[0].endswith("--time leaves 1380 s: fits")
    slowest = float(match[1].replace(",", ""))
    long = f"train.checkpoint_every={round(2 * 1380 * slowest / 4000)}"
    assert "--time leaves 1380 s: may NOT fit" in limits(shared, *few, long)
    never = f"train.checkpoint_every={round(200 * 1380 * slowest / 4000)}"
    assert "1 x h100 at their peak" in limits(shared, *few, never, code=2)


def test_more_nodes_take_less_time(shared: Path) -> None:
    interval = "train.checkpoint_every=1000"
    limits(shared, interval)
    trained(shared / "run" / "train.partial", rate=2000.0)
    assert "steps take 2000 s or more" in limits(shared, interval, code=2)
    limits(shared, interval, "--nodes", "2")


def test_each_combination_of_a_sweep_has_its_own_interval(shared: Path) -> None:
    swept = recipe_settings(shared, train={"batch_tokens": 4000}, sweep={"train.checkpoint_every": [10, 1000]})
    (shared / "tiny.yaml").write_text(yaml.safe_dump(swept))
    trained(shared / "run" / "sweep" / "0" / "train", rate=2000.0)
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--time", "30", code=2)
    assert "train.checkpoint_every=1000 steps take 2000 s or more" in said
