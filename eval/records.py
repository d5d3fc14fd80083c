"""The raw records of finished starts, read back. They are the truth: every reported number is computed from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.heads.files import read_json

AR = "ar"
"""Name of the arm without a head: plain autoregressive decoding."""


@dataclass(frozen=True)
class RequestRecord:
    """One served request. Times are seconds since its cell began; chunk i brought `chunk_sizes[i]` tokens.

    `per_step_accepted` and `per_step_drafted` hold one count per verification step and are None in the AR arm.
    """

    prompt_id: str
    n_in: int
    n_out: int
    t_submit: float
    t_first: float
    t_finish: float
    chunk_times: list[float]
    chunk_sizes: list[int]
    token_ids: list[int]
    finish_reason: str
    per_step_accepted: list[int] | None
    per_step_drafted: list[int] | None


@dataclass(frozen=True)
class CellRecord:
    """One measured cell of one start. `mean_running` is the time average of requests in flight."""

    dataset: str
    batch_size: int
    temperature: float
    max_tokens: int
    makespan: float
    mean_running: float
    counters: dict[str, int]
    requests: list[RequestRecord]


@dataclass(frozen=True)
class StartRecord:
    """One finished process: its arm, its engine as resolved, and its cells in order."""

    arm: str
    start: int
    draft_length: int
    description: dict[str, Any]
    cells: list[CellRecord]


def read_starts(directory: Path) -> list[StartRecord]:
    """All complete starts of a directory, in the order in which they ran."""
    return [read_start(path) for path in sorted(directory.glob("*.jsonl"))]


def read_start(path: Path) -> StartRecord:
    """One start from its JSONL and the JSON beside it.

    Raises:
        ValueError: a line is broken; names file and line.
    """
    requests: dict[int, list[RequestRecord]] = {}
    cells: list[CellRecord] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            raw = json.loads(line)
            if raw["kind"] == "request":
                requests.setdefault(raw["cell"], []).append(_pick(RequestRecord, raw))
            else:
                cells.append(_pick(CellRecord, {**raw, "requests": requests[raw["cell"]]}))
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}, is not a record of eyas ({error!r}); score again") from error
    description = read_json(path.with_suffix(".json"))
    head = description["speculative_config"]
    draft_length = 0 if head is None else head["num_speculative_tokens"]
    return StartRecord(description["arm"], description["start"], draft_length, description, cells)


def _pick(kind: type, raw: dict[str, Any]) -> Any:
    return kind(**{name: raw[name] for name in kind.__dataclass_fields__})


def cells_by_arm(starts: list[StartRecord]) -> dict[tuple[str, int], dict[str, list[CellRecord]]]:
    """(dataset, batch size) -> arm -> that cell in each of the arm's starts, in the order of the starts."""
    grouped: dict[tuple[str, int], dict[str, list[CellRecord]]] = {}
    for start in starts:
        for cell in start.cells:
            grouped.setdefault((cell.dataset, cell.batch_size), {}).setdefault(start.arm, []).append(cell)
    return grouped


def draft_lengths(starts: list[StartRecord]) -> dict[str, int]:
    """Arm -> number of drafted tokens a step (0 for AR), AR first and longest chain next."""
    lengths = {start.arm: start.draft_length for start in starts}
    return dict(sorted(lengths.items(), key=lambda item: (item[0] != AR, -item[1])))
