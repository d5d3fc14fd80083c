"""Recorded conversations as prompts: which turns are asked, and what history each turn carries.

Turn t of a recorded conversation is asked after the *recorded* turns before it, not after what an arm answered: so every
arm reads the same token ids, whatever it says.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.heads.chat import Message

Turns = Literal["first", "all"]
LeftOut = Literal["other_split", "no_user_turn"]
"""Why a line gives no prompt; readers hand the word on in its place, so that what is left out can be counted."""

HELDOUT_SPLIT = "heldout"


@dataclass(frozen=True)
class Prompt:
    """Messages that end with a user turn. Turns of one conversation share `conversation`."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    conversation: str | None = None


def heldout_prompts(path: Path, *, turns: Turns) -> Iterator[Prompt | LeftOut]:
    """Prompts of the held-out conversations of the file that prepare wrote.

    Raises:
        ValueError: the file is missing, an id comes twice, or a line is not
            `{"id", "split", "messages": [{"role", "content"}]}`.
    """
    seen: dict[str, str] = {}
    for where, line in _lines(path, mend="score needs the conversations file that prepare wrote"):
        if not {"id", "split", "messages"} <= line.keys():
            raise ValueError(f"{where} is not an object with id, split and messages; repair or remove the line")
        if line["split"] != HELDOUT_SPLIT:
            yield "other_split"
            continue
        name = str(line["id"])
        _require_new(name, seen, where=where)
        yield from _conversation_prompts(line, name=name, turns=turns, where=where)


def prompt_set_prompts(path: Path, *, turns: Turns, split: str) -> Iterator[Prompt | LeftOut]:
    """Prompts of a file of one's own: JSONL or JSONL.gz, each line one of

    - `{"messages": [{"role", "content"}, ...]}`, a conversation, perhaps with `tools`;
    - `{"prompt": text}`, one user turn;
    - `{"turns": [text, ...]}`, user turns without answers, as MT-Bench and Spec-Bench have them: only the first is asked.

    `id` (or `question_id`) names a line; without it its number does. A line whose `split` is another than `split` is left
    out; one without a split belongs to the set.

    Raises:
        ValueError: the file is missing, an id comes twice, a line has another form, or all turns are wanted of a line
            without answers.
    """
    seen: dict[str, str] = {}
    for number, (where, line) in enumerate(_lines(path, mend="name a JSONL file in score.prompt_sets"), start=1):
        if line.get("split", split) != split:
            yield "other_split"
            continue
        name = str(line.get("id", line.get("question_id", number)))
        _require_new(name, seen, where=where)
        if "messages" in line:
            yield from _conversation_prompts(line, name=name, turns=turns, where=where)
            continue
        text = line["prompt"] if "prompt" in line else _first_text(line.get("turns"), turns=turns, where=where)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where} has no messages, prompt or turns; repair or remove the line")
        yield Prompt(name, [{"role": "user", "content": text}])


def _require_new(name: str, seen: dict[str, str], *, where: str) -> None:
    """Two prompts of one id would pass for one in every count and interval."""
    if name in seen:
        raise ValueError(f"{where} has the id {name!r} of {seen[name]}; ids tell prompts apart, so give each its own")
    seen[name] = where


def _first_text(texts: Any, *, turns: Turns, where: str) -> Any:
    if not isinstance(texts, list) or not texts:
        return None
    if turns == "all" and len(texts) > 1:
        raise ValueError(
            f"{where} has user turns but no recorded answers between them, so only its first turn can be asked alike of "
            "every arm; set turns: first"
        )
    return texts[0]


def _conversation_prompts(line: dict[str, Any], *, name: str, turns: Turns, where: str) -> Sequence[Prompt | LeftOut]:
    messages = line["messages"]
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError(f"{where} has a message without role and content; repair or remove the line")
    tools = line.get("tools")
    asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        return ["no_user_turn"]
    if turns == "first":
        return [Prompt(name, _first_turn(messages, user=asked[0]), tools)]
    return [
        Prompt(f"{name}#{turn}", messages[: index + 1], tools, conversation=name)
        for turn, index in enumerate(asked, start=1)
    ]


def _first_turn(messages: list[Message], *, user: int) -> list[Message]:
    """The first user message, at index `user`, and the system messages before it."""
    systems = [earlier for earlier in messages[:user] if earlier["role"] in ("system", "developer")]
    return [*systems, messages[user]]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message and ("content" in message or "tool_calls" in message)


def _lines(path: Path, *, mend: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a JSONL file, each with words that say where it stands."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; {mend}")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _parse(line, where=where)


def _parse(line: str, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); repair or remove the line") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object; repair or remove the line")
    return value
