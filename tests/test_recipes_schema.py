"""The recipe schema: what it refuses, field by field and across fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from eyas.recipes.keys import valid_keys
from eyas.recipes.load import load_recipe, shipped_recipes
from eyas.recipes.schema import Data, Features, Head, Init, Recipe, Score, Target, Tracking, Train

MINIMAL: dict[str, Any] = {"name": "tiny", "target": {"model": "org/model"}, "data": {"conversations": "chats.jsonl"}}


def test_a_recipe_needs_only_name_target_and_data() -> None:
    recipe = Recipe.model_validate(MINIMAL)
    assert recipe.run_directory == Path("runs/tiny")
    assert recipe.train.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head": {"vocabulary": "reuse"}}, "reuse needs a head"),
        ({"head": {"kind": "eagle"}, "features": {"capture_layers": [1]}}, r"features\.capture_layers: an EAGLE head"),
        ({"head": {"kind": "eagle"}, "init": {"lm_head": "random"}}, r"init\.lm_head: an EAGLE head"),
        ({"head": {"kind": "eagle"}, "init": {"train_lm_head": True}}, r"init\.train_lm_head"),
        ({"head": {"kind": "eagle"}, "init": {"layer": "target"}}, r"init\.layer"),
        ({"head": {"kind": "eagle"}, "features": {"teacher": "top-k"}}, r"features\.teacher: an EAGLE head"),
        (
            {
                "data": {
                    "conversations": "a",
                    "regenerate": True,
                    "generation": {"keep_states": True, "dtype": "float32"},
                }
            },
            r"data\.generation\.dtype: the states kept would be of float32",
        ),
        ({"features": {"mode": "online", "cache": "first-epoch"}, "train": {"epochs": 1}}, r"features\.cache: what"),
        ({"data": {"conversations": "a", "generation": {"keep_states": True}}}, "nothing is generated"),
        (
            {"features": {"teacher": "top-k", "teacher_k": 4}, "train": {"losses": {"top_k": 1.0}}},
            r"train\.losses\.top_k_tokens: 10 likeliest tokens are more",
        ),
        ({"train": {"losses": {"feature": 1.0}}}, r"train\.losses\.feature: belongs to EAGLE"),
        ({"train": {"feature_noise": "length"}}, r"train\.feature_noise: belongs to EAGLE"),
    ],
)
def test_settings_of_the_other_kind_of_head_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate(MINIMAL | values)


def test_the_official_eagle_recipe_is_the_line_in_the_shipped_one() -> None:
    shipped = shipped_recipes()["smollm2-135m-eagle-cpu"]
    lines = shipped.read_text().partition("# Official recipe:")[2].splitlines()[:2]
    overrides = [word for line in lines for word in line.split() if word.startswith("train.")]
    train = load_recipe(shipped, overrides=overrides).train
    assert (train.losses.feature, train.losses.forward_kl, train.losses.top_k) == (1.0, 0.1, 0.0)
    assert (train.ttt_steps, train.feature_noise, train.feature_noise_width) == (1, "length", 0.2)
    assert (train.max_grad_value, train.max_grad_norm, train.betas) == (0.5, None, (0.9, 0.95))


def test_run_dir_wins_over_the_name() -> None:
    assert Recipe.model_validate(MINIMAL | {"run_dir": "/data/x"}).run_directory == Path("/data/x")


def test_recipes_are_frozen_and_closed() -> None:
    recipe = Recipe.model_validate(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1
    with pytest.raises(ValidationError, match="extra"):
        Recipe.model_validate(MINIMAL | {"sead": 1})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (Target, {"model": ""}, "at least 1 character"),
        (Target, {"model": "hub:org/model"}, "unknown scheme"),
        (Target, {"model": "package:"}, "no package name"),
        (Target, {"model": "package:a", "revision": "main"}, "only hub models"),
        (Data, {}, "conversations: missing"),
        (Data, {"conversations": "c", "max_length": 7}, "greater than or equal to 8"),
        (Data, {"conversations": "c", "max_length": True}, "valid integer"),
        (Data, {"conversations": "c", "on_bad_line": "ignore"}, "'stop' or 'skip'"),
        (Features, {"capture_layers": [3, 1]}, "ascending"),
        (Features, {"capture_layers": []}, "at least 1 item"),
        (Features, {"storage": "int8"}, "fp8"),
        (Features, {"cache": "first-epoch"}, "cache: has a meaning online only"),
        (Features, {"mode": "online", "backend": "vllm"}, "backend: online the target runs in transformers"),
        (Features, {"batch_size": 8}, "batch_size: is for backend vllm"),
        (Features, {"gpu_memory_utilization": 0.5}, "gpu_memory_utilization: is for backend vllm"),
        (Features, {"mode": "online", "threads": 2}, "threads: inline the target has"),
        (Features, {"mode": "online", "verify": "open"}, "verify: online nothing"),
        (Features, {"mode": "online", "device_map": "auto"}, "device_map: online the target runs on one device"),
        (Features, {"backend": "vllm", "device_map": "auto"}, "device_map: is for backend hf"),
        (Features, {"tensor_parallel_size": 2}, "tensor_parallel_size: is for backend vllm"),
        (Head, {"num_attention_heads": 9, "num_key_value_heads": 4}, "no multiple"),
        (Head, {"draft_vocab_size": 1}, "too small"),
        (Head, {"draft_vocab_size": "most"}, "auto"),
        (Head, {"fc_bias": True}, "no bias in fc"),
        (Head, {"kind": "eagle", "fc_norm": True}, "fc_norm: an EAGLE head has no such choice"),
        (Head, {"kind": "eagle", "draft_vocab_size": 128}, "draft_vocab_size: an EAGLE head"),
        (Head, {"kind": "eagle", "vocabulary": "reuse"}, "target's vocabulary"),
        (Init, {"head": "a", "layer": "random"}, "nothing is initialised"),
        (Train, {"losses": {"forward_kl": 0}}, "nothing would be learnt"),
        (Tracking, {"trackers": ["wandb", "wandb"]}, "distinct"),
        (Train, {"ttt_steps": 0}, "greater than or equal to 1"),
        (Train, {"betas": [0.9, 1.0]}, "less than 1"),
        (Train, {"learning_rate": float("nan")}, "finite"),
        (Train, {"threads": 0}, "greater than 0"),
        (Score, {"draft_lengths": [3, 3]}, "distinct"),
        (Score, {"draft_lengths": [0]}, "greater than or equal to 1"),
        (Score, {"batch_sizes": []}, "at least 1 item"),
        (Score, {"max_tokens": 1024}, "leaves no room"),
        (Score, {"humaneval_requests": 165}, "164"),
    ],
)
def test_bad_values_are_refused(section: type[BaseModel], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        section.model_validate(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"regenerate": True}, "conversations: missing"),
        ({"conversations": "a", "sources": [{"path": "b"}]}, "short form of sources"),
        ({"sources": [{}]}, "path: missing"),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "some have a weight"),
        ({"sources": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"self_prompts": {"count": 3}}, r"self_prompts\.count: these prompts have no answers"),
        ({"conversations": "a", "generation": {"follow_ups": 1}}, r"generation\.follow_ups"),
        ({"conversations": "a", "generation": {"servers": {"urls": ["host:8000"]}}}, "no URL"),
        ({"conversations": "a", "generation": {"temperature": []}}, "at least 1 item"),
        (
            {"conversations": "a", "generation": {"keep_states": True, "servers": {"urls": ["http://a/v1"]}}},
            "servers send tokens only",
        ),
        ({"conversations": "a", "near_duplicates": 1.5}, "less than or equal to 1"),
    ],
)
def test_data_that_contradicts_itself_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Data.model_validate(values)


def test_the_short_form_is_one_source() -> None:
    assert [source.path for source in Data.model_validate({"conversations": "a"}).all_sources] == ["a"]
    generation = Data.model_validate({"conversations": "a", "generation": {"temperature": ["0.0", 0.8]}}).generation
    assert generation.temperature == (0.0, 0.8)


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert Train.model_validate({"learning_rate": "2e-4", "betas": ["9e-1", 0.95]}).betas == (0.9, 0.95)
    with pytest.raises(ValidationError):
        Train.model_validate({"learning_rate": "fast"})


def test_every_field_says_what_it_means() -> None:
    def undescribed(model: type[BaseModel]) -> list[str]:
        names = []
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                names += undescribed(field.annotation)
            elif not field.description:
                names.append(f"{model.__name__}.{name}")
        return names

    assert undescribed(Recipe) == []


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("smollm2-")])
def test_recipes_that_anyone_can_run_write_out_every_field(name: str) -> None:
    """They are the examples to change; those for GPUs say what differs from the defaults, and `eyas plan` prints the rest."""
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert text.startswith("# ")
    written_out = ("head.", "init.", "train.", "export.", "score.")  # of data and features, what a recipe uses
    fields = [key.rpartition(".")[2] for key in valid_keys() if key.startswith(written_out)]
    assert [field for field in fields if f"{field}:" not in text] == []
