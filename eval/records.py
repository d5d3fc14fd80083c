"""The raw records of finished starts, read back. They are the truth: every reported number is computed from them.

A *start* is one engine process of one *arm*. It measures *cells* (dataset, temperature, batch size), each in one or more
*blocks*: one block serves all the cell's prompts once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from eyas.heads.files import read_json

AR = "ar"
"""Name of the arm without a head: plain autoregressive decoding."""

AR_TWIN = "ar_twin"
"""Side by side: plain decoding once more, beside AR. Its pairs tell by how much two equal engines differ."""

Kind = Literal["ar", "head", "other", "schedule"]
Protocol = Literal["starts", "side-by-side"]
Phase = Literal["grid", "schedule"]
"""The grid comes first; the schedule chosen from it is measured afterwards, beside fresh starts of AR and of the best arms."""

KINDS: tuple[Kind, ...] = ("ar", "head", "other", "schedule")


PLACES = ("arm", "kind", "start", "round", "protocol", "phase", "beside")
"""What a start's description says about its place in the session."""


class CellKey(NamedTuple):
    """What was asked of the engine, whatever the arm."""

    dataset: str
    temperature: float
    batch_size: int


class StepRecord(NamedTuple):
    """One engine step.

    Attributes:
        seconds: of the call.
        running: requests in its batch; those that the engine let wait are not counted.
        tokens: tokens that came out of it.
        prefills: requests whose first token came out of it; 0 = a pure decode step.
    """

    seconds: float
    running: int
    tokens: int
    prefills: int


@dataclass(frozen=True)
class RequestRecord:
    """One served request. Times are seconds since its block began; chunk i brought `chunk_sizes[i]` tokens.

    `per_step_accepted` and `per_step_drafted` hold one count per verification step and are None in the AR arm.
    Requests made from turns of one recorded conversation share `conversation`; it is None for a single turn.
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
    conversation: str | None = None

    @property
    def unit(self) -> str:
        """The independent witness that this request is part of: its conversation, or the prompt itself."""
        return self.prompt_id if self.conversation is None else self.conversation


@dataclass(frozen=True)
class CellRecord:
    """One measured block of a cell in one start.

    Attributes:
        makespan: seconds from the first submission to the last token.
        mean_running: time average of the batch that ran.
        steps: every engine step of the measured part, in order.
        harness_seconds: the makespan without the time spent inside the engine's calls.
    """

    dataset: str
    batch_size: int
    temperature: float
    max_tokens: int
    block: int
    makespan: float
    mean_running: float
    counters: dict[str, int]
    requests: list[RequestRecord]
    steps: list[StepRecord]
    harness_seconds: float

    @property
    def key(self) -> CellKey:
        return CellKey(self.dataset, self.temperature, self.batch_size)


@dataclass(frozen=True)
class StartRecord:
    """One finished process: its arm, its place in the order, its engine as resolved, and its cells in order.

    `draft_length` is 0 for AR and the longest of a schedule. Starts of one `round` ran one after the other (protocol
    "starts") or at the same time ("side-by-side"); `beside` is the arm that was loaded at the same time.
    """

    arm: str
    kind: Kind
    start: int
    round: int
    protocol: Protocol
    phase: Phase
    beside: str | None
    draft_length: int
    description: dict[str, Any]
    cells: list[CellRecord]


@dataclass(frozen=True)
class ArmFacts:
    """What an arm is. `synthetic`: its acceptance was made up by the engine, so that no speed of it is a result.

    `slowed_by`: share of each step's time that was added on purpose, in a control of the statistics.
    """

    kind: Kind
    draft_length: int
    speculative_config: dict[str, Any] | None
    synthetic: bool
    slowed_by: float = 0.0


Blocks = list[CellRecord]
"""The blocks of one cell in one start."""

Cells = dict[CellKey, dict[str, list[Blocks]]]
"""Cell -> arm -> the arm's starts, in the order in which they ran -> blocks."""


def read_starts(directory: Path) -> list[StartRecord]:
    """All complete starts of a directory, in the order in which they ran.

    Raises:
        ValueError: a file is broken, or the records are of two sessions.
    """
    starts = [read_start(path) for path in sorted(directory.glob("*.jsonl"))]
    require_one_session(starts, where=directory)
    return starts


def require_one_session(starts: Sequence[StartRecord], *, where: Path) -> None:
    """Refuse records of two sessions: their machines, prompts or engines may differ unseen.

    Raises:
        ValueError: names a start of each of two sessions.
    """
    first: dict[str, StartRecord] = {}
    for start in starts:
        first.setdefault(start.description["session"], start)
    if len(first) > 1:
        (one, a), (other, b) = list(first.items())[:2]
        raise ValueError(
            f"{where} mixes records of two sessions ({a.start:03d}-{a.arm} of {one}, {b.start:03d}-{b.arm} of {other}); "
            "arms are comparable within one session only, so move the files of the other one away or score again"
        )


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
                steps = [StepRecord(*step) for step in raw["steps"]]
                cells.append(_pick(CellRecord, {**raw, "requests": requests[raw["cell"]], "steps": steps}))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a record of eyas ({error!r}); score again") from error
    return _with_description(path, cells)


def _with_description(path: Path, cells: list[CellRecord]) -> StartRecord:
    description_path = path.with_suffix(".json")
    description = read_json(description_path)
    try:
        places = {name: description[name] for name in PLACES}
        asked, engine = description["speculative_config"], description["engine"]
        length = longest_draft(asked) or longest_draft(None if asked is None else engine["speculative_config"])
        session = description["session"]
    except KeyError as error:
        raise ValueError(
            f"{description_path} does not describe a start of this version of eyas (no {error}); score again"
        ) from error
    assert session, f"{path} belongs to a session"
    return StartRecord(**places, draft_length=length, description=description, cells=cells)


def _pick(kind: type, raw: dict[str, Any]) -> Any:
    return kind(**{field.name: raw[field.name] for field in fields(kind)})


def longest_draft(speculative_config: dict[str, Any] | None) -> int:
    """Most tokens drafted in one step: 0 for plain decoding, the longest of a schedule."""
    if speculative_config is None:
        return 0
    ranges = speculative_config.get("num_speculative_tokens_per_batch_size") or []
    return max([speculative_config.get("num_speculative_tokens") or 0, *(length for _, _, length in ranges)])


def is_synthetic(speculative_config: dict[str, Any] | None) -> bool:
    """Whether the engine makes acceptance up instead of comparing drafts with the target."""
    config = speculative_config or {}
    return config.get("rejection_sample_method") == "synthetic" or any(
        value is not None for name, value in config.items() if name.startswith("synthetic_")
    )


def cells_by_arm(starts: Sequence[StartRecord]) -> Cells:
    """The blocks of every cell by arm and start, in the order of the starts."""
    grouped: Cells = {}
    for start in starts:
        own: dict[CellKey, Blocks] = {}
        for cell in start.cells:
            own.setdefault(cell.key, []).append(cell)
        for key, blocks in own.items():
            grouped.setdefault(key, {}).setdefault(start.arm, []).append(blocks)
    return grouped


def arms_of(starts: Sequence[StartRecord]) -> dict[str, ArmFacts]:
    """The arms by name: AR first, then heads by falling chain length, then other methods, then the schedule."""
    arms = {start.arm: _arm_facts(start) for start in starts}
    return dict(sorted(arms.items(), key=lambda item: (KINDS.index(item[1].kind), -item[1].draft_length, item[0])))


def _arm_facts(start: StartRecord) -> ArmFacts:
    asked = start.description["speculative_config"]
    resolved = start.description["engine"].get("speculative_config")
    return ArmFacts(
        kind=start.kind,
        draft_length=start.draft_length,
        speculative_config=asked,
        synthetic=is_synthetic(asked) or is_synthetic(resolved),
        slowed_by=start.description.get("slowed_by", 0.0),
    )
