"""Where the target's own text begins and ends in a rendered conversation.

The text before an answer is what the server gives the target: the generation prompt, of whichever mode of serving
explains most of the rendering, and an empty think block that the template inserts by itself. The answer goes up to
and includes its end-of-turn token. Channel headers, think tags and tool calls are written by the target, so they belong
to the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.heads.chat_messages import Message
from eyas.heads.chat_template import MARK, ChatTemplate, Tools

_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
_OPEN_THINKING = re.compile(r"<think>\s*\Z")


@dataclass(frozen=True)
class Turn:
    """The text that the server gives the target, and the text that the target answers."""

    prompt: str
    answer: str


def locate_answer(
    messages: Sequence[Message], *, template: ChatTemplate, tools: Tools, stops: Sequence[str], truncated: bool
) -> Turn:
    """The last turn of a conversation that ends with an answer.

    Args:
        stops: texts of the end-of-turn tokens.
        truncated: the answer was cut at a token limit, so it carries no end-of-turn token.

    Raises:
        ValueError: the answer's start cannot be found.
    """
    full = template.render(messages, tools=tools, generation_prompt=False)
    start, end = _written(full, messages, template=template, tools=tools)
    stop = re.compile("|".join(re.escape(text) for text in sorted(stops, key=len, reverse=True)))
    closings = template.closings
    if closings is not None and not messages[-1].get("tool_calls") and full[start:].endswith(closings[0]):
        end = min(end, len(full) - len(closings[0]))
        turn_end = _closing_turn_end(closings, stop=stop)
    else:
        end, turn_end = _last_turn_end(full, start=start, end=end, stop=stop)
        if not turn_end:
            turn_end = _next_turn_start(full, messages, template=template, tools=tools, stop=stop)
    written = full[start:end]
    return Turn(prompt=full[:start], answer=_cut(written, messages[-1]) if truncated else written + turn_end)


def _written(full: str, messages: Sequence[Message], *, template: ChatTemplate, tools: Tools) -> tuple[int, int]:
    """Where the last answer begins in `full`, and before where it ends."""
    prompts = template.generation_prompts(messages[:-1], tools=tools)
    begin = max((len(prompt) for prompt in prompts if full.startswith(prompt)), default=None)
    if begin is None and template.tags_answers(tools):
        # The tags alone tell where the answer begins, as long as what precedes it is what the server gives.
        history = template.render(messages[:-1], tools=tools, generation_prompt=False)
        shared = max(template.shared_length(full, prompt) for prompt in prompts)
        begin = shared if full.startswith(history) and shared >= len(history) else None
    if begin is None:
        raise ValueError(
            "the chat template renders an answer differently from the generation prompt that precedes it, so the "
            "answer's start cannot be found; use a template whose generation prompt is a prefix of the answer, or "
            "let the target write the answers (data.regenerate=true), which keeps their tokens"
        )
    start, end = template.tagged_span(messages, tools=tools, begin=begin) or (begin, len(full))
    return _after_empty_thinking(full, start, messages[-1]), end


def _after_empty_thinking(full: str, start: int, message: Message) -> int:
    """`start`, or the end of the empty think block there, unless the message's own text has it."""
    content = message.get("content") or ""
    opened = _OPEN_THINKING.search(full[:start])
    block = _EMPTY_THINKING.match(full, start if opened is None else opened.start())
    if block is None or content.lstrip().startswith("<think>"):
        return start
    indent = content[: len(content) - len(content.lstrip())]
    after_block = block.group().rpartition("</think>")[2]
    own = len(indent) if after_block.endswith(indent) else 0
    return max(start, block.end() - own)


def _closing_turn_end(closings: tuple[str, str], *, stop: re.Pattern[str]) -> str:
    """What a template puts after an answer's text, up to and including the end-of-turn token; "" without one."""
    last, followed = closings
    found = stop.search(last)
    if found is not None:
        return last[: found.end()]
    # Some templates close a turn only when another follows; some targets end theirs with the next one's header.
    found = stop.match(followed.lstrip())
    return "" if found is None else found.group()


def _last_turn_end(full: str, *, start: int, end: int, stop: re.Pattern[str]) -> tuple[int, str]:
    """Where the answer ends, and its end-of-turn token, "" without one: for turns whose closing is not known."""
    after = stop.match(full[end:].lstrip())
    if after is not None:
        return end, after.group()
    # The last end-of-turn token, or the first of several that only space parts.
    runs = list(re.finditer(rf"(?:{stop.pattern})(?:\s*(?:{stop.pattern}))*", full[start:end]))
    if not runs:
        return end, ""
    first = stop.match(runs[-1].group())
    assert first is not None
    return start + runs[-1].start(), first.group()


def _next_turn_start(
    full: str, messages: Sequence[Message], *, template: ChatTemplate, tools: Tools, stop: re.Pattern[str]
) -> str:
    """An end-of-turn token that the template renders only with the turn that follows, "" without one."""
    result = {"role": "tool" if messages[-1].get("tool_calls") else "user", "content": MARK}
    try:
        more = template.render([*messages, result], tools=tools, generation_prompt=False)
    except ValueError:
        return ""
    found = stop.match(more[len(full) :].lstrip()) if more.startswith(full) else None
    return "" if found is None else found.group()


def _cut(written: str, message: Message) -> str:
    """The text of an answer that was cut at a token limit: nothing that the template puts after what there is of it."""
    if message.get("tool_calls") or message.get("content"):
        return written
    reasoning = (message.get("reasoning_content") or "").strip()
    return written[: written.rfind(reasoning) + len(reasoning)] if reasoning and reasoning in written else ""
