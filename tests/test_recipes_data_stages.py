"""Data stages: what makes them stale and what does not, extractors that join, and a report that follows its data."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.files import read_json, write_json, write_text
from eyas.recipes import feature_stage, score_stage
from eyas.recipes.generation_stages import regenerate_stage
from eyas.recipes.join import extract_part, join_extraction
from eyas.recipes.load import with_values
from eyas.recipes.pipeline import run_until
from eyas.recipes.run import Run, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.score_stage import arm_numbered, only_arm
from eyas.recipes.stage import read_manifest
from eyas.train.data.cut import Cut
from eyas.train.data.regenerate import TokenLimit
from tests import tiny
from tests.eval_records import write_session


def make_recipe(folder: Path, **values: Any) -> Recipe:
    base = {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "target": {"model": str(folder / "target")},
        "data": {"conversations": str(folder / "chats.jsonl"), "max_length": 64},
        "features": {"capture_layers": list(tiny.CAPTURE_LAYERS), "dtype": "float32", "batch_tokens": 256},
        "head": {"draft_vocab_size": 64},
    }
    return Recipe.model_validate(base | values)


def regenerated(folder: Path, **data: Any) -> str:
    """Fingerprint of the regenerate stage of a recipe that makes its own prompts."""
    own = {"self_prompts": {"count": 5}, "regenerate": True}
    recipe = make_recipe(folder, data=own | data)
    run = Run(recipe=recipe, run_dir=folder / "run", target_dir=folder, target_fingerprint="t")
    for name in ("conversations.jsonl", "evaluation_prompts.jsonl"):
        write_text(folder / "run" / "collect" / name, name)
    return regenerate_stage(run).fingerprint


def test_what_changes_answers_makes_them_stale(tmp_path: Path) -> None:
    plain = regenerated(tmp_path)
    for generation in ({"seed": 1}, {"temperature": [0.5, 0.7]}, {"max_tokens": 9}, {"truncated": "drop"}):
        assert regenerated(tmp_path, generation=generation) != plain
    assert regenerated(tmp_path, template_options={"enable_thinking": False}) != plain
    one = regenerated(tmp_path, generation={"follow_ups": 1})
    assert one != plain
    assert regenerated(tmp_path, generation={"follow_ups": 1}, guard={"ngram": 8}) != one, (
        "follow-ups are guarded by it"
    )
    assert regenerated(tmp_path, guard={"ngram": 8}) == plain
    few = regenerated(tmp_path, max_train_tokens=1000)
    assert few != plain, "no more is answered than is trained on"
    assert regenerated(tmp_path, max_train_tokens=1000, max_length=32) != few
    assert regenerated(tmp_path, max_length=32) == plain


def test_a_limit_of_training_limits_the_answers_and_the_output_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def regenerate(_out_dir: Path, **settings: Any) -> dict[str, Any]:
        asked.update(settings)
        return {"conversations": 7, "answer_tokens": 900, "not_needed": 13}

    monkeypatch.setattr("eyas.train.data.regenerate.regenerate", regenerate)
    monkeypatch.setattr("eyas.recipes.generation_stages.target_chat", lambda _run: None)
    monkeypatch.setattr("eyas.recipes.generation_stages.backend", lambda *_, **__: nullcontext())
    for name in ("conversations.jsonl", "evaluation_prompts.jsonl"):
        write_text(tmp_path / "run" / "collect" / name, name)
    data = {"conversations": "c.jsonl", "regenerate": True, "max_train_tokens": 1000, "max_length": 48}
    recipe = make_recipe(tmp_path, data={**data, "too_long": "drop"})
    run = Run(recipe=recipe, run_dir=tmp_path / "run", target_dir=tmp_path, target_fingerprint="t")
    stage = regenerate_stage(run)
    told = stage.describe(stage.body(tmp_path))
    assert told == ["7 conversations answered, 900 answer tokens; 13 not asked: data.max_train_tokens is reached"]
    assert asked["limit"] == TokenLimit(tokens=1000, cut=Cut(max_length=48, too_long="drop"), seed=recipe.seed)


def test_what_only_changes_speed_or_storage_keeps_answers(tmp_path: Path) -> None:
    plain = regenerated(tmp_path)
    for generation in ({"batch_size": 2}, {"keep_states": True}, {"servers": {"urls": ["http://a/v1"]}}):
        assert regenerated(tmp_path, generation=generation) == plain


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    tiny.write_target(tmp_path / "target")
    tiny.write_conversation_file(tmp_path / "chats.jsonl", train=24, heldout=4)
    return make_recipe(tmp_path)


def test_a_template_that_prints_todays_date_is_told_with_the_mend(recipe: Recipe, tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path / "target", chat_template="{{ strftime_now('%Y') }} " + tiny.CHAT_TEMPLATE)
    said: list[str] = []
    run_until(recipe, last="prepare", say=said.append)
    assert "data.template_options.strftime_now='2026-11-30'" in "\n".join(said)
    said.clear()
    fixed = with_values(recipe, {"data": {"template_options": {"strftime_now": "2026-11-30"}}})
    run_until(fixed, last="prepare", say=said.append)
    assert said
    assert "today's date" not in "\n".join(said)


def test_a_second_extractor_makes_the_shards_of_a_first(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is stopped as soon as it has begun; the one that joins does the work; the first then publishes it."""
    lines: list[str] = []
    with pytest.raises(ValueError, match="run `eyas prepare` with the same recipe first"):
        join_extraction(recipe, say=lines.append)
    run_until(recipe, last="prepare", say=lines.append)
    with pytest.raises(ValueError, match="no extraction of this recipe is under way"):
        join_extraction(recipe, say=lines.append)

    def stopped(_run: Run, out_dir: Path) -> dict[str, Any]:
        (out_dir / "begun").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(feature_stage, "extract_body", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_until(recipe, last="extract", say=lines.append)
    join_extraction(recipe, say=lines.append)
    shards = {path.name for path in (recipe.run_directory / "features.partial").glob("*.safetensors")}
    assert shards
    made: list[str] = []
    run_until(recipe, last="extract", say=made.append)
    features = recipe.run_directory / "features"
    assert {path.name for path in features.glob("*.safetensors")} == shards
    assert read_manifest(features)["counts"]["padding_tokens"] == 0, "nothing was computed again"
    assert not (features / ".claims").exists(), "a store is the same whoever made it"
    join_extraction(recipe, say=lines.append)
    assert lines[-1].endswith("stands")


def test_parts_begin_by_themselves_and_a_last_call_seals_them(recipe: Recipe, tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="run `eyas prepare` with the same recipe first"):
        extract_part(recipe, say=lines.append)
    run_until(recipe, last="prepare", say=lines.append)
    extract_part(recipe, say=lines.append)
    features = recipe.run_directory / "features"
    assert not features.exists(), "parts seal nothing"
    extract_part(recipe, say=lines.append)  # a task that comes late finds nothing to do
    run_until(recipe, last="extract", say=lines.append)
    assert read_manifest(features)["counts"]["padding_tokens"] == 0, "nothing was computed again"
    extract_part(recipe, say=lines.append)
    assert lines[-1].endswith("stands")
    whole = make_recipe(tmp_path).model_copy(update={"run_dir": str(tmp_path / "whole")})
    run_until(whole, last="extract", say=lines.append)
    assert {path.name: path.read_bytes() for path in features.glob("*.safetensors")} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole" / "features").glob("*.safetensors")
    }


def test_an_arm_alone_needs_the_head_and_has_a_directory_of_its_own(recipe: Recipe) -> None:
    one = only_arm(recipe, "k3")
    assert stage_names(one, last="score")[-1] == "score"
    assert "train" not in stage_names(one, last="score")
    with pytest.raises(ValueError, match=r"there is no head in .*export yet; run `eyas export`"):
        run_until(one, last="score", say=lambda _: None)
    run = Run(recipe=one, run_dir=recipe.run_directory, target_dir=recipe.run_directory, target_fingerprint="t")
    assert run.directory("score").name == "score-k3"


def test_an_arm_goes_by_its_number_too(recipe: Recipe) -> None:
    assert arm_numbered(recipe, 0) == f"k{recipe.score.draft_lengths[0]}"
    many = len(recipe.score.draft_lengths) + len(recipe.score.arms)
    with pytest.raises(ValueError, match=f"--arm-number {many}: the recipe has {many} arms, from 0: k"):
        arm_numbered(recipe, many)


def test_the_report_follows_counts_that_changed_without_the_data(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_dir = tmp_path / "run" / "score"
    write_session(score_dir)
    write_text(score_dir / "manifest.json", '{"files": {}}')
    context = read_json(score_dir / "context.json")
    run = Run(recipe=recipe, run_dir=tmp_path / "run", target_dir=tmp_path, target_fingerprint="t")
    monkeypatch.setattr(score_stage, "score_context", lambda _run, _head_dir: context)
    score_stage._refresh_report(run, score_dir)
    assert not (score_dir / "report.md").exists(), "nothing changed"
    write_json(score_dir / "context.json", context | {"command": ["eyas", "score"]})
    context["data"] = [{"source": "another", "licence": "MIT"}]
    score_stage._refresh_report(run, score_dir)
    assert "another" in (score_dir / "report.md").read_text()
    assert read_json(score_dir / "context.json") == context | {"command": ["eyas", "score"]}, "what measured stays"
