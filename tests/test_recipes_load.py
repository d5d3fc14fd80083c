"""Reading recipes: references, overrides, error messages, and the round trip through YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eyas.recipes.keys import describe_keys, valid_keys
from eyas.recipes.load import dump_recipe, find_recipe, load_recipe, resolve_builtin, shipped_recipes
from eyas.recipes.moved import MOVED
from eyas.recipes.schema import Recipe

QUICKSTART = "smollm2-135m-eagle3-cpu"
MINIMAL = "name: tiny\ntarget: {model: org/model}\ndata: {conversations: chats.jsonl}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(reference: str | Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_recipe(reference, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize("reference", [QUICKSTART, f"{QUICKSTART}.yaml", shipped_recipes()[QUICKSTART]])
def test_a_recipe_is_found_by_name_and_by_path(reference: str | Path) -> None:
    assert load_recipe(reference).name == QUICKSTART


def test_a_missing_recipe_names_the_nearest() -> None:
    assert f"did you mean {QUICKSTART} or smollm2-135m-eagle-cpu or" in error_of("smollm-135m-eagle3")
    assert "eyas recipes ls" in error_of("qqqq")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    assert "is a directory" in error_of(tmp_path)


def test_an_existing_file_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / QUICKSTART).write_text(MINIMAL, encoding="utf-8")
    assert find_recipe(QUICKSTART) == Path(QUICKSTART)


def test_all_errors_come_at_once_with_dotted_paths(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: tiny\ntarget: {model: a/b, revison: x}\ndata: {conversations: c, max_length: '512'}\n"
        "train: {lr: 1, epochs: 1.5}\nlearning_rate: 1\nhead:\n",
    )
    assert error_of(path).splitlines() == [
        f"{path}: 6 errors",
        "  target.revison: unknown key; did you mean target.revision?",
        "  data.max_length: got '512' (text), expected a valid integer",
        "  head: got null (nothing), expected a section with fields",
        "  train.epochs: got 1.5 (number), expected a valid integer",
        "  train.lr: unknown key; did you mean train.learning_rate?",
        "  learning_rate: unknown key; did you mean train.learning_rate?",
    ]


def test_a_bad_list_entry_is_one_error(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "features: {capture_layers: [0]}\n")
    assert error_of(path) == (
        f"{path}: features.capture_layers.0: got 0 (integer), expected greater than or equal to 1"
    )


def test_errors_across_fields_name_the_field(tmp_path: Path) -> None:
    path = write(tmp_path, "name: tiny\ntarget: {model: a/b}\ndata: {}\n")
    assert error_of(path).startswith(f"{path}: data.conversations: missing;")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "line 2: key 'name' is written twice"),
        ("train:\n  epochs: 1\n  epochs: 2\n", "line 3: key 'epochs' is written twice"),
        ("name: [a\n", "line 2"),
        ("name: !!python/object:os.system {}\n", "line 1"),
        ("? [a, b]\n: c\n", "a key must be plain text"),
        ("just text", "expected sections"),
        ("", "expected sections"),
    ],
)
def test_bad_yaml_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert error_of(path).startswith(str(path))
    assert message in error_of(path)


def test_overrides_are_yaml_values() -> None:
    recipe = load_recipe(
        QUICKSTART,
        overrides=[
            "train.learning_rate=2e-4",
            "features.capture_layers=[2, 15, 27]",
            "data.max_train_tokens=null",
            "data.generation.seed=7",
            "target.model=/models/a=b",
            "score.enforce_eager=false",
            "seed=1",
            "seed=2",
        ],
    )
    assert recipe.train.learning_rate == 2e-4
    assert recipe.features.capture_layers == (2, 15, 27)
    assert recipe.data.max_train_tokens is None
    assert recipe.data.generation.seed == 7
    assert recipe.target.model == "/models/a=b"
    assert recipe.score.enforce_eager is False
    assert recipe.seed == 2


def test_an_override_can_add_a_section(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, MINIMAL), overrides=["train.epochs=5"]).train.epochs == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "train.epoch: unknown key; did you mean train.epochs?"),
        ("trian.epochs=3", "trian.epochs: unknown key; did you mean train.epochs?"),
        ("epochs=3", "epochs: unknown key; did you mean train.epochs?"),
        ("train=3", "train: is a section"),
        ("train.epochs", "write section.field=value"),
        ("train.epochs=", "train.epochs: has no value"),
        ("train.epochs=two", "train.epochs: got two (text), expected a valid integer"),
        ("tracking.trackers=[mlflow]", "tracking.trackers.0: got mlflow (text), expected 'wandb' or 'tensorboard'"),
        ("score.batch_sizes=[1", "score.batch_sizes, line 1"),
        ("score.batch_sizes=[1, 1]", "score.batch_sizes: values must be distinct"),
    ],
)
def test_bad_overrides_say_what_to_mend(override: str, message: str) -> None:
    assert message in error_of(QUICKSTART, override)


def test_a_recipe_of_an_older_version_names_every_key_that_moved(tmp_path: Path) -> None:
    values: dict[str, Any] = yaml.safe_load(MINIMAL)
    for key in MOVED:
        place = values
        *sections, field = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = 1
    message = error_of(write(tmp_path, yaml.safe_dump(values)))
    assert f"{len(MOVED)} errors" in message
    for key, instead in MOVED.items():
        assert f"  {key}: {instead}\n" in f"{message}\n"


@pytest.mark.parametrize("key", MOVED)
def test_a_key_that_moved_is_named_on_the_command_line_too(key: str) -> None:
    assert error_of(QUICKSTART, f"{key}=1") == f"overrides: {key}: {MOVED[key]}"


def test_keys_that_moved_are_gone_and_their_heirs_are_there() -> None:
    assert not set(MOVED) & set(valid_keys())
    known = {name for name, _ in describe_keys()} | {"data.sources", "init"}
    for key, instead in MOVED.items():
        named = re.findall(r"\b[a-z]+\.[a-z_.]+[a-z]", instead)
        assert named and set(named) <= known, key


def test_builtin_files(tmp_path: Path) -> None:
    assert resolve_builtin("builtin:topics.txt").is_file()
    assert resolve_builtin(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match=r"did you mean topics.txt\?"):
        resolve_builtin("builtin:topic.txt")
    with pytest.raises(ValueError, match="no such data file"):
        resolve_builtin("builtin:../schema.py")


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
shares = st.floats(0, 0.99)
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(lambda text: ":" not in text)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    values: dict[str, Any] = {
        "name": draw(names),
        "seed": draw(st.integers(0, 2**40)),
        "run_dir": draw(st.none() | texts),
        "target": {"model": draw(texts | names.map(lambda name: f"package:{name.strip('.-_')}"))},
        "data": {"conversations": draw(texts), "max_train_tokens": draw(st.none() | st.integers(1, 10**12))},
        "features": {
            "capture_layers": draw(st.none() | st.lists(st.integers(1, 99), min_size=1, unique=True).map(sorted))
        },
        "train": {
            "learning_rate": draw(st.floats(1e-12, 1e3)),
            "weight_decay": draw(st.floats(0, 1)),
            "betas": [draw(shares), draw(shares)],
        },
        "score": {"draft_lengths": draw(st.lists(st.integers(1, 16), min_size=1, unique=True))},
    }
    return Recipe.model_validate(values)


@given(recipes())
def test_dump_and_load_round_trip(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = write(tmp_path_factory.mktemp("round"), dump_recipe(recipe))
    assert load_recipe(path) == recipe
