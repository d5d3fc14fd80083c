"""The published form of a recipe: it is that of the models, shipped recipes have it, spoilt ones do not, editors find it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from eyas.recipes.cli import app
from eyas.recipes.json_schema import MODELINE, SCHEMA_PATH, main, recipe_schema
from eyas.recipes.load import load_recipe, shipped_recipes

SCHEMA: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
QUICKSTART = "smollm2-135m-eagle3-cpu"


class EditorLoader(yaml.SafeLoader):
    """YAML 1.2, as editors read it: there `1e-4` is a number, and in PyYAML's 1.1 it is text, which recipes turn into one."""


EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$"), list("-+.0123456789")
)


def faults(values: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in VALIDATOR.iter_errors(values)]


def parsed(name: str) -> dict[str, Any]:
    """A shipped recipe as an editor reads it."""
    return yaml.load(shipped_recipes()[name].read_text(encoding="utf-8"), Loader=EditorLoader)


def fields(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of every section, with its schema."""
    for name, section in node["definitions"].items():
        yield from ((f"{name}.{key}", field) for key, field in section["properties"].items())


def test_the_file_is_current() -> None:
    assert recipe_schema() == SCHEMA, "write it again: python -m eyas.recipes.json_schema"


def test_it_is_a_schema_that_explains_every_key() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    unknown = [
        name for name, field in fields(SCHEMA) if not {"$ref", "description"} & field.keys() and "allOf" not in field
    ]
    assert unknown == []
    text = json.dumps(SCHEMA)
    assert not [word for word in ("prefixItems", "$defs", '"ge"', '"lt"') if word in text], "not of draft 7"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_have_it(name: str) -> None:
    assert faults(parsed(name)) == []
    assert faults(load_recipe(name).model_dump(mode="json")) == [], "with all defaults"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("train", "epoch"), 1),
        (("surprise",), {}),
        (("head", "kind"), "eagle4"),
        (("train", "epochs"), "two"),
        (("train", "learning_rate"), 0),
        (("train", "betas"), [0.9]),
        (("train", "betas"), [0.9, 1.5]),
        (("train", "losses", "forward_kl"), -1),
        (("score", "batch_sizes"), [0]),
        (("score", "lossless", "sample"), 1),
        (("target", "model"), None),
        (("name",), "no/slash"),
    ],
)
def test_spoilt_recipes_do_not(path: tuple[str, ...], value: Any) -> None:
    spoilt = copy.deepcopy(parsed(QUICKSTART))
    place = spoilt
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (fault,) = faults(spoilt)
    assert path[-1] in fault


@pytest.mark.parametrize("key", ["name", "target", "data"])
def test_what_every_recipe_needs_is_asked_for(key: str) -> None:
    assert faults({name: value for name, value in parsed(QUICKSTART).items() if name != key}) != []


def test_the_command_prints_it_and_the_module_writes_it(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["recipes", "schema"])
    main(tmp_path / "schema.json")
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == json.loads((tmp_path / "schema.json").read_text()) == SCHEMA


def test_a_copied_recipe_tells_editors_where_the_schema_is(tmp_path: Path) -> None:
    copied = CliRunner().invoke(app, ["recipes", "cp", QUICKSTART, str(tmp_path / "mine.yaml")])
    assert copied.exit_code == 0, copied.stderr
    first, _, rest = (tmp_path / "mine.yaml").read_text(encoding="utf-8").partition("\n")
    assert rest == shipped_recipes()[QUICKSTART].read_text(encoding="utf-8")
    assert first.startswith(MODELINE)
    address = urlsplit(first.removeprefix(MODELINE))
    assert address.scheme == "file"
    assert Path(unquote(address.path)) == SCHEMA_PATH
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe(QUICKSTART)
