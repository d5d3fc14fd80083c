"""The user's side of a longer conversation, written by the target: what it would be asked after its own answer.

Only conversations whose prompt the target wrote itself go on in this way; nobody else's words are put in their mouth.
A turn that is refused ends the conversation, which is kept up to there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import Generate, GenerationRequest
from eyas.train.data.contamination import PromptGuard
from eyas.train.data.conversations import read_lines
from eyas.train.data.dialogues import Dialogue, Turn
from eyas.train.data.user_turns import UserTurns, UserTurnSettings


@dataclass(frozen=True, kw_only=True)
class FollowUps:
    """How many user turns are added, how they are sampled, and what they must not overlap.

    Attributes:
        evaluation_prompts: JSON lines with a "text" each, as collect writes them; None = no guard.
        ngram: words in a row that count as overlap; None = whole prompts only.
    """

    count: int
    user_turns: UserTurnSettings = field(default_factory=UserTurnSettings)
    evaluation_prompts: Path | None = None
    ngram: int | None = 13


class FollowUpWriter:
    """Asks the target for next user turns."""

    def __init__(self, chat: TargetChat, *, follow_ups: FollowUps, max_model_len: int) -> None:
        self.chat = chat
        self.max_model_len = max_model_len
        self.user_turns = UserTurns(chat, settings=follow_ups.user_turns)
        prompts = follow_ups.evaluation_prompts
        self.guard = None if prompts is None else PromptGuard(_texts(prompts), ngram=follow_ups.ngram)

    def go_on(self, dialogues: Sequence[Dialogue], *, name: str, generate: Generate) -> None:
        """Give each dialogue one more turn to answer, or end it (`ended` says why)."""
        asked: dict[str, tuple[Dialogue, GenerationRequest]] = {}
        for dialogue in dialogues:
            request = self._ask(dialogue)
            if request is not None:
                asked[request.id] = (dialogue, request)
        answers = generate([request for _, request in asked.values()], name) if asked else {}
        for request_id, (dialogue, _) in asked.items():
            text, refusal = self.user_turns.read(answers[request_id])
            refusal = refusal or self._seen(text, dialogue)
            dialogue.follow_ups -= 1
            if refusal is None:
                dialogue.turns.append(Turn([{"role": "user", "content": text}], None))
            else:
                dialogue.ended = f"follow_up_{refusal}"

    def _ask(self, dialogue: Dialogue) -> GenerationRequest | None:
        """The request for the next user turn, or None when the dialogue ends here."""
        try:
            prefix = self.chat.user_turn_prefix_after(dialogue.messages, tools=dialogue.tools)
        except ValueError:
            dialogue.ended = "follow_up_template_refuses"
            return None
        request = self.user_turns.request(f"{dialogue.id}-user-{dialogue.answered}", prefix=prefix, last=False)
        if len(request.token_ids) + request.max_tokens > self.max_model_len:
            dialogue.ended = "follow_up_too_long"
            return None
        return request

    def _seen(self, text: str, dialogue: Dialogue) -> str | None:
        if any(message["role"] == "user" and message["content"].strip() == text for message in dialogue.messages):
            return "repeated"
        if self.guard is not None and self.guard.overlap(text) is not None:
            return "evaluation_prompt"
        return None


def _texts(path: Path) -> Iterator[str]:
    for _, line in read_lines(path):
        yield json.loads(line)["text"]
