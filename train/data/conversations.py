"""Conversation files: JSON lines (optionally gzipped), one conversation a line, read one at a time.

    {"id": "...", "split": "train" | "heldout", "source": "...", "truncated": false,
     "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}

Only `messages` is required; what a message may hold is checked in train/data/messages.py. A conversation may end with a
turn that nobody answered yet: it is a prompt. A file without splits is split by a hash of the first user turn, so the
same prompt always falls on the same side, whatever file it comes from.

Lines are read as bytes and decoded one by one, so that a line that is no UTF-8 costs that line and not the file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal

from eyas.heads.chat import Message
from eyas.heads.files import atomic_stream
from eyas.train.data.messages import BadConversation, check_messages, check_tools

Split = Literal["train", "heldout"]
OnBadLine = Literal["stop", "skip"]
HELDOUT_SHARE = 0.02
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Conversation:
    """One conversation; `truncated` says that its last answer was cut at a token limit."""

    id: str
    split: Split
    source: str
    truncated: bool
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def hash_split(first_user_turn: str, *, heldout_share: float = HELDOUT_SHARE) -> Split:
    """The side on which a prompt falls: a share of all prompts, chosen by their hash, is held out of training."""
    number = prompt_hash(first_user_turn)
    # The last three digits decide, the next three refine shares below one in a thousand.
    return "heldout" if number % 1000 + number // 1000 % 1000 / 1000 < heldout_share * 1000 else "train"


def prompt_hash(text: str) -> int:
    """A stable 48-bit integer for a prompt, insensitive to case and spacing."""
    plain = " ".join(text.lower().split()).encode("utf-8", "surrogatepass")
    return int(hashlib.sha256(plain).hexdigest()[:12], 16)


def first_user_turn(messages: Iterable[Message]) -> str:
    """Text of the first user turn of a checked conversation."""
    return next(message["content"] for message in messages if message["role"] == "user")


def iterate_conversations(
    path: Path, *, on_bad_line: OnBadLine, skipped: Counter[str] | None = None
) -> Iterator[Conversation]:
    """The conversations of a file in order, one in memory at a time.

    Args:
        skipped: with `on_bad_line` "skip", the number of lines left out is added here by reason.

    Raises:
        ValueError: the file is missing or its compression broken, or a line is bad and `on_bad_line` is "stop".
    """
    for number, line in read_lines(path):
        try:
            conversation = parse_line(line, number=number)
        except BadConversation as error:
            if on_bad_line == "stop":
                raise ValueError(
                    f"{path}, line {number}: {error}; mend the line, or set data.on_bad_line=skip to leave it out"
                ) from error
            if skipped is not None:
                skipped[error.reason] += 1
            continue
        yield conversation


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write a conversation file atomically, gzipped if its name ends in .gz; equal conversations give equal bytes."""
    write_records(path, map(to_record, conversations))


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines atomically, one record in memory at a time; gzipped if the name ends in .gz."""
    with atomic_stream(path) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=9, mtime=0) as stream:
                stream.writelines(map(encode_record, records))
        else:
            raw.writelines(map(encode_record, records))


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One JSON line. NaN and infinity are refused: readers of other languages choke on them."""
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def to_record(conversation: Conversation) -> dict[str, Any]:
    """The JSON object of a conversation; `tools` only where there are any."""
    record = vars(conversation)
    return record if conversation.tools is not None else {name: record[name] for name in record if name != "tools"}


def read_at(stream: IO[bytes], offset: int, *, number: int | None = None) -> Conversation:
    """The conversation of the line that begins at `offset` of an open plain file.

    Args:
        number: line number, which names a conversation without an id; None takes the offset.

    Raises:
        BadConversation: the line is no usable conversation.
    """
    stream.seek(offset)
    return parse_line(stream.readline(), number=offset if number is None else number)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every line that is not blank; .gz files are unpacked on the way.

    Raises:
        ValueError: the file is missing, or its compression is broken or cut short.
    """
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read as text ({error}); a gzipped file must end in .gz, be gzip, and be complete: "
            "copy it again, or pack it anew"
        ) from error


def parse_line(line: bytes, *, number: int) -> Conversation:
    """The conversation of one line.

    Raises:
        BadConversation: it is none, with the reason.
    """
    return conversation_of(parse_json(line), default_id=str(number))


def parse_json(line: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        BadConversation: no UTF-8, no JSON, or no object.
    """
    try:
        text = line.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadConversation("not_utf8", f"not valid UTF-8 ({error.reason} at byte {error.start})") from error
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # besides syntax: numbers of 4,300 digits, brackets nested too deep
        raise BadConversation("not_json", f"not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise BadConversation("not_an_object", "not a JSON object")
    return record


def conversation_of(
    record: Mapping[str, Any], *, default_id: str, default_source: str = "unknown", heldout_share: float = HELDOUT_SHARE
) -> Conversation:
    """Check a record in the form above and give it what it lacks.

    Raises:
        BadConversation: something in it cannot be used, with the reason.
    """
    messages = check_messages(record.get("messages"))
    split = record.get("split")
    if split is None:
        split = hash_split(first_user_turn(messages), heldout_share=heldout_share)
    if split not in ("train", "heldout"):
        raise BadConversation("bad_split", f"split is {split!r}, and must be 'train' or 'heldout'")
    truncated = record.get("truncated")
    if truncated not in (None, False, True):
        raise BadConversation("bad_truncated", f"truncated is {truncated!r}, and must be true or false")
    own_id, own_source = record.get("id"), record.get("source")
    conversation = Conversation(
        id=default_id if own_id is None else str(own_id),
        split=split,
        source=default_source if own_source is None else str(own_source),
        truncated=bool(truncated),
        messages=messages,
        tools=check_tools(record.get("tools")),
    )
    _check_writable(conversation)
    return conversation


def _check_writable(conversation: Conversation) -> None:
    """Half of a surrogate pair, NaN and the like are legal in Python and JSON but not in what is written here."""
    try:
        encode_record(to_record(conversation))
    except UnicodeEncodeError as error:
        raise BadConversation("surrogates", "a text holds half of a surrogate pair, which is no character") from error
    except (ValueError, RecursionError) as error:
        raise BadConversation("not_json", f"not valid JSON ({error})") from error


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    if not path.is_file():
        raise ValueError(f"data.conversations: {path} does not exist; give a .jsonl or .jsonl.gz file of conversations")
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
