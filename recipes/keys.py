"""The dotted paths of a recipe's fields, for errors that name the nearest one and for the list with their meanings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic.fields import FieldInfo

from eyas.recipes.schema import Recipe
from eyas.recipes.section import Section

FIRST_ENTRY = ".0."
"""How a path goes through a list: its first entry stands for all."""


def valid_keys() -> list[str]:
    """Dotted path of every field of a recipe, sections themselves and fields of list entries excluded."""
    return [key for key, _ in _fields(Recipe, prefix="") if FIRST_ENTRY not in key]


def listed_keys() -> list[str]:
    """Dotted paths of the fields of sections that stand in lists, as an error writes them: `data.sources.0.path`."""
    return [key for key, _ in _fields(Recipe, prefix="") if FIRST_ENTRY in key]


def describe_keys() -> list[tuple[str, str]]:
    """Every key with a line that tells its default and what it means."""
    described = []
    for key, field in _fields(Recipe, prefix=""):
        name = key.replace(FIRST_ENTRY, "[].")
        default = "" if field.is_required() else f" (default {_shown(field)})"
        described.append((name, f"{name}{default}: {field.description or ''}".rstrip(": ")))
    return described


def _fields(model: type[Section], *, prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _fields(inner, prefix=f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", field
        for item in get_args(inner):
            if isinstance(item, type) and issubclass(item, Section):
                yield from _fields(item, prefix=f"{prefix}{name}{FIRST_ENTRY}")


def _shown(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
