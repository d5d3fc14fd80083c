"""The target's chat template: prompts as the server sees them, and conversations with an exact answer mask.

Training and scoring must agree to the token on what a prompt is, so both go through this file.

The mask is built, not guessed. Before every answer the conversation is rendered up to the generation prompt and
tokenised as a whole, as the server does; the answer with its end-of-turn token is tokenised on its own, as a server
appends generated tokens to a prompt; the two are joined. So what precedes an answer in a document is the server's
prompt to the token. When the next prompt does not begin with the tokens so far (a template that drops the reasoning of
earlier turns or moves the system turn, an answer whose tokens are others when its text is tokenised again), a further
document begins there.

Special tokens that a message's text spells ("<|im_end|>" typed by a user) become those tokens, as in the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.heads.chat_answer import Turn, locate_answer
from eyas.heads.chat_messages import Message
from eyas.heads.chat_parse import opens_thinking, parse_answer
from eyas.heads.chat_template import MARK, ChatTemplate, Tools
from eyas.heads.files import read_json

__all__ = ["MaskedConversation", "Message", "TargetChat"]


@dataclass(frozen=True)
class MaskedConversation:
    """`token_ids[i]` was written by the target iff `answer_mask[i]`; both have one entry per token."""

    token_ids: list[int]
    answer_mask: list[bool]


class TargetChat:
    """Tokenizer and chat template of one target.

    Args:
        template_options: variables of the chat template, such as `{"enable_thinking": False}`.

    Raises:
        ValueError: no tokenizer, no chat template, no end-of-sequence token, or an option that the template ignores.
    """

    def __init__(
        self, target_dir: Path, *, trust_remote_code: bool = False, template_options: Mapping[str, Any] | None = None
    ) -> None:
        from transformers import AutoTokenizer

        try:
            # Beside a tekken.json transformers takes Mistral's own tokenizer, which knows of no chat template.
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                target_dir, local_files_only=True, trust_remote_code=trust_remote_code, mistral_format=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"the target {target_dir} has no tokenizer that transformers can load: {error}") from error
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the target {target_dir} has no chat template; put a chat_template.jinja beside its tokenizer"
            )
        self.stop_token_ids = _stop_token_ids(target_dir, tokenizer_eos=self.tokenizer.eos_token_id)
        self._vocab_size = max(len(self.tokenizer), _embedded_tokens(target_dir))
        self._template = ChatTemplate(self.tokenizer, options=template_options or {})

    @property
    def prints_today(self) -> bool:
        """Whether the template prints today's date, so that prompts of another day are others."""
        return self._template.prints_today

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens recognised and none added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def prompt_ids(self, messages: Sequence[Message], *, tools: Tools = None) -> list[int]:
        """What the server is given when the next message is the assistant's."""
        return self.encode(self._template.render(messages, tools=tools, generation_prompt=True))

    def user_turn_prefix(self, *, system: str | None) -> str:
        """Text up to the point where a user would begin to type: the target sampled from here writes user turns."""
        return self.user_turn_prefix_after([] if system is None else [{"role": "system", "content": system}])

    def user_turn_prefix_after(self, messages: Sequence[Message], *, tools: Tools = None) -> str:
        """Text up to the point where the user would type the next turn of a conversation.

        Raises:
            ValueError: the template refuses the conversation, or drops the user's text.
        """
        asked = [*messages, {"role": "user", "content": MARK}]
        text = self._template.render(asked, tools=tools, generation_prompt=False)
        prefix, mark, _ = text.rpartition(MARK)
        if not mark:
            raise ValueError("the chat template drops the user's text, so no user turn can be sampled from it")
        return prefix

    def encode_conversation(
        self, messages: Sequence[Message], *, truncated: bool = False, tools: Tools = None
    ) -> list[MaskedConversation]:
        """Token ids of a conversation, and the mask of what the target wrote: one document, or several.

        Every answer is masked in exactly one document. What follows the last answer is left out. An assistant turn's
        `token_ids`, if it has them, are taken as they are instead of its text.

        Args:
            messages: turns in order.
            truncated: the last answer was cut at a token limit, so it carries no end-of-turn token.

        Raises:
            ValueError: no answer with a token, or a template that refuses the conversation or hides where an answer
                begins.
        """
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        documents: list[MaskedConversation] = []
        for index in answers:
            prompt_ids, answer_ids = self._encode_turn(
                messages[: index + 1], tools=tools, truncated=truncated and index == answers[-1]
            )
            if not answer_ids:
                continue
            if not prompt_ids:
                raise ValueError("every token of the conversation counts as an answer; it has no prompt to draft after")
            if not documents or prompt_ids[: len(documents[-1].token_ids)] != documents[-1].token_ids:
                documents.append(MaskedConversation(token_ids=[], answer_mask=[]))
            document = documents[-1]
            between = prompt_ids[len(document.token_ids) :]
            document.token_ids.extend(between + answer_ids)
            document.answer_mask.extend([False] * len(between) + [True] * len(answer_ids))
        if not documents:
            raise ValueError("the conversation has no answer of any token, so its answer mask would be all zeros")
        return documents

    def parse_answer(self, token_ids: Sequence[int]) -> Message:
        """The assistant message that generated tokens spell, reasoning apart; see `eyas.heads.chat_parse`."""
        return parse_answer(
            token_ids,
            tokenizer=self.tokenizer,
            stop_token_ids=self.stop_token_ids,
            opened=self._begins_thinking,
        )

    def _encode_turn(
        self, messages: Sequence[Message], *, tools: Tools, truncated: bool
    ) -> tuple[list[int], list[int]]:
        """The server's prompt for the last answer, and the answer's tokens."""
        written = messages[-1].get("token_ids")
        if written is not None:
            return self.prompt_ids(messages[:-1], tools=tools), self._checked(written)
        turn: Turn = locate_answer(
            messages, template=self._template, tools=tools, stops=self._stops, truncated=truncated
        )
        return self.encode(turn.prompt), self.encode(turn.answer)

    def _checked(self, token_ids: Any) -> list[int]:
        if not isinstance(token_ids, list) or not all(
            type(token) is int and 0 <= token < self._vocab_size for token in token_ids
        ):
            raise ValueError(
                f"an assistant turn's token_ids must be token ids below {self._vocab_size}, the target's vocabulary; "
                "was the file regenerated with another target?"
            )
        return token_ids

    @cached_property
    def _stops(self) -> list[str]:
        tokens = self.tokenizer.convert_ids_to_tokens(self.stop_token_ids)
        return [token for token in tokens if token]

    @cached_property
    def _begins_thinking(self) -> bool:
        prompt = self._template.render([{"role": "user", "content": "x"}], tools=None, generation_prompt=True)
        return opens_thinking(prompt)


def _stop_token_ids(target_dir: Path, *, tokenizer_eos: int | None) -> list[int]:
    """End-of-sequence ids as the server uses them: the generation config's, then the tokenizer's."""
    ids: list[int] = []
    path = target_dir / "generation_config.json"
    if path.is_file():
        eos = read_json(path).get("eos_token_id")
        ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    if not ids:
        raise ValueError(
            f"the target {target_dir} names no end-of-sequence token; set eos_token_id in its generation_config.json"
        )
    return list(dict.fromkeys(ids))


def _embedded_tokens(target_dir: Path) -> int:
    """Rows of the target's embedding, often some more than its tokenizer knows; 0 when there is no model beside it."""
    path = target_dir / "config.json"
    config = read_json(path) if path.is_file() else {}
    return max(int(part.get("vocab_size") or 0) for part in (config, config.get("text_config") or {}))
