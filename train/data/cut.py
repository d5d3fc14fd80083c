"""What of an encoded conversation is trained on: as many tokens as a document may have, or nothing, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eyas.heads.chat import MaskedConversation

MIN_ANSWER_TOKENS = 2
"""Of a document: one token alone is drafted after, but nothing after it is ever compared with a draft."""

Refusal = Literal["answer_too_short", "too_long", "answer_cut_away"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How long a document may be, in tokens, and what happens to a longer one."""

    max_length: int
    too_long: Literal["cut", "drop"] = "cut"

    def __call__(self, document: MaskedConversation) -> tuple[list[int], list[bool]] | Refusal:
        """Token ids and answer mask that are kept of a document, or why none are."""
        token_ids, mask = document.token_ids[: self.max_length], document.answer_mask[: self.max_length]
        if sum(document.answer_mask) < MIN_ANSWER_TOKENS:
            return "answer_too_short"
        if len(document.token_ids) > self.max_length and self.too_long == "drop":
            return "too_long"
        if sum(mask) < MIN_ANSWER_TOKENS:
            return "answer_cut_away"
        return token_ids, mask
