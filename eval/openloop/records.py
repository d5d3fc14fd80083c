"""Raw records of open-loop cells: what was asked when, and every chunk that came back.

A *cell* is one rate in one start of one arm. Its file holds one line for the cell and one for each request, and appears
when every request has ended, well or not. Times are seconds since the cell began.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from eyas.eval.records import Kind
from eyas.heads.files import read_json, write_text

PLAN = "plan.json"
SERVER = "server-"
"""Beginning of the names of a server's log and of its description; a start has as many servers as it took."""
FAILED = ".failed.json"
"""Ending of the reason why a cell has no result."""


@dataclass
class LoadRequest:
    """One request. Filled in while it is under way; nothing of it is dropped when it fails.

    Attributes:
        conversation: of which the prompt is a turn; None where it stands alone.
        t_scheduled: when the Poisson process makes it arrive. Latencies are counted from here: time that a slow client
            or a full server makes it wait is time that its user waits.
        t_released: when the client got round to it; later than scheduled by the client's own lag.
        t_sent: when one of the connections was free for it; None when none ever was.
        t_finish: when the last tokens came, or when it failed; None when it never ended.
        chunk_times, chunk_sizes: chunk i came at `chunk_times[i]` with `chunk_sizes[i]` tokens.
        completion_tokens: tokens as the server counts them.
        queue_seconds: how long the engine let it wait before its first step.
        steps, drafted, accepted: verification steps and tokens of speculative decoding; None without it.
        failure: why it has no complete answer; None when it has one.
    """

    index: int
    prompt_id: str
    conversation: str | None
    n_in: int
    t_scheduled: float
    t_released: float
    t_sent: float | None
    t_finish: float | None
    chunk_times: list[float]
    chunk_sizes: list[int]
    token_ids: list[int]
    finish_reason: str | None
    completion_tokens: int | None
    queue_seconds: float | None
    steps: int | None
    drafted: int | None
    accepted: int | None
    failure: str | None

    @property
    def n_out(self) -> int:
        return len(self.token_ids)

    @property
    def unit(self) -> str:
        """The independent witness that this request is part of: its conversation, or the prompt itself."""
        return self.prompt_id if self.conversation is None else self.conversation


class Sample(NamedTuple):
    """Gauges of /metrics at one moment: requests in the batch, requests waiting, share of the KV cache in use."""

    t: float
    running: float
    waiting: float
    kv_cache: float


@dataclass(frozen=True)
class LoadCell:
    """One measured rate of one start.

    Attributes:
        session: id of the session that measured it.
        fingerprint: of everything that shaped it; a cell of another plan is measured again.
        seconds: from the beginning to the end of the last request.
        counters: what the server counted in between.
        accepted_per_position: drafted tokens accepted at each draft position, by the server's counters.
        samples: gauges over time.
        loop_lags: by how much a timer of the client was late, sampled steadily while requests were under way.
        load_average: of the machine, before the cell.
    """

    session: str
    fingerprint: str
    arm: str
    kind: Kind
    start: int
    rate: float
    dataset: str
    temperature: float
    max_tokens: int
    fixed_length: bool
    max_num_seqs: int
    max_connections: int
    speculative_config: dict[str, Any] | None
    seconds: float
    counters: dict[str, int]
    accepted_per_position: list[int]
    samples: list[Sample]
    loop_lags: list[float]
    load_average: float
    requests: list[LoadRequest]


@dataclass(frozen=True)
class FailedCell:
    """A rate that has no result in one start of an arm, and why."""

    session: str
    arm: str
    kind: Kind
    start: int
    rate: float
    reason: str
    log_tail: list[str]


def cell_path(directory: Path, *, rate: float) -> Path:
    """Where the cell of a start's directory is; a failed one lies beside it with another ending."""
    return directory / f"rate-{rate:g}.jsonl"


def failure_path(path: Path) -> Path:
    """Where the reason stands why `path` is not there."""
    return path.with_name(path.name.removesuffix(".jsonl") + FAILED)


def partial_path(path: Path) -> Path:
    """Where the requests of a failed cell lie for whoever looks for the cause; nothing is computed from them."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".partial")


def write_cell(path: Path, cell: LoadCell) -> None:
    """Write a cell: one line of it, one line per request."""
    head, rows = asdict(cell), [asdict(request) for request in cell.requests]
    lines = [head | {"requests": len(rows)}, *rows]
    write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def read_cell(path: Path) -> LoadCell:
    """Read what `write_cell` wrote.

    Raises:
        ValueError: it is something else, or half of it; names the file.
    """
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        requests = [LoadRequest(**{field.name: row[field.name] for field in fields(LoadRequest)}) for row in rows]
        samples = [Sample(*sample) for sample in head["samples"]]
        whole = head | {"requests": requests, "samples": samples}
        cell = LoadCell(**{field.name: whole[field.name] for field in fields(LoadCell)})
        complete = len(requests) == head["requests"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no open-loop record of eyas ({error!r}); delete it and score again") from error
    if not complete:
        raise ValueError(f"{path} holds {len(requests)} of {head['requests']} requests; delete it and score again")
    return cell


def holds(path: Path, fingerprint: str) -> bool:
    """Whether `path` is a complete cell of exactly this plan."""
    if not path.is_file():
        return False
    try:
        return read_cell(path).fingerprint == fingerprint
    except ValueError:
        return False


def read_cells(directory: Path, *, session: str) -> list[LoadCell]:
    """All complete cells of an open-loop directory, start after start, by rising rate.

    Raises:
        ValueError: a file is broken, or of another session; names it.
    """
    cells = []
    for path in sorted(directory.glob("*/rate-*.jsonl")):
        cells.append(read_cell(path))
        require_session(path, found=cells[-1].session, session=session)
    return sorted(cells, key=lambda cell: (cell.start, cell.rate))


def read_failed(directory: Path, *, session: str) -> list[FailedCell]:
    """All cells without a result, in the same order; raises as `read_cells` does."""
    failed = []
    for path in sorted(directory.glob(f"*/rate-*{FAILED}")):
        raw = read_of_session(path, session=session)
        failed.append(FailedCell(**{field.name: raw[field.name] for field in fields(FailedCell)}))
    return sorted(failed, key=lambda cell: (cell.start, cell.rate))


def read_of_session(path: Path, *, session: str) -> dict[str, Any]:
    """A JSON file of the open loop that names its session.

    Raises:
        ValueError: it is of another session, or names none; names the file.
    """
    raw = read_json(path)
    require_session(path, found=raw.get("session"), session=session)
    return raw


def require_session(path: Path, *, found: str | None, session: str) -> None:
    """Refuse a file of another session: its machine, prompts and settings may be others.

    Raises:
        ValueError: names the file and both sessions.
    """
    if found != session:
        raise ValueError(
            f"{path} is of session {found or 'unknown'}, the score of {session}; a report describes one session only, so move "
            "the file away, or score again"
        )


def realised_rate(times: Sequence[float]) -> float | None:
    """Requests per second between the first and the last of them; None for fewer than two."""
    span = max(times, default=0.0) - min(times, default=0.0)
    return (len(times) - 1) / span if span > 0 else None
