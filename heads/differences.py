"""Where two sets of nested settings differ, in words."""

from __future__ import annotations

from typing import Any


def flatten(values: dict[str, Any], *, under: str = "") -> dict[str, Any]:
    """Nested settings by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, under=f"{under}{name}.")
        else:
            flat[f"{under}{name}"] = value
    return flat


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Dotted paths whose values differ, each with both values."""
    names = sorted(before.keys() | now.keys())
    missing = "absent"
    return [
        f"{name} was {before.get(name, missing)} and is {now.get(name, missing)}"
        for name in names
        if before.get(name, missing) != now.get(name, missing)
    ]
