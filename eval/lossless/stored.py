"""The stored files of the ladder, read back. Each says which session it is of: levels of two sessions are never compared.

ladder.json (which arm stands for which, and how it was asked), starts/ (records of the engines), sampler.json (counts of L0),
logits.json (what the target says where answers differ), offline.json (acceptance predicted along the served answers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.eval.records import CellRecord, StartRecord, read_starts
from eyas.heads.files import fingerprint, read_json

LADDER = "ladder.json"
SAMPLER = "sampler.json"
LOGITS = "logits.json"
OFFLINE = "offline.json"
STARTS = "starts"

PLAIN_START = 0
NULL_START = 1
"""Plain decoding starts twice: the first start is the reference, the second the null."""

Served = dict[str, dict[str, CellRecord]]
"""Run ("ar", "null", or an arm) -> level -> its cell."""


def read_stored(path: Path, *, session: str) -> dict[str, Any] | None:
    """Content of a file of the ladder; None where there is none.

    Raises:
        ValueError: it is of another session, or does not say of which.
    """
    if not path.is_file():
        return None
    found = read_json(path)
    if found.get("session") != session:
        raise ValueError(_other_session(path, found.get("session"), session))
    return found


def read_ladder_starts(directory: Path, *, session: str) -> list[StartRecord]:
    """The starts of the ladder in `directory`, the score's `lossless` folder; [] where none left a record.

    Raises:
        ValueError: a file is broken, or a start is of another session.
    """
    starts = read_starts(directory / STARTS) if (directory / STARTS).is_dir() else []
    for start in starts:
        if start.description["session"] != session:
            path = directory / STARTS / f"{start.start:03d}-{start.arm}.json"
            raise ValueError(_other_session(path, start.description["session"], session))
    return starts


def _other_session(path: Path, found: str | None, session: str) -> str:
    return (
        f"{path} is of session {found or '(not said)'}, the score of {session}; levels of the ladder belong to one session, so "
        "move the file away and run `eyas score` again, which measures what is missing"
    )


def served_cells(starts: Sequence[StartRecord]) -> Served:
    """The cells of each run by level. A start that broke off lacks cells."""
    names = {start.start: start.arm for start in starts} | {PLAIN_START: "ar", NULL_START: "null"}
    return {names[start.start]: {cell.dataset: cell for cell in start.cells} for start in starts}


def answers_fingerprint(served: Mapping[str, Mapping[str, CellRecord]]) -> str:
    """Identity of all greedy answers: what the target said about them holds for these and for no others."""
    return fingerprint(
        {
            f"{run} {level}": [request.token_ids for request in cells[level].requests]
            for run, cells in served.items()
            for level in ("L1", "L2")
            if level in cells
        }
    )


def is_quantised(starts: Sequence[StartRecord]) -> bool:
    """Whether the engines served a quantised target, whose logits no float32 forward of other software gives."""
    return any((start.description["engine"].get("model_config") or {}).get("quantization") for start in starts)
