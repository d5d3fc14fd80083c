"""Where two sets of nested settings differ, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SHOWN = 8


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The fields whose values differ, by dotted name, each with both values; empty where nothing does."""
    there, here = _flat(before), _flat(now)
    names = [name for name in sorted(there.keys() | here.keys()) if _shown(there, name) != _shown(here, name)]
    lines = [f"{name} was {_shown(there, name)} and is {_shown(here, name)}" for name in names[:SHOWN]]
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return "; ".join([*lines, *more])


def _flat(settings: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, prefix=f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _shown(flat: Mapping[str, Any], name: str) -> str:
    """A value as JSON has it, so that a tuple equals the list that it was written as."""
    return json.dumps(flat[name], ensure_ascii=False) if name in flat else "absent"
