"""From a recipe's name or path, and `section.field=value` overrides, to a validated `Recipe`; and back to YAML.

Everything wrong with a file is reported at once, one line per error, each with the dotted path of its key. Unknown
keys name the nearest valid one. Relative paths inside a recipe are relative to the working directory, as on a
command line: a recipe copied from the package then still means the user's own files.
"""

from __future__ import annotations

import copy
import difflib
import importlib.resources
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from eyas.recipes.keys import listed_keys, valid_keys
from eyas.recipes.moved import MOVED
from eyas.recipes.schema import Recipe

BUILTIN_SCHEME = "builtin:"


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, where PyYAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key_node.value}' is written twice; keep one", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_recipe(reference: str | Path, *, overrides: Iterable[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        reference: path of a YAML file, or name of a shipped recipe with or without `.yaml`.
        overrides: `section.field=value` texts; values are read as YAML scalars or lists.

    Raises:
        ValueError: no such recipe, no valid YAML, or keys and values that the schema refuses (all of them listed).
    """
    path = find_recipe(reference)
    values = _read_yaml(path.read_text(encoding="utf-8"), origin=str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected sections such as 'target:' and 'train:', got {_shown(values)}")
    values = _apply_overrides(values, overrides=overrides)
    return _validated(values, origin=str(path))


def _validated(values: Any, *, origin: str) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        details = _innermost(error.errors(include_url=False))
        lines = [_describe(detail) for detail in details]
        raise ValueError(_joined(origin, lines=lines)) from error


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """`recipe` with other values for some of its keys, `section.field` -> value.

    Of a section, the value is a mapping of some of its fields; the others stay as they are.

    Raises:
        ValueError: a key that no recipe has, or a value that the schema refuses (all of them listed).
    """
    merged: dict[str, Any] = recipe.model_dump(mode="json")
    for key, value in values.items():
        is_section = any(name.startswith(f"{key}.") for name in valid_keys())
        if key not in valid_keys() and not is_section:
            raise ValueError(f"{key}: unknown key{_hint(key, valid=[*valid_keys()])}")
        if is_section and not isinstance(value, Mapping):
            raise ValueError(f"{key}: is a section; a value of it is {{field: value}}, not {_shown(value)}")
        *sections, field = key.split(".")
        place = merged
        for section in sections:
            place = place[section]
        place[field] = {**place[field], **value} if is_section else value
    return _validated(merged, origin=recipe.name)


def dump_recipe(recipe: Recipe) -> str:
    """YAML of every field of `recipe`, defaults included; `load_recipe` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package: name without `.yaml` -> path."""
    folder = package_folder()
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(reference: str | Path) -> Path:
    """Path of the recipe file that `reference` means: an existing file wins over a shipped name.

    Raises:
        ValueError: neither exists; names the nearest shipped recipes.
    """
    path = Path(reference).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    name = path.name.removesuffix(".yaml")
    if path.parent == Path() and name in shipped:
        return shipped[name]
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a recipe file or one of the shipped recipes (`eyas recipes ls`)")
    near = difflib.get_close_matches(name, shipped, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "`eyas recipes ls` lists the shipped ones"
    raise ValueError(f"no recipe file {path}, and no shipped recipe of that name; {hint}")


def resolve_builtin(reference: str) -> Path:
    """Path of the package data file that `builtin:FILE` means; any other reference is returned as a path.

    Raises:
        ValueError: the package holds no such file.
    """
    if not reference.startswith(BUILTIN_SCHEME):
        return Path(reference).expanduser()
    name = reference.removeprefix(BUILTIN_SCHEME)
    folder = package_folder() / "data"
    names = sorted(path.name for path in folder.glob("*") if path.is_file())
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
        raise ValueError(f"{reference}: the package has no such data file; {hint}")
    return folder / name


def package_folder() -> Path:
    """Folder of this package's files; packages are installed unzipped wherever torch and vLLM are."""
    return Path(str(importlib.resources.files("eyas.recipes")))


def _read_yaml(text: str, *, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{origin}, line {mark.line + 1}" if mark else origin
        raise ValueError(f"{where}: {error.problem or 'not valid YAML'}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{origin}: not valid YAML ({' '.join(str(error).split())})") from error


def _apply_overrides(values: dict[str, Any], *, overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with every override set in it; all bad overrides are reported together."""
    merged, problems = copy.deepcopy(values), []
    for override in overrides:
        try:
            _apply_override(merged, override=override)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(_joined("overrides", lines=problems))
    return merged


def _apply_override(values: dict[str, Any], *, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ValueError(f"'{override}' is no override; write section.field=value")
    valid = valid_keys()
    if any(name.startswith(f"{key}.") for name in valid):
        raise ValueError(f"{key}: is a section; set its fields one by one, as {key}.field=value")
    if key in MOVED:
        raise ValueError(f"{key}: {MOVED[key]}")
    if key not in valid:
        raise ValueError(f"{key}: unknown key{_hint(key, valid=valid)}")
    if not text.strip():
        raise ValueError(f"{key}: has no value; write {key}=null for the default of the machine or the target")
    *sections, field = key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        if not isinstance(values[section], dict):
            raise ValueError(f"{key}: the recipe has {_shown(values[section])} where section {section} should be")
        values = values[section]
    values[field] = _read_yaml(text, origin=key)


def _entry(path: str) -> str:
    """Number of the list entry that a dotted path goes through; 0 without one."""
    numbers = re.findall(r"\.(\d+)\.", path)
    return numbers[0] if numbers else "0"


def _innermost(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without errors of a list that only follow from errors of its entries (too short, once a bad entry is dropped)."""
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail, place in zip(details, places, strict=True)
        if not any(other != place and other[: len(place)] == place for other in places)
    ]


def _describe(detail: ErrorDetails) -> str:
    """One line for one pydantic error: dotted path, what was got, what was expected, and the mend."""
    path = ".".join(str(part) for part in detail["loc"])
    kind, message = detail["type"], detail["msg"]
    if kind == "extra_forbidden" and path in MOVED:
        return f"{path}: {MOVED[path]}"
    if kind == "extra_forbidden":
        valid = [*valid_keys(), *listed_keys()]
        hint = _hint(re.sub(r"\.\d+\.", ".0.", path), valid=valid)
        return f"{path}: unknown key{hint.replace('.0.', f'.{_entry(path)}.')}"
    if kind == "missing":
        needed_by = "the list is too short" if isinstance(detail["loc"][-1], int) else "every recipe needs it"
        return f"{path}: missing; {needed_by}"
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        if path in valid_keys():
            return f"{path}: {message}"
        return f"{path}.{message}".removeprefix(".")  # checks across fields begin with the name of the field to mend
    if kind == "model_type":
        return f"{path}: got {_shown(detail['input'])}, expected a section with fields"
    expected = message.removeprefix("Input should be ")
    return f"{path}: got {_shown(detail['input'])}, expected {expected}"


def _hint(key: str, *, valid: list[str]) -> str:
    """What an error appends to name the nearest valid key: of the same section, then of any, then by the whole path."""
    section, _, field = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in valid if name.rpartition(".")[0] == section}
    abbreviated = [name for sibling, name in siblings.items() if field == "".join(w[0] for w in sibling.split("_"))]
    if abbreviated:
        return f"; did you mean {abbreviated[0]}?"
    sections = {name.partition(".")[0]: name.partition(".")[0] for name in valid if "." in name and not section}
    fields = {name.rpartition(".")[2]: name for name in reversed(valid)}
    whole = {name: name for name in valid}
    for written, names, cutoff in (
        (field, siblings | sections, 0.6),
        (key, whole, 0.9),  # a misspelt section with a field that many sections have
        (field, fields, 0.6),
        (key, whole, 0.6),
    ):
        near = difflib.get_close_matches(written, names, n=1, cutoff=cutoff)
        if near:
            return f"; did you mean {names[near[0]]}?"
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.3)
    return f"; the nearest is {near[0]}" if near else ""


def _shown(value: Any) -> str:
    """A value as an error shows it: its YAML form and its type, cut to a line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    names = {str: "text", int: "integer", float: "number", bool: "boolean", list: "list", dict: "section"}
    kind = names.get(type(value), "nothing" if value is None else type(value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def _joined(origin: str, *, lines: list[str]) -> str:
    """One message for all errors of one origin: a single line when there is one error, else one line each."""
    if len(lines) == 1:
        return f"{origin}: {lines[0]}"
    return "\n  ".join([f"{origin}: {len(lines)} errors", *lines])
