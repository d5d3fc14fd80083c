"""The form of a recipe as a JSON schema, by which editors complete and check: `python -m eyas.recipes.json_schema [FILE]`.

It is made from the models and kept in the package as recipe.schema.json, where an editor can read it. It is written in
draft 7, which every YAML plugin understands. It knows each key, type, choice and bound; how settings fit each other is known
to `eyas recipes validate` alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eyas.heads.files import write_text
from eyas.recipes.schema import Recipe

SCHEMA_PATH = Path(__file__).with_name("recipe.schema.json")
DIALECT = "http://json-schema.org/draft-07/schema#"
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""Bounds of fields that are also read from text, which pydantic leaves under its own names."""
MODELINE = "# yaml-language-server: $schema="
"""What a line begins with that tells an editor the schema of the file it stands in."""


def recipe_schema() -> dict[str, Any]:
    """The schema as JSON values."""
    whole = Recipe.model_json_schema(ref_template="#/definitions/{model}")
    definitions = whole.pop("$defs")
    body = _plain(whole | {"definitions": definitions})
    return {"$schema": DIALECT, "title": "eyas recipe", **body}


def recipe_schema_text() -> str:
    """The schema as it stands in its file."""
    return json.dumps(recipe_schema(), indent=1) + "\n"


def with_modeline(recipe_text: str) -> str:
    """A recipe's text with a line before it that names the installed schema to editors."""
    return f"{MODELINE}{SCHEMA_PATH.as_uri()}\n{recipe_text}"


def _plain(node: Any) -> Any:
    """A node in draft 7, without what only repeats: titles made from names, and a section's defaults beside its fields'."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    named = {"properties", "definitions"} & node.keys()
    plain = {
        BOUNDS.get(key, key): {name: _plain(each) for name, each in value.items()} if key in named else _plain(value)
        for key, value in node.items()
        if key in named or key not in ("title", "default")
    }
    if "default" in node and "$ref" not in node:
        plain["default"] = node["default"]
    if "prefixItems" in plain:
        plain["items"] = plain.pop("prefixItems")
    if "$ref" in plain and len(plain) > 1:  # draft 7 reads nothing beside a reference
        plain["allOf"] = [{"$ref": plain.pop("$ref")}]
    return plain


def main(path: Path = SCHEMA_PATH) -> None:
    """Write the schema."""
    write_text(path, recipe_schema_text())
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
