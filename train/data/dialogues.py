"""A conversation while the target rewrites it: what stood there, what has been said anew, and why it ended.

The turns of others are kept and the answers are made again, in order, each after the target's own earlier ones. Results
of tool calls fit only the calls that were made. So a conversation goes on past them only if the target, token for token
as its template writes the original turn, made the same calls; otherwise it ends with the target's own answer and is
counted under `tool_call_differs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.heads.chat import Message, TargetChat
from eyas.train.data.answers import Answer, GenerationRequest, stable_number
from eyas.train.data.conversations import Conversation
from eyas.train.data.loops import repeated_ngram_share


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target answers.

    Attributes:
        temperatures: of training answers; one of them is chosen for each conversation by its id and the seed.
        heldout_temperature: of held-out answers.
        top_p, top_k, min_p: as in `GenerationRequest`.
        max_tokens: longest answer.
        max_model_len: tokens of a prompt and its answer together at most.
        max_repeated_share: an answer with a larger share of repeated 8-grams is a loop.
        truncated: whether answers cut at a limit are kept, and marked, or dropped.
    """

    temperatures: Sequence[float]
    heldout_temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int
    max_model_len: int
    max_repeated_share: float = 0.3
    truncated: Literal["keep", "drop"] = "keep"
    seed: int = 0

    def temperature(self, conversation: Conversation) -> float:
        """The temperature of all answers of a conversation, the same on every run."""
        if conversation.split == "heldout":
            return self.heldout_temperature
        return self.temperatures[stable_number(self.seed, "temperature", conversation.id) % len(self.temperatures)]


@dataclass(frozen=True)
class Turn:
    """What comes before one answer (system, user and tool turns), and the answer that stood there, if any."""

    inputs: list[Message]
    original: Message | None

    @property
    def has_tool_results(self) -> bool:
        """Whether the turn rests on calls made in the answer before it."""
        return any(message["role"] == "tool" for message in self.inputs)


def turns(messages: Sequence[Message]) -> list[Turn]:
    """A conversation cut before each answer. Of several answers in a row the last one stands for all."""
    found: list[Turn] = []
    inputs: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            inputs.append(message)
        elif inputs:
            found.append(Turn(inputs, message))
            inputs = []
        elif found:
            found[-1] = Turn(found[-1].inputs, message)
    if any(message["role"] in ("user", "tool") for message in inputs):
        found.append(Turn(inputs, None))
    return found


@dataclass
class Dialogue:
    """A conversation in the making.

    Attributes:
        turns: all that is to be answered; the next one is `turns[answered]`.
        follow_ups: user turns that the target may still write itself.
        messages: the new conversation so far, which ends with an answer unless it is empty.
        ended: why no further turn was answered, when that was not the plan.
    """

    id: str
    source: str
    split: Literal["train", "heldout"]
    tools: list[dict[str, Any]] | None
    temperature: float
    turns: list[Turn]
    follow_ups: int = 0
    messages: list[Message] = field(default_factory=list)
    answered: int = 0
    truncated: bool = False
    ended: str | None = None
    same_call: bool = False

    @property
    def waits_for_answer(self) -> bool:
        """Whether the target is to speak next."""
        return self.ended is None and not self.truncated and self.answered < len(self.turns)

    @property
    def waits_for_user(self) -> bool:
        """Whether the target is to write the next user turn."""
        done = self.ended is None and not self.truncated and self.answered == len(self.turns)
        return done and self.follow_ups > 0


def open_dialogue(conversation: Conversation, *, sampling: Sampling, follow_ups: int) -> Dialogue:
    """A dialogue with nothing said yet. A held-out one has one turn: it is the prompt that scoring sends."""
    heldout = conversation.split == "heldout"
    wanted = turns(conversation.messages)
    return Dialogue(
        id=conversation.id,
        source=conversation.source,
        split=conversation.split,
        tools=conversation.tools,
        temperature=sampling.temperature(conversation),
        turns=wanted[:1] if heldout else wanted,
        follow_ups=0 if heldout else follow_ups,
    )


def ask(dialogue: Dialogue, *, chat: TargetChat, sampling: Sampling) -> GenerationRequest | None:
    """The request for the next answer, or None when the dialogue ends here (`ended` says why)."""
    turn = dialogue.turns[dialogue.answered]
    if turn.has_tool_results and not dialogue.same_call:
        dialogue.ended = "tool_call_differs"
        return None
    try:
        prompt_ids = chat.prompt_ids([*dialogue.messages, *turn.inputs], tools=dialogue.tools)
    except ValueError:
        dialogue.ended = "template_refuses"
        return None
    room = sampling.max_model_len - len(prompt_ids)
    if room < 1:
        dialogue.ended = "too_long"
        return None
    request_id = f"{dialogue.id}-{dialogue.answered}"
    return GenerationRequest(
        id=request_id,
        token_ids=prompt_ids,
        temperature=dialogue.temperature,
        max_tokens=min(sampling.max_tokens, room),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=stable_number(sampling.seed, request_id),
        stop_token_ids=chat.stop_token_ids,
        last=dialogue.answered + 1 == len(dialogue.turns) and not dialogue.follow_ups,
    )


def take(dialogue: Dialogue, answer: Answer, *, chat: TargetChat, sampling: Sampling) -> None:
    """Put an answer at the end of the dialogue, or end the dialogue before it."""
    turn = dialogue.turns[dialogue.answered]
    token_ids = answer["token_ids"]
    message = chat.parse_answer(token_ids)
    dialogue.ended = _refusal(answer, message, sampling=sampling)
    if dialogue.ended is not None:
        return
    dialogue.messages += turn.inputs
    following = dialogue.turns[dialogue.answered + 1 : dialogue.answered + 2]
    if following and following[0].has_tool_results and turn.original is not None:
        dialogue.same_call = _same_text(dialogue.messages, turn.original, token_ids, chat=chat, tools=dialogue.tools)
        if dialogue.same_call:
            message = {**turn.original, "token_ids": list(token_ids)}
    dialogue.messages.append(message)
    dialogue.answered += 1
    dialogue.truncated = answer["finish_reason"] == "length"


def _refusal(answer: Answer, message: Message, *, sampling: Sampling) -> str | None:
    """Why an answer cannot be used, or None."""
    if answer["finish_reason"] not in ("stop", "length"):
        return "failed"
    if answer["finish_reason"] == "length" and sampling.truncated == "drop":
        return "truncated"
    parts = (message.get("content"), message.get("reasoning_content"))
    if not any(part and part.strip() for part in parts) and not message.get("tool_calls"):
        return "empty"
    if repeated_ngram_share(answer["token_ids"]) > sampling.max_repeated_share:
        return "loop"
    return None


def _same_text(
    messages: Sequence[Message],
    original: Message,
    token_ids: Sequence[int],
    *,
    chat: TargetChat,
    tools: list[dict[str, Any]] | None,
) -> bool:
    """Whether the template writes `original` after `messages` as exactly the text of `token_ids`."""
    stood_there = {key: value for key, value in original.items() if key != "token_ids"}
    try:
        document = chat.encode_conversation([*messages, stood_there], tools=tools)[-1]
    except ValueError:
        return False
    start = len(document.answer_mask)
    while start and document.answer_mask[start - 1]:
        start -= 1
    # Decoded with special tokens: they are what marks a call in many templates.
    return chat.tokenizer.decode(document.token_ids[start:]) == chat.tokenizer.decode(token_ids)
