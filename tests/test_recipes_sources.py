"""Presets and the places that a recipe's sources mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.recipes.cli import app
from eyas.recipes.load import dump_recipe, load_recipe
from eyas.recipes.schema_data import Source
from eyas.recipes.sources import expand, find_preset, local_files, place_of, presets, source_identity


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_list_of_sources(name: str) -> None:
    preset = presets()[name]
    assert preset["kind"] in ("training", "evaluation")
    assert preset["about"] and preset["licence"] and preset["checked"]
    sources = expand(Source(preset=name))
    assert [place_of(source).path for source in sources] == [entry["path"] for entry in preset["sources"]]
    assert len({source.name for source in sources}) == len(sources)


def test_a_recipe_changes_single_settings_of_a_preset() -> None:
    (changed,) = expand(Source(preset="ultrachat-200k", limit=5, split="test_sft"))
    (plain,) = expand(Source(preset="ultrachat-200k"))
    assert (changed.limit, changed.split, changed.path) == (5, "test_sft", plain.path)
    assert plain.split == "train_sft"
    assert plain.name == "ultrachat-200k"


def test_the_weight_of_a_mix_is_shared_out() -> None:
    parts = expand(Source(preset="eagle3-paper", weight=3.0))
    assert [part.weight for part in parts] == [1.5, 1.5]
    assert [part.weight for part in expand(Source(preset="eagle3-paper"))] == [None, None]
    with pytest.raises(ValueError, match="is a mix of 2 sources, which takes a weight and no limit"):
        expand(Source(preset="eagle3-paper", limit=5))


def test_a_misspelt_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no preset 'ultrachat'; did you mean ultrachat-200k"):
        find_preset("ultrachat")
    result = CliRunner().invoke(app, ["presets", "gsm8"])
    assert (result.exit_code, "did you mean gsm8k" in result.stderr) == (2, True)
    assert "openai/gsm8k" in CliRunner().invoke(app, ["presets", "gsm8k"]).stdout
    assert len(CliRunner().invoke(app, ["presets"]).stdout.splitlines()) == len(presets())


def test_files_are_found_and_missing_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(name)
    assert local_files(Source(path=str(tmp_path / "*.jsonl"))) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert local_files(Source(path="a.jsonl")) == [Path("a.jsonl")]
    assert [path.name for path in local_files(Source(path="builtin:topics.txt"))] == ["topics.txt"]
    for hub in ("org/chats", "package:chitchat-dataset", "https://host/file.jsonl"):
        assert local_files(Source(path=hub)) == []
    for missing in ("c.jsonl", "./c", "data/*.jsonl", "/nowhere/chats.parquet", "nothing"):
        with pytest.raises(ValueError, match=r"data\.sources: no file"):
            local_files(Source(path=missing))


def test_the_identity_follows_content_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    first = source_identity(Source(path=str(path)))
    assert source_identity(Source(path=str(path), limit=1)) != first
    path.write_text("two")
    assert source_identity(Source(path=str(path))) != first
    assert source_identity(Source(path="org/a", revision="1")) != source_identity(Source(path="org/a", revision="2"))
    with pytest.raises(ValueError, match="package 'no-such-package' is not installed"):
        source_identity(Source(path="package:no-such-package"))


def test_a_dumped_recipe_means_the_same_sources(tmp_path: Path) -> None:
    """A dump writes every field, and a default in it must not hide what the preset says."""
    recipe = load_recipe("smollm2-135m-own-answers-cpu", overrides=["data.sources=[{preset: eagle3-paper, weight: 2}]"])
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    again = load_recipe(path)
    assert [expand(source) for source in again.data.sources] == [expand(source) for source in recipe.data.sources]


def test_nested_directories_and_globs_are_fingerprinted(tmp_path: Path) -> None:
    nested = tmp_path / "set" / "data" / "train-0.parquet"
    nested.parent.mkdir(parents=True)
    nested.write_text("one")
    for path in (tmp_path / "set", tmp_path / "**" / "*.parquet"):
        source = Source(path=str(path))
        assert local_files(source) == [nested]
        before = source_identity(source)
        nested.write_text(nested.read_text() + "x")
        assert source_identity(source) != before
    (tmp_path / "x[1].jsonl").write_text("{}")
    assert local_files(Source(path=str(tmp_path / "x[1].jsonl"))) == [tmp_path / "x[1].jsonl"]
