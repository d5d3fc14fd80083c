"""The score section of a recipe: what it refuses, and what a finished session hands on to a longer one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eyas.heads.config import HeadConfig
from eyas.heads.files import read_json, write_json, write_text
from eyas.recipes import score_stage
from eyas.recipes.load import load_recipe
from eyas.recipes.run import Run, stage_names
from eyas.recipes.schema_score import Score
from eyas.recipes.score_continue import adopt_starts
from eyas.recipes.score_settings import engine_of, load_of, repeats_of, resolved_arm, template_options
from eyas.recipes.score_stage import score_inputs, score_settings, scored_head
from eyas.recipes.stage import Stage, run_stage

QUICKSTART = "smollm2-135m-eagle3-cpu"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_sizes": [1, 1]}, "values must be distinct"),
        ({"temperatures": [0.0, 0]}, "values must be distinct"),
        ({"draft_lengths": []}, "without a head there must be other arms"),
        ({"draft_lengths": [], "arms": {"c": {}}, "schedule": True}, "is chosen from the head's draft lengths"),
        ({"arms": {"k3": {}}}, "arms.k3: eyas names"),
        ({"arms": {"a-b": {}}}, "letters, digits and underscores"),
        (
            {"arms": {"ngram": {"num_speculative_tokens": 3}}},
            "arms.ngram: a speculative_config of vLLM names its method",
        ),
        ({"arms": {"slow": {"slowed_by": "much"}}}, "arms.slow.slowed_by: is a share"),
        ({"arms": {"slow": {"slowed_by": True}}}, "arms.slow.slowed_by: is a share"),
        ({"prompt_sets": {"heldout": {"path": "p"}}}, "prompt_sets.heldout: choose a name"),
        ({"prompt_sets": {"a/b": {"path": "p"}}}, "prompt_sets.a/b: choose a name"),
        ({"prompt_sets": {"mix": {"path": "p"}}}, "prompt_sets.mix: choose a name"),
        ({"mix": True, "humaneval_requests": 0}, "mix: is drawn from several sets"),
        ({"max_tokens": 1024}, "max_tokens 1024 leaves no room"),
        ({"lossless": {"max_tokens": 2000}}, "lossless.max_tokens 2000 leaves no room"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"open_loop": {"rates": [0]}}, "greater than 0"),
    ],
)
def test_bad_values_say_what_to_mend(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Score.model_validate(values)
    assert message in str(caught.value)


def test_arms_and_prompt_sets_can_be_given_on_the_command_line() -> None:
    overrides = [
        "score.arms={ngram: {method: ngram, num_speculative_tokens: 3}, control: {}}",
        "score.prompt_sets={mine: {path: p.jsonl, turns: all, requests: 9}}",
        "score.temperatures=[0, 1]",
        "score.open_loop.rates=[0.5, 2]",
    ]
    score = load_recipe(QUICKSTART, overrides=overrides).score
    assert score.arms == {"ngram": {"method": "ngram", "num_speculative_tokens": 3}, "control": {}}
    assert score.prompt_sets["mine"].turns == "all"
    assert (score.temperatures, score.open_loop.rates) == ((0.0, 1.0), (0.5, 2.0))


def run_of(tmp_path: Path, *overrides: str) -> Run:
    recipe = load_recipe(QUICKSTART, overrides=[f"run_dir={tmp_path / 'run'}", *overrides])
    return Run(recipe=recipe, run_dir=tmp_path / "run", target_dir=tmp_path, target_fingerprint="t")


def test_without_draft_lengths_nothing_is_trained_and_no_head_measured(tmp_path: Path) -> None:
    run = run_of(tmp_path, "score.draft_lengths=[]", "score.arms={control: {}}")
    assert scored_head(run) is None
    assert run.directory("score").name == "score-without-head"
    assert "train" not in stage_names(run.recipe, last="score")
    assert run.recipe.score.main_draft_length == 3


def test_a_head_for_another_target_is_refused_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_target(*_: Any, **__: Any) -> HeadConfig:
        raise ValueError("head cannot be served: hidden_size 64 is not the target's 576")

    ran: list[str] = []
    monkeypatch.setattr(score_stage, "servable_head", wrong_target)
    monkeypatch.setattr("eyas.eval.score.score", lambda *_, **__: ran.append("score"))
    monkeypatch.setattr(score_stage, "score_inputs", lambda *_: {})
    stage = score_stage.score_stage(run_of(tmp_path))
    with pytest.raises(ValueError, match="hidden_size 64"):
        stage.body(tmp_path)
    assert ran == []


def test_settings_hold_what_changes_the_result_and_nothing_else(tmp_path: Path) -> None:
    first, second = run_of(tmp_path), run_of(tmp_path, "score.timeout_s=5", "score.head=elsewhere")
    assert score_settings(first) == score_settings(second)
    assert score_settings(first)["threads"] >= 1
    other = score_settings(run_of(tmp_path, "score.template_options={enable_thinking: false}"))
    assert other["template_options"] == {"enable_thinking": False}


def test_template_options_come_from_the_data_unless_given(tmp_path: Path) -> None:
    run = run_of(tmp_path, "data.template_options={enable_thinking: true}")
    assert template_options(run) == {"enable_thinking": True}
    assert template_options(run_of(tmp_path, "score.template_options={}")) == {}


def test_a_missing_prompt_set_is_named(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, "score.prompt_sets={mine: {path: nowhere.jsonl}}", "score.draft_lengths=[]", "score.arms={c: {}}"
    )
    conversations = run.conversations
    conversations.parent.mkdir(parents=True)
    conversations.write_text("")
    with pytest.raises(ValueError, match=r"score\.prompt_sets\.mine\.path: nowhere\.jsonl does not exist"):
        score_inputs(run, None)


def test_plain_values_for_eval(tmp_path: Path) -> None:
    score = run_of(tmp_path).recipe.score
    assert load_of(score).wanted(1) == score.min_requests
    assert load_of(score).wanted(32) == 32 * score.requests_per_batch_slot
    assert load_of(score.model_copy(update={"set_batch_sizes": None})).set_batch_sizes == score.batch_sizes
    assert repeats_of(score).starts_per_arm == 3
    home = resolved_arm({"method": "draft_model", "model": "~/small"})
    assert home["model"] == str(Path.home() / "small")
    assert resolved_arm({"method": "ngram"}) == {"method": "ngram"}


def finished_session(directory: Path, *, settings: dict[str, Any], inputs: dict[str, str]) -> Path:
    write_json(directory / "starts" / "000-ar.json", {})
    write_json(directory / "session.json", {"session": "one"})
    write_json(directory / "results.json", {})
    write_json(directory / "manifest.json", {"settings": settings, "inputs": inputs})
    return directory


def test_a_longer_session_begins_with_the_starts_of_the_shorter_one(tmp_path: Path) -> None:
    settings, inputs = {"starts_per_arm": 3, "budget_minutes": None, "seed": 0}, {"head": "h"}
    finished = finished_session(tmp_path / "score", settings=settings, inputs=inputs)
    adopt_starts(finished, tmp_path / "new", settings=settings | {"starts_per_arm": 5}, inputs=inputs)
    assert (tmp_path / "new" / "starts" / "000-ar.json").is_file()
    assert read_json(tmp_path / "new" / "session.json") == {"session": "one"}
    assert not (tmp_path / "new" / "results.json").exists()


@pytest.mark.parametrize("change", ["settings", "inputs"])
def test_a_session_of_other_settings_or_inputs_begins_anew(tmp_path: Path, change: str) -> None:
    settings, inputs = {"starts_per_arm": 3, "seed": 0}, {"head": "h"}
    finished = finished_session(tmp_path / "score", settings=settings, inputs=inputs)
    asked = settings | ({"seed": 1} if change == "settings" else {})
    read = inputs | ({"head": "other"} if change == "inputs" else {})
    adopt_starts(finished, tmp_path / "new", settings=asked, inputs=read)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"budget_minutes": 60},
        {"lossless": {"requests": 0}},
        {"open_loop": {"rates": [1.0], "slo_ttft_ms": 500.0}},
        {"time_split": False},
        {"schedule": True},
    ],
)
def test_other_parts_beside_the_grid_keep_its_starts(tmp_path: Path, change: dict[str, Any]) -> None:
    settings = {"starts_per_arm": 3, "seed": 0, "open_loop": {"rates": []}, "lossless": {"requests": 8}}
    finished = finished_session(tmp_path / "score", settings=settings, inputs={})
    adopt_starts(finished, tmp_path / "new", settings=settings | change, inputs={})
    assert (tmp_path / "new" / "starts" / "000-ar.json").is_file()


def test_an_interrupted_session_goes_on_with_another_number_of_starts(tmp_path: Path) -> None:
    """`eyas score R`, Ctrl-C after hours, `eyas score R --repeats 5`: the finished starts stay."""
    measured: list[set[str]] = []

    def stage_of(run: Run, *, interrupted: bool) -> Stage:
        stage = score_stage.score_stage(run)

        def body(out_dir: Path) -> dict[str, Any]:
            measured.append({path.name for path in out_dir.glob("starts/*.jsonl")})
            write_text(out_dir / "starts" / f"{len(measured)}.jsonl", "hours of work")
            if interrupted:
                raise KeyboardInterrupt
            return {}

        return replace(stage, body=body)

    def run_with(*overrides: str) -> Run:
        run = run_of(tmp_path, "score.draft_lengths=[]", "score.arms={c: {}}", *overrides)
        write_text(run.conversations, "")
        return run

    with pytest.raises(KeyboardInterrupt):
        run_stage(stage_of(run_with(), interrupted=True), run_dir=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        longer = run_with("score.starts_per_arm=5", "score.open_loop.rates=[1]")
        run_stage(stage_of(longer, interrupted=True), run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"unfinished score-without-head stage of other settings: .*max_tokens"):
        run_stage(stage_of(run_with("score.max_tokens=7"), interrupted=False), run_dir=tmp_path / "run")
    assert run_stage(stage_of(run_with("score.starts_per_arm=5"), interrupted=False), run_dir=tmp_path / "run")
    assert measured == [set(), {"1.jsonl"}, {"1.jsonl", "2.jsonl"}]


def test_engine_settings_of_gpus(tmp_path: Path) -> None:
    engine = engine_of(run_of(tmp_path).recipe.score)
    assert (engine.tensor_parallel_size, engine.gpu_memory_utilization) == (1, None)
    given = run_of(tmp_path, "score.tensor_parallel_size=2", "score.gpu_memory_utilization=0.8").recipe.score
    assert (engine_of(given).tensor_parallel_size, engine_of(given).gpu_memory_utilization) == (2, 0.8)


def test_a_begun_session_is_not_mixed_with_a_finished_one(tmp_path: Path) -> None:
    settings, inputs = {"starts_per_arm": 3}, {"head": "h"}
    finished = finished_session(tmp_path / "score", settings=settings, inputs=inputs)
    write_json(tmp_path / "new" / "starts" / "001-k3.json", {})
    adopt_starts(finished, tmp_path / "new", settings=settings | {"starts_per_arm": 5}, inputs=inputs)
    assert not (tmp_path / "new" / "session.json").exists()
