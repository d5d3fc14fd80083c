"""The target's chat template, applied as the server applies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any

from eyas.heads.chat_facts import TemplateFacts, template_facts
from eyas.heads.chat_messages import Message, served_messages, served_tools

Tools = Sequence[dict[str, Any]] | None
MARK = "\N{OBJECT REPLACEMENT CHARACTER}mark\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a turn's text where only what the template puts around it matters."""

_THINKING_SWITCHES = ("enable_thinking", "thinking")
_TODAY = "strftime_now"
"""The function that templates ask for today's date (gpt-oss, Mistral)."""

_RESERVED = {
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
}


class ChatTemplate:
    """Renders conversations.

    Args:
        options: variables of the template, such as `{"enable_thinking": False}`; those that serve this target are the
            right ones. `strftime_now` is a day, such as "2026-11-30", that the template takes for today.

    Raises:
        ValueError: an option that the template does not read, one that is not for the user to set, or no day.
    """

    def __init__(self, tokenizer: Any, *, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        variables = self._facts(None).variables | self._facts([]).variables
        for name in options:
            if name in _RESERVED:
                raise ValueError(f"data.template_options.{name} is set by eyas itself; remove it")
            if name not in variables:
                raise ValueError(
                    f"data.template_options.{name} has no effect: the target's chat template does not read it; remove "
                    "it, or check its spelling"
                )
        if _TODAY in options:
            self._options[_TODAY] = _clock_at(options[_TODAY])

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools,
        generation_prompt: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation; with `generation_prompt`, up to where the target would write.

        Args:
            options: overrides of single options.

        Raises:
            ValueError: the template refuses the conversation.
        """
        tools = served_tools(tools)
        try:
            return self._tokenizer.apply_chat_template(
                served_messages(messages, facts=self._facts(tools)),
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **{**self._options, **(options or {})},
            )
        except Exception as error:  # templates raise whatever their author chose
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    @property
    def prints_today(self) -> bool:
        """Whether the template prints today's date, and no option fixes it."""
        if _TODAY in self._options or _TODAY not in self._facts(None).variables:
            return False
        asked = [{"role": "user", "content": "x"}]
        days = [{_TODAY: _clock_at(day)} for day in ("2001-01-01", "2022-12-31")]
        try:
            first, other = (self.render(asked, tools=None, generation_prompt=True, options=day) for day in days)
        except ValueError:  # not so short a conversation
            return True
        return first != other

    def generation_prompts(self, messages: Sequence[Message], *, tools: Tools) -> list[str]:
        """The text before the next answer in every mode of serving: as the options say, with and without thinking.

        A template writes an answer without reasoning as the mode without thinking would have made it, often with an
        empty think block, whatever the options say.
        """
        switches = [name for name in _THINKING_SWITCHES if name in self._facts(tools).variables]
        modes = [{}, *({name: value} for name in switches for value in (True, False))]
        prompts = (self.render(messages, tools=tools, generation_prompt=True, options=mode) for mode in modes)
        return list(dict.fromkeys(prompts))

    def tags_answers(self, tools: Tools) -> bool:
        """Whether the template has `{% generation %}` tags."""
        return self._facts(tools).tags_answers

    def shared_length(self, first: str, second: str) -> int:
        """Characters of `first` whose tokens begin `second` as well."""
        ours, theirs = (
            self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in (first, second)
        )
        length = 0
        for one, other, (_, end) in zip(ours["input_ids"], theirs["input_ids"], ours["offset_mapping"], strict=False):
            if one != other:
                break
            length = end
        return length

    def tagged_span(self, messages: Sequence[Message], *, tools: Tools, begin: int) -> tuple[int, int] | None:
        """Characters [start, end) of the rendered conversation, from `begin` on, that the template's tags call written.

        None without `{% generation %}` tags.

        Raises:
            ValueError: the tags mark nothing there, or everything.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = served_tools(tools)
        facts = self._facts(tools)
        if not facts.tags_answers:
            return None
        render: Any = render_jinja_template  # its annotations tell neither of spans nor of plain tools
        # The function behind `return_assistant_tokens_mask`, whose spans are in characters: no token is halved.
        texts, spans = render(
            conversations=[served_messages(messages, facts=facts)],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._options},
        )
        if sum(end - start for start, end in spans[0]) >= len(texts[0]):
            raise ValueError("the {% generation %} tags of the chat template mark everything as the assistant's")
        inside = [(max(start, begin), end) for start, end in spans[0] if end > begin]
        if not inside:
            raise ValueError(
                "the {% generation %} tags of the chat template mark nothing of the last answer, so its mask would be "
                "all zeros; mend the tags or take them out"
            )
        return inside[0][0], inside[-1][1]

    @cached_property
    def closings(self) -> tuple[str, str] | None:
        """What the template puts after the text of an answer: of the last one, and of one that a user turn follows.

        None when the template changes the text that it is given, or does not take so short a conversation.
        """
        answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
        try:
            last = self.render(answered, tools=None, generation_prompt=False)
            followed = self.render([*answered, answered[0]], tools=None, generation_prompt=False)
        except ValueError:
            return None
        if last.count(MARK) != 1 or followed.count(MARK) != 1:
            return None
        return last.partition(MARK)[2], followed.partition(MARK)[2]

    def _facts(self, tools: Tools) -> TemplateFacts:
        return template_facts(self._tokenizer.get_chat_template(tools=tools))


def _clock_at(day: Any) -> Callable[[str], str]:
    """What `strftime_now` is in a template for which it is always that day."""
    try:
        today = date.fromisoformat(day)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"data.template_options.{_TODAY}={day!r} is no day; the template prints today's date by it: write a day in "
            "quotes, such as '2026-11-30'"
        ) from error
    return today.strftime
