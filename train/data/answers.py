"""What is asked of the target and what comes back, whoever answers: an engine here or servers elsewhere.

A backend is a `Generate`: it is given requests and the name of the round, and returns an answer for each. The answers
of a round lie in `<name>.jsonl` of the work directory, one line each, appended as they end. A request whose id stands
there is not asked again, so a backend that is killed and called again with the same round loses only what was running.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from eyas.heads.files import write_bytes

Answer = dict[str, Any]
"""{"id", "token_ids", "finish_reason"}: "stop" (the end-of-turn token is the last one), "length", or "error".

"retokenised": true stands in an answer whose server sent text only, so that its tokens are the tokenizer's choice."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One completion to make.

    Attributes:
        id: unique within a run, "<conversation id>-<turn>" for an answer.
        token_ids: the prompt.
        temperature: 0 is greedy, and then top_p, top_k and min_p say nothing.
        max_tokens: length at which the completion is cut.
        top_p, top_k, min_p: 1, 0 and 0 switch them off. `min_p` drops tokens below that share of the likeliest one.
        seed: of this completion alone, so that it does not depend on what runs beside it.
        stop_token_ids: the completion ends with the first of them.
        last: no later request continues this one, so its hidden states cover the whole conversation.
    """

    id: str
    token_ids: list[int]
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    last: bool = True


Generate = Callable[[list[GenerationRequest], str], dict[str, Answer]]


def stable_number(*parts: object) -> int:
    """A 62-bit number that depends on `parts` alone: seeds of requests, choices by conversation."""
    text = "\x1f".join(str(part) for part in parts)
    return int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16], 16) >> 2


def answer_file(work_dir: Path, name: str) -> Path:
    """Where the answers of a round lie."""
    return work_dir / f"{name}.jsonl"


def read_finished(path: Path) -> dict[str, Answer]:
    """Answers that stand in `path`, by request id; lines that a kill cut short are taken out of the file."""
    if not path.is_file():
        return {}
    content = path.read_bytes()
    finished: dict[str, Answer] = {}
    kept: list[bytes] = []
    for line in content.splitlines(keepends=True):
        answer = _parse(line)
        if answer is not None:
            finished[answer["id"]] = answer
            kept.append(line)
    if sum(map(len, kept)) != len(content):
        write_bytes(path, b"".join(kept))
    return finished


def append_answer(stream: TextIO, answer: Answer) -> None:
    """Write one line and hand it to the operating system, so that a kill of this process loses nothing of it."""
    stream.write(json.dumps(answer, separators=(",", ":")) + "\n")
    stream.flush()


def remove_answers(work_dir: Path, *, prefix: str) -> None:
    """Delete the files of all rounds whose name begins with `prefix`, once their answers stand elsewhere."""
    for path in work_dir.glob(f"{prefix}*"):
        path.unlink()


def _parse(line: bytes) -> Answer | None:
    if not line.endswith(b"\n"):
        return None  # even when it is complete JSON: the next answer would be glued to it
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if not isinstance(answer, dict) or not {"id", "token_ids", "finish_reason"} <= answer.keys():
        return None
    return answer
