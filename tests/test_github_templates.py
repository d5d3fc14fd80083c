"""The forms for issues are ones that GitHub takes, and what they tell people to type exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import check_command, commands_of, is_key, keys_of, small_recipe

__all__ = ["small_recipe"]

GITHUB = Path(__file__).resolve().parent.parent / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
FIELDS = {
    "markdown": {"value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "input": {"label", "description", "placeholder", "value"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
    "checkboxes": {"label", "description", "options"},
}
"""Kinds of elements of a form, and their attributes (GitHub Docs, "Syntax for GitHub's form schema")."""


def texts(node: Any) -> list[str]:
    """Every text of a form."""
    if isinstance(node, dict):
        return [text for value in node.values() for text in texts(value)]
    return [text for value in node for text in texts(value)] if isinstance(node, list) else [str(node)]


def test_there_are_forms_and_a_choice_of_them() -> None:
    assert {path.stem for path in FORMS} >= {"bug", "question"}
    choice = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text(encoding="utf-8"))
    assert choice.keys() <= {"blank_issues_enabled", "contact_links"}
    for link in choice.get("contact_links", ()):
        assert link.keys() == {"name", "url", "about"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_githubs_syntax(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (
        {"name", "description", "body"}
        <= form.keys()
        <= {"name", "description", "body", "labels", "title", "assignees"}
    )
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    assert asked, "a form asks something"
    for element in form["body"]:
        assert element.keys() <= {"type", "id", "attributes", "validations"}
        assert element["attributes"].keys() <= FIELDS[element["type"]]
        assert "value" in element["attributes"] or element["attributes"]["label"]
        assert element.get("validations", {}).keys() <= {"required"}
    names = [element["id"] for element in asked]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", [*FORMS, GITHUB / "pull_request_template.md"], ids=lambda path: path.name)
def test_what_it_names_exists(path: Path, small_recipe: Path) -> None:
    text = path.read_text(encoding="utf-8")
    parts = texts(yaml.safe_load(text)) if path.suffix == ".yml" else [text]
    for part in parts:
        for words, in_sentence in commands_of(part):
            check_command(words, small_recipe=small_recipe, in_sentence=in_sentence)
        assert [key for key in keys_of(part) if not is_key(key)] == []
        for name in [word.strip("`.,") for word in part.split() if word.startswith("`docs/")]:
            assert (GITHUB.parent / name).is_file(), name
