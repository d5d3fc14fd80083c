"""The target's chat template: prompts as the server sees them, and conversations with an exact answer mask.

Training and scoring must agree to the token on what a prompt is, so both go through this file.

The mask is built, not guessed: the text before an answer is rendered with the generation prompt and tokenised, the
answer with its end-of-turn token is tokenised on its own, as a server appends generated tokens to a prompt, and
the two are joined. No template-specific pattern is involved, and no `{% generation %}` tag is needed (without one,
`return_assistant_tokens_mask` silently gives all ones or all zeros).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.heads.files import read_json

Message = dict[str, str]
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}mark\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class MaskedConversation:
    """`token_ids[i]` was written by the target iff `answer_mask[i]`; both have one entry per token."""

    token_ids: list[int]
    answer_mask: list[bool]


class TargetChat:
    """Tokenizer and chat template of one target."""

    def __init__(self, target_dir: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                target_dir, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"the target {target_dir} has no tokenizer that transformers can load: {error}") from error
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the target {target_dir} has no chat template; put a chat_template.jinja beside its tokenizer"
            )
        self.stop_token_ids = _stop_token_ids(target_dir, tokenizer_eos=self.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens recognised and none added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """What the server is given when the next message is the assistant's."""
        return self.encode(self._render(messages, generation_prompt=True))

    def user_turn_prefix(self, *, system: str | None) -> str:
        """Text up to the point where a user would begin to type: the target sampled from here writes user turns."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        text = self._render([*messages, {"role": "user", "content": _MARK}], generation_prompt=False)
        prefix, mark, _ = text.partition(_MARK)
        if not mark:
            raise ValueError("the chat template drops the user's text, so no user turn can be sampled from it")
        return prefix

    def encode_conversation(self, messages: Sequence[Message], *, truncated: bool = False) -> MaskedConversation:
        """Token ids of a conversation that ends with an assistant turn, and the mask of what the target wrote.

        Args:
            messages: alternating turns, optionally after a system turn.
            truncated: the last answer was cut at a token limit, so it carries no end-of-turn token.

        Raises:
            ValueError: no assistant turn, or a template that rewrites earlier turns when a later one is added.
        """
        token_ids: list[int] = []
        mask: list[bool] = []
        written = ""
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError("the conversation has no assistant turn, so its answer mask would be all zeros")
        for index in answers:
            prompt = self._render(messages[:index], generation_prompt=True)
            answer = self._answer_text(messages[: index + 1], prompt=prompt)
            if not prompt.startswith(written):
                raise ValueError(
                    "the chat template rewrites earlier turns when a later one is added (it may drop reasoning); "
                    "split the conversation so that each ends with its only trained answer"
                )
            if truncated and index == answers[-1]:
                answer = messages[index]["content"]
            prompt_ids, answer_ids = self.encode(prompt[len(written) :]), self.encode(answer)
            token_ids += prompt_ids + answer_ids
            mask += [False] * len(prompt_ids) + [True] * len(answer_ids)
            written = prompt + answer
        if all(mask):
            raise ValueError("every token of the conversation counts as an answer; it has no prompt to draft after")
        return MaskedConversation(token_ids=token_ids, answer_mask=mask)

    def _answer_text(self, messages: Sequence[Message], *, prompt: str) -> str:
        """The last message's text and its end-of-turn token, without what the template puts after it."""
        full = self._render(messages, generation_prompt=False)
        if not full.startswith(prompt):
            raise ValueError(
                "the chat template renders an answer differently from the generation prompt that precedes it, so the "
                "answer's start cannot be found; use a template whose generation prompt is a prefix of the answer"
            )
        tail = full[len(prompt) :]
        for stop in (self.tokenizer.convert_ids_to_tokens(token) for token in self.stop_token_ids):
            position = tail.rfind(stop)
            if position >= 0:
                return tail[: position + len(stop)]
        return tail

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # templates raise whatever their author chose
            raise ValueError(f"the chat template refuses the conversation: {error}") from error


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
