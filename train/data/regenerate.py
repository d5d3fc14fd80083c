"""Conversations whose every assistant turn the target wrote itself: `data.regenerate=true`.

Acceptance is agreement with the target, so a head is trained on what the target says, not on what somebody else once
answered. Training answers are sampled; held-out answers are greedy unless asked otherwise, because greedy decoding is
scored and the held-out tau is exact only on text that the target would produce in that mode.

The input is walked in chunks, and all turns of a chunk are answered before the next one is read, so memory does not grow
with the input. A finished chunk is appended to the output, and a line in `chunks.jsonl` says how long the output then
is. After a kill the output is cut back to the last such line, and the answers of the chunk that was under way lie in
the files of its rounds (answers.py): nothing is lost and nothing is said twice.

Where training takes so many tokens only, no more are made: conversations are then taken in a shuffled order, the held-out
ones first, until those for training have as many. How large a chunk is follows from the chunks before it, so a
continued run cuts the same ones.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import Answer, Generate, remove_answers
from eyas.train.data.conversations import Conversation, OnBadLine, encode_record, iterate_conversations
from eyas.train.data.cut import Cut
from eyas.train.data.dialogues import Dialogue, Sampling, ask, open_dialogue, take
from eyas.train.data.follow_ups import FollowUps, FollowUpWriter
from eyas.train.data.shuffled import ShuffledRows, plain_file
from eyas.train.data.user_turns import SELF_SOURCE

OUTPUT_NAME = "conversations.jsonl"
JOURNAL_NAME = "chunks.jsonl"
CHUNK_CONVERSATIONS = 4000
"""Conversations answered together: enough to keep a large batch busy, and some hundred megabytes of text and tokens."""
LEAST_CONVERSATIONS = 256
"""Of the last chunks before a limit, so that they too keep a batch busy: a limit is passed by these at most."""


@dataclass(frozen=True, kw_only=True)
class TokenLimit:
    """Tokens that training takes, prompts included, in documents cut as `cut` does; conversations are shuffled by `seed`."""

    tokens: int
    cut: Cut
    seed: int


def regenerate(
    out_dir: Path,
    *,
    conversations: Path,
    chat: TargetChat,
    generate: Generate,
    sampling: Sampling,
    follow_ups: FollowUps | None = None,
    limit: TokenLimit | None = None,
    on_bad_line: OnBadLine = "stop",
    chunk_conversations: int = CHUNK_CONVERSATIONS,
) -> dict[str, Any]:
    """Write `conversations.jsonl` into `out_dir`; a killed run continues where it stopped.

    Args:
        conversations: what to rewrite; its assistant turns are not read, except to see whether a call was made again.
        generate: the backend, which keeps its answers in `out_dir`.
        follow_ups: how the target goes on after the last answer of a conversation whose prompt it wrote itself.
        limit: where to stop; None answers everything.

    Returns:
        Counts of what was written and of every dialogue that ended early, by reason ("dropped"); "failed" are requests
        that no server would answer. With a limit also "train_tokens", and the conversations that were not asked
        ("not_needed").

    Raises:
        ValueError: a broken input line, two conversations of one id, or nothing left at the end.
    """
    journal = _Journal(out_dir)
    counts = journal.resume()
    writer = None
    if follow_ups is not None:
        writer = FollowUpWriter(chat, follow_ups=follow_ups, max_model_len=sampling.max_model_len)
    for number in range(journal.chunks):  # of a run that was killed before it removed them
        remove_answers(out_dir, prefix=_prefix(number))
    skipped: Counter[str] = Counter()
    rows = _rows(conversations, limit=limit, out_dir=out_dir, on_bad_line=on_bad_line, skipped=skipped)
    rows = islice(rows, counts["conversations_read"], None)
    while chunk := list(islice(rows, _chunk_size(counts, limit=limit, most=chunk_conversations))):
        prefix = _prefix(journal.chunks)
        dialogues = _open(chunk, sampling=sampling, follow_ups=follow_ups)
        _answer_all(
            dialogues, prefix=prefix, chat=chat, generate=generate, sampling=sampling, writer=writer, counts=counts
        )
        _count_chunk(dialogues, counts=counts)
        if limit is not None:
            counts["train_tokens"] += sum(_trained_tokens(dialogue, chat=chat, cut=limit.cut) for dialogue in dialogues)
        journal.append([_line(dialogue) for dialogue in dialogues if dialogue.answered], counts=counts)
        remove_answers(out_dir, prefix=prefix)
    if limit is not None:
        counts["not_needed"] = sum(1 for _ in rows)
    if not counts["conversations"]:
        raise ValueError(
            f"nothing is left of {conversations}: every dialogue ended before its first answer, "
            f"for these reasons: {_nested(counts).get('dropped', {})}; see data.generation"
        )
    return {**_nested(counts), "lines_skipped": dict(skipped)}


def _prefix(chunk: int) -> str:
    return f"chunk-{chunk:05d}-"


def _rows(
    path: Path, *, limit: TokenLimit | None, out_dir: Path, on_bad_line: OnBadLine, skipped: Counter[str]
) -> Iterator[Conversation]:
    """All conversations in the order in which they are answered."""
    if limit is None:
        yield from iterate_conversations(path, on_bad_line=on_bad_line, skipped=skipped)
        return
    with plain_file(path, beside=out_dir) as plain:
        rows = ShuffledRows(plain, named=path, on_bad_line=on_bad_line, skipped=skipped, seed=limit.seed)
        yield from rows.read(split="heldout")
        yield from rows.read(split="train")


def _chunk_size(counts: Counter[str], *, limit: TokenLimit | None, most: int) -> int:
    """Conversations to answer next: as many as the limit seems to need yet, by the mean of those before."""
    if limit is None:
        return most
    missing = limit.tokens - counts["train_tokens"]
    if missing <= 0:
        return 0
    trained = counts["conversations"] - counts["conversations_heldout"]
    mean = counts["train_tokens"] / trained if counts["train_tokens"] else limit.cut.max_length
    return min(most, max(LEAST_CONVERSATIONS, math.ceil(missing / mean)))


def _trained_tokens(dialogue: Dialogue, *, chat: TargetChat, cut: Cut) -> int:
    """Tokens of the documents that a dialogue makes for training, as the prepare stage will count them."""
    if dialogue.split != "train" or not dialogue.answered:
        return 0
    try:
        documents = chat.encode_conversation(dialogue.messages, truncated=dialogue.truncated, tools=dialogue.tools)
    except ValueError:  # the prepare stage refuses or skips it
        return 0
    kept = [cut(document) for document in documents]
    return sum(len(each[0]) for each in kept if not isinstance(each, str))


def _open(chunk: Sequence[Conversation], *, sampling: Sampling, follow_ups: FollowUps | None) -> list[Dialogue]:
    repeated = [name for name, times in Counter(row.id for row in chunk).items() if times > 1]
    if repeated:
        raise ValueError(
            f"two conversations have the id {repeated[0]!r}, and answers are kept by id; give each conversation its own"
        )
    more = 0 if follow_ups is None else follow_ups.count
    return [open_dialogue(row, sampling=sampling, follow_ups=more if row.source == SELF_SOURCE else 0) for row in chunk]


def _answer_all(
    dialogues: Sequence[Dialogue],
    *,
    prefix: str,
    chat: TargetChat,
    generate: Generate,
    sampling: Sampling,
    writer: FollowUpWriter | None,
    counts: Counter[str],
) -> None:
    """Round after round, until no dialogue of the chunk waits for anything."""
    for turn in range(1 << 30):
        asked = [
            (dialogue, ask(dialogue, chat=chat, sampling=sampling))
            for dialogue in dialogues
            if dialogue.waits_for_answer
        ]
        requests = {request.id: (dialogue, request) for dialogue, request in asked if request is not None}
        if not requests:
            return
        answers = generate([request for _, request in requests.values()], f"{prefix}{turn:02d}-answers")
        for name, (dialogue, _) in requests.items():
            _count_answer(answers[name], counts=counts)
            take(dialogue, answers[name], chat=chat, sampling=sampling)
        waiting = [dialogue for dialogue in dialogues if dialogue.waits_for_user]
        if writer is not None and waiting:
            writer.go_on(waiting, name=f"{prefix}{turn:02d}-users", generate=generate)


class _Journal:
    """The output file and the line about it after each chunk: {"chunks", "bytes", "counts"}, all cumulative."""

    def __init__(self, out_dir: Path) -> None:
        self.output = out_dir / OUTPUT_NAME
        self.journal = out_dir / JOURNAL_NAME
        self.chunks = 0

    def resume(self) -> Counter[str]:
        """Cut both files back to the last chunk that is whole in both; the counts up to there."""
        size = self.output.stat().st_size if self.output.is_file() else 0
        lines = [line for line in _whole_lines(self.journal) if line["bytes"] <= size]
        last = lines[-1] if lines else {"chunks": 0, "bytes": 0, "counts": {}}
        self.chunks = last["chunks"]
        self.output.touch()
        os.truncate(self.output, last["bytes"])
        self.journal.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return Counter(last["counts"])

    def append(self, rows: Sequence[dict[str, Any]], *, counts: Counter[str]) -> None:
        """Add a chunk; it counts once its line stands in the journal."""
        with self.output.open("ab") as stream:
            stream.writelines(map(encode_record, rows))
            stream.flush()
            os.fsync(stream.fileno())
        self.chunks += 1
        line = {"chunks": self.chunks, "bytes": self.output.stat().st_size, "counts": dict(counts)}
        with self.journal.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a journal up to the first that a kill or a power cut spoilt."""
    found: list[dict[str, Any]] = []
    content = path.read_bytes() if path.is_file() else b""
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _line(dialogue: Dialogue) -> dict[str, Any]:
    """A line of a conversation file, and the temperature at which its answers were sampled."""
    row = {
        "id": dialogue.id,
        "split": dialogue.split,
        "source": dialogue.source,
        "truncated": dialogue.truncated,
        "temperature": dialogue.temperature,
        "messages": dialogue.messages,
    }
    return row if dialogue.tools is None else {**row, "tools": dialogue.tools}


def _count_answer(answer: Answer, *, counts: Counter[str]) -> None:
    counts[f"finish_reasons/{answer['finish_reason']}"] += 1
    counts["answers_retokenised"] += bool(answer.get("retokenised"))


def _count_chunk(dialogues: Sequence[Dialogue], *, counts: Counter[str]) -> None:
    for dialogue in dialogues:
        counts["conversations_read"] += 1
        if dialogue.ended is not None:
            counts[f"dropped/{dialogue.ended}"] += 1
        if not dialogue.answered:
            counts["conversations_without_answer"] += 1
            continue
        counts["conversations"] += 1
        counts["conversations_heldout"] += dialogue.split == "heldout"
        counts["conversations_truncated"] += dialogue.truncated
        counts["answers"] += dialogue.answered
        counts["answer_tokens"] += sum(len(message.get("token_ids", ())) for message in dialogue.messages)
        counts[f"temperatures/{dialogue.temperature:g}"] += 1


def _nested(counts: Counter[str]) -> dict[str, Any]:
    """Counts whose names have the form "group/name" become a dictionary each."""
    nested: dict[str, Any] = {}
    for name, value in counts.items():
        group, separator, key = name.partition("/")
        if separator:
            nested.setdefault(group, {})[key] = value
        else:
            nested[name] = value
    return nested
