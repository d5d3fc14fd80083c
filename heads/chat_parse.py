"""What an answer says, out of the tokens that the target wrote: text, and reasoning in the families that mark it.

Two forms are known: `<think> ... </think>` before the text (Qwen3, DeepSeek, SmolLM3), and channels (gpt-oss: analysis
is reasoning, final is the text). Tool calls are not unpacked: they stay in the text, without the special tokens around
them, and whole in `token_ids`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from eyas.heads.chat_messages import Message

_OPEN, _CLOSE = "<think>", "</think>"
_CHANNEL = re.compile(
    r"(?P<header>(?:<\|start\|>assistant)?[^<]*<\|channel\|>(?P<channel>\w+)[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"(?P<text>.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)


def opens_thinking(prompt: str) -> bool:
    """Whether a generation prompt ends within a think block, so that the answer begins with reasoning."""
    return prompt.rfind(_OPEN) > prompt.rfind(_CLOSE)


def parse_answer(token_ids: Sequence[int], *, tokenizer: Any, stop_token_ids: Sequence[int], opened: bool) -> Message:
    """The assistant message that `token_ids` spell.

    Args:
        opened: the generation prompt ends within a think block, so the answer begins with reasoning.
    """
    message: Message = {"role": "assistant", "token_ids": list(token_ids)}
    spoken = list(token_ids)
    if spoken and spoken[-1] in stop_token_ids:
        spoken.pop()
    raw = tokenizer.decode(spoken, skip_special_tokens=False)
    if tokenizer.get_added_vocab().get("<|channel|>") in spoken and _CHANNEL.match(raw):
        reasoning, content = _channels(raw)
    else:
        plain = tokenizer.decode(spoken, skip_special_tokens=True)
        # Where the think tags are special tokens, the plain text has lost them.
        marked = plain if _CLOSE in plain or _CLOSE not in raw else raw
        reasoning, content = _think_block(marked, opened=opened)
    message["content"] = content
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def _think_block(text: str, *, opened: bool) -> tuple[str, str]:
    starts = text.lstrip().startswith(_OPEN)
    if not starts and not opened:
        return "", text
    inner = text.lstrip().removeprefix(_OPEN) if starts else text
    reasoning, close, content = inner.partition(_CLOSE)
    return reasoning.strip("\n"), content.lstrip("\n") if close else ""


def _channels(raw: str) -> tuple[str, str]:
    reasoning: list[str] = []
    content: list[str] = []
    for message in _CHANNEL.finditer(raw):
        if message["channel"] == "analysis":
            reasoning.append(message["text"])
        elif "to=" not in message["header"]:
            content.append(message["text"])
        else:
            content.append(message[0])  # a tool call, as it is written
    return "\n".join(reasoning), "\n".join(content)
