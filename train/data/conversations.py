"""Conversation files: JSON lines (optionally gzipped), one conversation a line.

    {"id": "...", "split": "train" | "heldout", "source": "...", "truncated": false,
     "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Only `messages` is required. A file without splits is split by a hash of the first user turn, so the same prompt
always falls on the same side, whatever file it comes from.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.heads.files import write_bytes

Split = Literal["train", "heldout"]
ROLES = ("system", "user", "assistant")
HELDOUT_PER_MILLE = 20


@dataclass(frozen=True)
class Conversation:
    """One conversation; `truncated` says that its last answer was cut at a token limit."""

    id: str
    split: Split
    source: str
    truncated: bool
    messages: list[dict[str, str]]


def hash_split(first_user_turn: str) -> Split:
    """The side on which a prompt falls: 2 % of prompts, chosen by their hash, are held out of training."""
    return "heldout" if prompt_hash(first_user_turn) % 1000 < HELDOUT_PER_MILLE else "train"


def prompt_hash(text: str) -> int:
    """A stable integer for a prompt, insensitive to case and spacing."""
    return int(hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()[:12], 16)


def read_conversations(
    path: Path, *, on_bad_line: Literal["stop", "skip"]
) -> tuple[list[Conversation], dict[str, int]]:
    """All conversations of a file, and counts of what was read and skipped.

    Raises:
        ValueError: the file is missing, holds nothing usable, or a line is broken and `on_bad_line` is "stop".
    """
    if not path.is_file():
        raise ValueError(f"data.conversations: {path} does not exist; give a .jsonl or .jsonl.gz file of conversations")
    conversations: list[Conversation] = []
    bad = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            conversations.append(_parse(line, number=number))
        except ValueError as error:
            if on_bad_line == "stop":
                raise ValueError(
                    f"{path}, line {number}: {error}; mend the line, or set data.on_bad_line=skip to leave it out"
                ) from error
            bad += 1
    if not conversations:
        raise ValueError(f"{path} holds no usable conversation ({bad} broken lines)")
    return conversations, {"conversations_read": len(conversations), "lines_skipped": bad}


def write_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write a gzipped conversation file atomically, byte for byte the same for the same conversations."""
    text = "".join(json.dumps(vars(conversation), ensure_ascii=False) + "\n" for conversation in conversations)
    write_bytes(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as stream:
                yield from stream
        else:
            with path.open(encoding="utf-8") as stream:
                yield from stream
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read as text ({error}); is it a JSON lines file, gzipped if it ends in .gz?"
        ) from error


def _parse(line: str, *, number: int) -> Conversation:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    messages = _check_messages(record.get("messages"))
    first_user = next(message["content"] for message in messages if message["role"] == "user")
    split = record.get("split", hash_split(first_user))
    if split not in ("train", "heldout"):
        raise ValueError(f"split is {split!r}, and must be 'train' or 'heldout'")
    return Conversation(
        id=str(record.get("id", number)),
        split=split,
        source=str(record.get("source", "unknown")),
        truncated=bool(record.get("truncated", False)),
        messages=messages,
    )


def _check_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' is missing or empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("a message is not an object with a text 'content'")
        if message.get("role") not in ROLES:
            raise ValueError(f"a message has the role {message.get('role')!r}, and must have one of {', '.join(ROLES)}")
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("there is no user turn")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
