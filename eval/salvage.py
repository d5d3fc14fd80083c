"""What was measured before a start failed or was interrupted: kept, and never given up for less.

A start has to run again as a whole, because its process is a random effect that all its cells share. Until the new
attempt has finished as many blocks as the earlier one had, those of the earlier one lie beside it under `*.earlier`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from eyas.heads.files import write_text


def partial_path(stem: Path) -> Path:
    """Where a worker writes until it has finished."""
    return stem.with_suffix(".jsonl.partial")


def set_aside(stem: Path) -> None:
    """Before a new attempt: move what earlier attempts had measured out of its way."""
    if settle(stem):  # an attempt may have been killed together with its parent
        for suffix in (".jsonl", ".json"):
            stem.with_suffix(suffix).replace(_earlier(stem, suffix))


def settle(stem: Path) -> int:
    """After an attempt that failed: its finished blocks become the result, or those set aside where they are more.

    Returns the number of blocks.
    """
    result, description = stem.with_suffix(".jsonl"), stem.with_suffix(".json")
    new = finished_blocks(result if result.is_file() else partial_path(stem)) if description.is_file() else []
    kept = finished_blocks(_earlier(stem, ".jsonl"))
    if len(kept) > len(new):
        if _earlier(stem, ".json").is_file():  # else a kill left it where it was, and no attempt has begun since
            _earlier(stem, ".json").replace(description)
        _earlier(stem, ".jsonl").replace(result)
    elif new:
        write_text(result, "".join("".join(block) for block in new))
    else:
        result.unlink(missing_ok=True)
        description.unlink(missing_ok=True)
    partial_path(stem).unlink(missing_ok=True)
    forget_earlier(stem)
    return max(len(kept), len(new))


def forget_earlier(stem: Path) -> None:
    """Remove what was set aside."""
    for suffix in (".jsonl", ".json"):
        _earlier(stem, suffix).unlink(missing_ok=True)


def remove_records(stem: Path) -> None:
    """Remove all that any attempt measured."""
    for suffix in (".jsonl", ".json"):
        stem.with_suffix(suffix).unlink(missing_ok=True)
    partial_path(stem).unlink(missing_ok=True)
    forget_earlier(stem)


def _earlier(stem: Path, suffix: str) -> Path:
    return stem.with_suffix(f"{suffix}.earlier")


def finished_blocks(records: Path) -> list[list[str]]:
    """The lines of each block that is complete in a file of records, the block's own line last; a torn end is left out."""
    blocks: list[list[str]] = []
    lines: list[str] = []
    for line in records.read_text(encoding="utf-8").splitlines(keepends=True) if records.is_file() else ():
        lines.append(line)
        with suppress(json.JSONDecodeError):
            if line.endswith("\n") and json.loads(line)["kind"] == "cell":
                blocks.append(lines)
                lines = []
    return blocks
