"""Which conversations are left out before anything is generated or tokenised, and why."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from eyas.train.data.conversations import Conversation, first_user_turn

MAX_LANGUAGE_CHARACTERS = 2000
"""Text beyond this does not change what language it is in."""


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What a conversation must be to be kept.

    Attributes:
        min_turns, max_turns: user turns.
        min_characters: of the first user turn.
        max_characters: of all turns together.
        languages: ISO 639-1 codes of the language of the first user turn; () keeps all. Needs the package py3langid,
            whose guess about a few words is little better than chance, so pair it with `min_characters`.
    """

    min_turns: int = 1
    max_turns: int | None = None
    min_characters: int = 1
    max_characters: int | None = None
    languages: tuple[str, ...] = ()

    def reason_against(self, conversation: Conversation) -> str | None:
        """The word under which a dropped conversation is counted; None keeps it."""
        turns = sum(message["role"] == "user" for message in conversation.messages)
        prompt = first_user_turn(conversation.messages)
        if turns < self.min_turns:
            return "too_few_turns"
        if self.max_turns is not None and turns > self.max_turns:
            return "too_many_turns"
        if len(prompt) < self.min_characters:
            return "prompt_too_short"
        if self.max_characters is not None:
            characters = sum(len(message["content"]) for message in conversation.messages)
            if characters > self.max_characters:
                return "too_many_characters"
        if self.languages and language_of(prompt) not in self.languages:
            return "other_language"
        return None

    def check(self) -> None:
        """Find out before anything is read whether the filters can work.

        Raises:
            ValueError: languages are asked for without py3langid, or in codes that it does not know.
        """
        known = sorted(_identifier().labels) if self.languages else []
        unknown = sorted(set(self.languages) - set(known))
        if unknown:
            raise ValueError(
                f"data.filters.languages: {', '.join(unknown)} is no language that py3langid tells apart; it knows "
                f"{', '.join(known)}"
            )


def language_of(text: str) -> str:
    """ISO 639-1 code of the likeliest language of a text.

    Raises:
        ValueError: py3langid is not installed.
    """
    return str(_identifier().classify(text[:MAX_LANGUAGE_CHARACTERS])[0])


@functools.cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ValueError(
            "data.filters.languages needs the package py3langid; `pip install py3langid`, or set languages to []"
        ) from error
    return LanguageIdentifier.from_model_file(MODEL_FILE)
