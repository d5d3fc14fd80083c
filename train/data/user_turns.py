"""User turns that the target writes itself: sampled from its template's user prefix, and read with suspicion.

A chat model that is given everything up to the place where a user would type writes a user turn. What comes out is a
question about as often as it is a stray header, a loop, or half a conversation, so a turn is taken only if it ended by
itself, has the length of something that a person types, is in a language asked for, and holds nothing of the template.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import Answer, GenerationRequest, stable_number
from eyas.train.data.filters import Filters, language_of
from eyas.train.data.loops import repeated_ngram_share

SELF_SOURCE = "self"
"""The source of conversations whose user turns the target wrote."""

MIN_LETTER_SHARE = 0.6
MAX_REPEATED_SHARE = 0.1
_ROLE_HEADER = re.compile(
    r"^\W*(system|user|assistant|human|ai|bot|model|tool)\W*(:|$)", flags=re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class UserTurnSettings:
    """How user turns are sampled, and which are taken.

    Attributes:
        max_tokens: longer turns are dropped, not cut.
        languages: ISO 639-1 codes to keep; empty = the language is not looked at.
    """

    temperature: float = 0.9
    min_p: float = 0.05
    max_tokens: int = 80
    min_characters: int = 12
    max_characters: int = 700
    languages: tuple[str, ...] = ()
    seed: int = 0


class UserTurns:
    """Requests for user turns of one target, and what is made of its answers."""

    def __init__(self, chat: TargetChat, *, settings: UserTurnSettings) -> None:
        """Raises ValueError when languages are asked for that cannot be told, or py3langid is not installed."""
        self.chat = chat
        self.settings = settings
        self.stop_token_ids = [*chat.stop_token_ids, *user_turn_end(chat)]
        self._markers = template_markers(chat)
        try:
            Filters(languages=settings.languages).check()
        except ValueError as error:
            raise ValueError(f"data.self_prompts.languages: {error}") from error

    def request(self, request_id: str, *, prefix: str, last: bool = True) -> GenerationRequest:
        """Let the target go on from `prefix`, which ends inside a user turn."""
        return GenerationRequest(
            id=request_id,
            token_ids=self.chat.encode(prefix),
            temperature=self.settings.temperature,
            max_tokens=self.settings.max_tokens,
            min_p=self.settings.min_p,
            seed=stable_number(self.settings.seed, request_id),
            stop_token_ids=self.stop_token_ids,
            last=last,
        )

    def read(self, answer: Answer, *, opener: str = "") -> tuple[str, str | None]:
        """The text of a sampled turn that began with `opener`, and why it cannot be taken (None: it can)."""
        token_ids = list(answer["token_ids"])
        while token_ids and token_ids[-1] in self.stop_token_ids:
            token_ids.pop()
        text = (opener + self.chat.tokenizer.decode(token_ids)).strip()
        if answer["finish_reason"] != "stop":
            return text, "unfinished" if answer["finish_reason"] == "length" else "failed"
        if repeated_ngram_share(token_ids) >= MAX_REPEATED_SHARE:
            return text, "loop"
        return text, self.refusal(text)

    def refusal(self, text: str) -> str | None:
        """Why a text is no user turn, in a word, or None."""
        settings = self.settings
        if len(text) < settings.min_characters:
            return "short"
        if len(text) > settings.max_characters:
            return "long"
        if any(marker in text for marker in self._markers) or _ROLE_HEADER.search(text):
            return "template"
        if sum(character.isalpha() for character in text) < MIN_LETTER_SHARE * len(text):
            return "few_letters"
        if settings.languages and language_of(text) not in settings.languages:
            return "language"
        return None


def user_turn_end(chat: TargetChat) -> list[int]:
    """The special token that a template puts after a user's text, where there is one that is no end of an answer."""
    text = "Hello"
    begun = chat.encode(chat.user_turn_prefix(system=None) + text)
    whole = chat.prompt_ids([{"role": "user", "content": text}])
    special = set(chat.tokenizer.added_tokens_decoder)
    if whole[: len(begun)] != begun:
        return []
    first = next((token for token in whole[len(begun) :] if token in special), None)
    return [] if first is None or first in chat.stop_token_ids else [first]


def template_markers(chat: TargetChat) -> list[str]:
    """Texts that only a template writes: special tokens, and added ones that look like tags."""
    added = chat.tokenizer.added_tokens_decoder.values()
    tags = [str(token) for token in added if token.special or (len(str(token)) > 2 and str(token)[0] in "<[")]
    return sorted({*tags, *chat.tokenizer.all_special_tokens, "<|", "[INST]", "<<SYS>>", "</s>"})


@dataclass(frozen=True)
class SelfPromptSeed:
    """Where a self-written user turn starts: a system prompt that sets the topic, and the turn's first words."""

    system: str | None
    opener: str


def self_prompt_seeds(
    count: int, *, topics: Sequence[str], openers: Sequence[str], seed: int
) -> Iterator[SelfPromptSeed]:
    """`count` seeds that go through all topics and openers evenly, in a shuffled order; either may be empty."""
    generator = random.Random(seed)
    frames = (
        "You are a helpful AI assistant who knows a lot about {}.",
        "You are a helpful AI assistant. The user asks about {}.",
    )
    made = 0
    while made < count:
        subjects = _shuffled(topics, generator) if topics else [None] * max(1, len(openers))
        starts = _cycle(openers, len(subjects), generator) if openers else [""] * len(subjects)
        for topic, opener in zip(subjects[: count - made], starts, strict=False):
            system = None if topic is None else generator.choice(frames).format(topic)
            yield SelfPromptSeed(system=system, opener=opener)
            made += 1


def _shuffled(items: Sequence[str], generator: random.Random) -> list[str]:
    return generator.sample(list(items), len(items))


def _cycle(items: Sequence[str], length: int, generator: random.Random) -> list[str]:
    rounds = -(-length // len(items))
    return [item for _ in range(rounds) for item in _shuffled(items, generator)][:length]
