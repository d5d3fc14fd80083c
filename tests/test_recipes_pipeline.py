"""The pipeline: order, staleness along the chain, and refusals before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.recipes import pipeline
from eyas.recipes.pipeline import run_until
from eyas.recipes.run import Run, available_cores, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import Stage, output_fingerprint


def make_recipe(folder: Path, **values: Any) -> Recipe:
    conversations = folder / "chats.jsonl"
    conversations.touch()
    base = {"name": "tiny", "run_dir": str(folder / "run"), "target": {"model": str(folder)}}
    return Recipe.model_validate(base | {"data": {"conversations": str(conversations)}} | values)


def counting_stage(name: str, before: str | None, log: list[str]) -> Any:
    """A stage that copies the seed, so that a new seed makes everything stale."""

    def build(run: Run) -> Stage:
        def body(out_dir: Path) -> dict[str, Any]:
            log.append(name)
            (out_dir / "seed").write_text(str(run.recipe.seed))
            return {}

        inputs = {before: output_fingerprint(run.directory(before))} if before else {}
        settings = {} if before else {"seed": run.recipe.seed}
        return Stage(name=run.directory(name).name, settings=settings, inputs=inputs, body=body)

    return build


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake stages that note their runs here."""
    done: list[str] = []
    names = ["collect", "prepare", "extract", "train"]
    stages = {name: counting_stage(name, before, done) for name, before in zip(names, [None, *names[:-1]], strict=True)}
    monkeypatch.setattr(pipeline, "STAGES", stages)
    monkeypatch.setattr(
        pipeline,
        "open_run",
        lambda recipe: Run(
            recipe=recipe, run_dir=recipe.run_directory, target_dir=tmp_path, target_fingerprint="target"
        ),
    )
    monkeypatch.setattr(pipeline, "require_head_possible", lambda _run: None)
    return done


def test_a_head_that_cannot_be_made_stops_the_run_before_any_stage(
    tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(_run: Run) -> None:
        raise ValueError("init.layer=random")

    monkeypatch.setattr(pipeline, "require_head_possible", impossible)
    for last in ("extract", "train"):
        with pytest.raises(ValueError, match=r"init\.layer=random"):
            run_until(make_recipe(tmp_path), last=last, say=lambda _line: None)
    assert log == []
    run_until(make_recipe(tmp_path), last="prepare", say=lambda _line: None)
    assert log == ["collect", "prepare"]


def test_the_second_run_does_nothing(tmp_path: Path, log: list[str]) -> None:
    lines: list[str] = []
    run_until(make_recipe(tmp_path), last="train", say=lines.append)
    assert log == ["collect", "prepare", "extract", "train"]
    assert lines[0] == "collect: running"
    lines.clear()
    run_until(make_recipe(tmp_path), last="train", say=lines.append)
    assert log == ["collect", "prepare", "extract", "train"]
    assert [line.partition(",")[0] for line in lines] == [
        "collect: skipped",
        "prepare: skipped",
        "features: skipped",
        "train: skipped",
    ]


def test_a_command_stops_at_its_stage_and_the_next_goes_on(tmp_path: Path, log: list[str]) -> None:
    run_until(make_recipe(tmp_path), last="prepare", say=lambda _: None)
    assert log == ["collect", "prepare"]
    run_until(make_recipe(tmp_path), last="train", say=lambda _: None)
    assert log == ["collect", "prepare", "extract", "train"]


def test_a_changed_setting_runs_everything_after_it(tmp_path: Path, log: list[str]) -> None:
    run_until(make_recipe(tmp_path), last="train", say=lambda _: None)
    run_until(make_recipe(tmp_path, seed=1), last="train", say=lambda _: None)
    assert log == ["collect", "prepare", "extract", "train"] * 2
    assert "seed: 1" in (tmp_path / "run" / "recipe.yaml").read_text()


def test_only_makes_its_own_stage_and_refuses_when_an_earlier_one_does_not_stand(
    tmp_path: Path, log: list[str]
) -> None:
    recipe = make_recipe(tmp_path)
    run_until(recipe, last="prepare", say=lambda _: None)
    with pytest.raises(
        ValueError, match=r"the extract stage of .* is missing or stale, and with --only no stage but train"
    ):
        run_until(recipe, last="train", say=lambda _: None, only=True)
    run_until(recipe, last="extract", say=lambda _: None, only=True)
    run_until(recipe, last="train", say=lambda _: None, only=True)
    assert log == ["collect", "prepare", "extract", "train"]
    with pytest.raises(ValueError, match="the collect stage"):
        run_until(make_recipe(tmp_path, seed=1), last="train", say=lambda _: None, only=True)
    assert len(log) == 4


def test_a_missing_conversation_file_is_refused_first(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, data={"conversations": str(tmp_path / "none.jsonl")})
    with pytest.raises(ValueError, match=r"data.sources: no file .*none\.jsonl"):
        run_until(recipe, last="train", say=lambda _: None)
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused_for_all_but_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="a launcher started 2 processes"):
        run_until(make_recipe(tmp_path), last="score", say=lambda _: None)
    assert not (tmp_path / "run").exists()


def test_data_stages_come_first(tmp_path: Path) -> None:
    def names(last: str, **values: Any) -> list[str]:
        return stage_names(make_recipe(tmp_path, **values), last=last)

    chats = str(tmp_path / "chats.jsonl")
    assert names("extract") == ["collect", "prepare", "extract"]
    assert names("prepare", data={"conversations": chats, "regenerate": True}) == ["collect", "regenerate", "prepare"]
    own = {"self_prompts": {"count": 5}, "regenerate": True}
    assert names("prepare", data=own) == ["synthesise", "collect", "regenerate", "prepare"]
    assert names("score", score={"head": "somewhere"}) == ["collect", "score"]
    assert names("train", features={"mode": "online"}) == ["collect", "prepare", "train"]
    with pytest.raises(ValueError, match="no extract stage"):
        names("extract", features={"mode": "online"})
    assert available_cores() >= 1


def test_scoring_reads_the_conversations_that_training_read(tmp_path: Path) -> None:
    def conversations(**data: Any) -> Path:
        recipe = make_recipe(tmp_path, data={"conversations": str(tmp_path / "chats.jsonl")} | data)
        return Run(recipe=recipe, run_dir=tmp_path, target_dir=tmp_path, target_fingerprint="t").conversations

    assert conversations() == tmp_path / "collect" / "conversations.jsonl"
    assert conversations(regenerate=True) == tmp_path / "regenerate" / "conversations.jsonl"
