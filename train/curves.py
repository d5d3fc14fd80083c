"""Names of curves in trackers: `train/` for what training logs, `eval/` for held-out evaluations."""

from __future__ import annotations

from typing import Any


def curves(record: dict[str, Any]) -> dict[str, Any]:
    """A record by curve, without its step."""
    return {_name(key): value for key, value in record.items() if key != "step"}


def _name(key: str) -> str:
    kind, slash, rest = key.rpartition("/")
    if not slash:
        return f"train/{rest}"
    return f"eval/{rest}" if kind == "heldout" else key
