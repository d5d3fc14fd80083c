"""The prepare stage: conversations -> token files with exact answer masks.

The order of documents is a shuffle of the file's rows by seed, made once here, so that a token limit takes a fair
sample of the sources. Only row numbers are shuffled: text is read row by row and tokens are written shard by shard, so
memory does not grow with the file.
"""

from __future__ import annotations

import random
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from eyas.heads.chat import MaskedConversation, TargetChat
from eyas.heads.files import write_json
from eyas.train.data.conversations import Conversation, OnBadLine, parse_line, read_at, read_lines
from eyas.train.data.messages import BadConversation
from eyas.train.data.tokens import SPLITS, Split, TokenWriter

__all__ = ["SPLITS", "prepare"]

MIN_ANSWER_TOKENS = 2
"""Of a document: one token alone is drafted after, but nothing after it is ever compared with a draft."""


def prepare(
    out_dir: Path,
    *,
    target_dir: Path,
    conversations: Path,
    max_length: int,
    too_long: Literal["cut", "drop"] = "cut",
    max_train_tokens: int | None,
    on_bad_line: OnBadLine,
    trust_remote_code: bool,
    template_options: Mapping[str, Any] | None = None,
    seed: int,
) -> dict[str, int]:
    """Tokenise a conversation file for a target.

    Args:
        max_length: tokens of a document at most; longer ones are cut or dropped as `too_long` says.
        max_train_tokens: documents that would exceed this in the training split are left out; None takes all.
        template_options: variables of the chat template, as those that serve the target.

    Returns:
        Counts of conversations, documents, tokens, answer tokens and everything left out.

    Raises:
        ValueError: bad input (see `iterate_conversations`), or a split ends up without a trainable answer token.
    """
    chat = TargetChat(target_dir, trust_remote_code=trust_remote_code, template_options=template_options)
    counts: Counter[str] = Counter()
    out_dir.mkdir(parents=True, exist_ok=True)
    writer = TokenWriter(out_dir)
    with _plain_file(conversations, beside=out_dir) as plain:
        rows = _Rows(plain, named=conversations, on_bad_line=on_bad_line, counts=counts)
        order = array("q", range(len(rows)))
        random.Random(seed).shuffle(order)
        for split in SPLITS:
            encoder = _SplitEncoder(
                split,
                chat=chat,
                writer=writer,
                max_length=max_length,
                too_long=too_long,
                max_tokens=max_train_tokens if split == "train" else None,
                on_bad_line=on_bad_line,
                counts=counts,
            )
            for row in rows.read(order, split=split):
                encoder.add(row)
            _require_documents(split, encoder.documents)
    written = writer.finish()
    write_json(out_dir / "stop_tokens.json", chat.stop_token_ids)
    return {**dict(sorted(counts.items())), **written}


@contextmanager
def _plain_file(path: Path, *, beside: Path) -> Iterator[Path]:
    """`path`, or an unpacked copy of it: lines of a compressed file cannot be read out of order."""
    if path.suffix != ".gz":
        yield path
        return
    for stale in beside.glob(".conversations-*.jsonl"):  # of a stage that was killed
        stale.unlink()
    with tempfile.NamedTemporaryFile(dir=beside, prefix=".conversations-", suffix=".jsonl") as stream:
        previous = 0
        for number, line in read_lines(path):
            stream.write(b"\n" * (number - previous - 1) + line)  # blank lines stay, and with them the line numbers
            previous = number
        stream.flush()
        yield Path(stream.name)


class _Rows:
    """The usable rows of a plain conversation file: 17 bytes of memory each."""

    def __init__(self, path: Path, *, named: Path, on_bad_line: OnBadLine, counts: Counter[str]) -> None:
        self._path = path
        self._positions, self._numbers, self._heldout = array("q"), array("q"), bytearray()
        for number, position, line in _lines(path, named=named):
            try:
                split = parse_line(line, number=number).split
            except BadConversation as error:
                if on_bad_line == "stop":
                    raise ValueError(
                        f"{named}, line {number}: {error}; mend the line, or set data.on_bad_line=skip to leave it out"
                    ) from error
                counts["lines_skipped"] += 1
                counts[f"lines_skipped_{error.reason}"] += 1
                continue
            self._positions.append(position)
            self._numbers.append(number)
            self._heldout.append(split == "heldout")
        counts["lines_skipped"] += 0
        counts["conversations_read"] = len(self)
        if not len(self):
            raise ValueError(f"{named} holds no usable conversation ({counts['lines_skipped']} broken lines)")

    def __len__(self) -> int:
        return len(self._positions)

    def read(self, order: array[int], *, split: Split) -> Iterator[Conversation]:
        """Conversations of a split in the given order of rows."""
        with self._path.open("rb") as stream:
            for row in order:
                if bool(self._heldout[row]) == (split == "heldout"):
                    yield read_at(stream, self._positions[row], number=self._numbers[row])


def _lines(path: Path, *, named: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, byte offset and bytes of every line that is not blank."""
    if not path.is_file():
        raise ValueError(
            f"data.conversations: {named} does not exist; give a .jsonl or .jsonl.gz file of conversations"
        )
    position = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, position, line
            position += len(line)


class _SplitEncoder:
    """Encodes the conversations of one split and counts what is left out, by reason."""

    def __init__(
        self,
        split: Split,
        *,
        chat: TargetChat,
        writer: TokenWriter,
        max_length: int,
        too_long: Literal["cut", "drop"],
        max_tokens: int | None,
        on_bad_line: OnBadLine,
        counts: Counter[str],
    ) -> None:
        self.documents = 0
        self._split: Split = split
        self._chat = chat
        self._writer = writer
        self._max_length = max_length
        self._too_long = too_long
        self._max_tokens = max_tokens
        self._on_bad_line = on_bad_line
        self._counts = counts
        self._tokens = 0
        for name in ("conversations_unusable", "conversations_split", "conversations_with_unanswered_turns"):
            counts[name] += 0
        counts[f"{split}_conversations"] = 0

    def add(self, row: Conversation) -> None:
        """Encode a conversation and write the documents it makes."""
        try:
            encoded = self._chat.encode_conversation(row.messages, truncated=row.truncated, tools=row.tools)
        except ValueError as error:
            if self._on_bad_line == "stop":
                answered = any(message["role"] == "assistant" for message in row.messages)
                mend = "" if answered else "data.regenerate=true to let the target answer it, or "
                raise ValueError(
                    f"conversation {row.id!r}: {error}; set {mend}data.on_bad_line=skip to leave it out"
                ) from error
            self._counts["conversations_unusable"] += 1
            return
        self._counts["conversations_split"] += len(encoded) > 1
        self._counts["conversations_with_unanswered_turns"] += row.messages[-1]["role"] != "assistant"
        answers = sum(message["role"] == "assistant" for message in row.messages)
        self._counts["answers_empty"] += answers - sum(_answers_with_text(document) for document in encoded)
        written = 0
        for number, document in enumerate(encoded, start=1):
            written += self._add_document(document, name=row.id if number == 1 else f"{row.id}#{number}")
        self._counts[f"{self._split}_conversations"] += written > 0

    def _add_document(self, document: MaskedConversation, *, name: str) -> bool:
        """Write a document, unless something is wrong with it."""
        token_ids, mask = document.token_ids[: self._max_length], document.answer_mask[: self._max_length]
        longer = len(document.token_ids) > self._max_length
        reason = None
        if sum(document.answer_mask) < MIN_ANSWER_TOKENS:
            reason = "answer_too_short"
        elif longer and self._too_long == "drop":
            reason = "too_long"
        elif sum(mask) < MIN_ANSWER_TOKENS:
            reason = "answer_cut_away"
        elif self._max_tokens is not None and self._tokens + len(token_ids) > self._max_tokens:
            reason = "over_token_limit"
        if reason is not None:
            self._counts[f"documents_{reason}"] += 1
            return False
        self._counts["documents_cut_at_max_length"] += longer
        self._writer.add(self._split, name=name, token_ids=token_ids, answer_mask=mask)
        self._tokens += len(token_ids)
        self.documents += 1
        return True


def _answers_with_text(document: MaskedConversation) -> int:
    """Runs of masked tokens longer than an end-of-turn token alone."""
    mask = [False, *document.answer_mask, False]
    return sum(mask[at] and mask[at + 1] and not mask[at - 1] for at in range(1, len(mask) - 1))


def _require_documents(split: str, documents: int) -> None:
    if not documents:
        raise ValueError(
            f"the {split} split has no conversation with an answer of two tokens or more; add conversations, give some "
            f'of them "split": "{split}", or raise data.heldout_share or data.max_length'
        )
