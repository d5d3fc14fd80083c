"""The prepare stage: conversations -> token files with exact answer masks.

The order of documents is a shuffle of the file's rows by seed, made once here, so that a token limit takes a fair
sample of the sources. Text is read row by row and tokens are written shard by shard, so memory does not grow with the
file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eyas.heads.chat import MaskedConversation, TargetChat
from eyas.heads.files import write_json
from eyas.train.data.conversations import Conversation, OnBadLine
from eyas.train.data.cut import Cut
from eyas.train.data.shuffled import ShuffledRows, plain_file
from eyas.train.data.tokens import SPLITS, Split, TokenWriter

__all__ = ["SPLITS", "prepare"]


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
    skipped: Counter[str] = Counter()
    with plain_file(conversations, beside=out_dir) as plain:
        rows = ShuffledRows(plain, named=conversations, on_bad_line=on_bad_line, skipped=skipped, seed=seed)
        counts["conversations_read"] = len(rows)
        counts["lines_skipped"] = skipped.total()
        counts.update({f"lines_skipped_{reason}": number for reason, number in skipped.items()})
        for split in SPLITS:
            encoder = _SplitEncoder(
                split,
                chat=chat,
                writer=writer,
                cut=Cut(max_length=max_length, too_long=too_long),
                max_tokens=max_train_tokens if split == "train" else None,
                on_bad_line=on_bad_line,
                counts=counts,
            )
            for row in rows.read(split=split):
                encoder.add(row)
            _require_documents(split, encoder.documents)
    written = writer.finish()
    write_json(out_dir / "stop_tokens.json", chat.stop_token_ids)
    counts["template_prints_today"] = int(chat.prints_today)
    return {**dict(sorted(counts.items())), **written}


class _SplitEncoder:
    """Encodes the conversations of one split and counts what is left out, by reason."""

    def __init__(
        self,
        split: Split,
        *,
        chat: TargetChat,
        writer: TokenWriter,
        cut: Cut,
        max_tokens: int | None,
        on_bad_line: OnBadLine,
        counts: Counter[str],
    ) -> None:
        self.documents = 0
        self._split: Split = split
        self._chat = chat
        self._writer = writer
        self._cut = cut
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
        kept = self._cut(document)
        if isinstance(kept, str):
            self._counts[f"documents_{kept}"] += 1
            return False
        token_ids, mask = kept
        if self._max_tokens is not None and self._tokens + len(token_ids) > self._max_tokens:
            self._counts["documents_over_token_limit"] += 1
            return False
        self._counts["documents_cut_at_max_length"] += len(document.token_ids) > len(token_ids)
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
