"""Messages as others write them -> messages as a conversation file has them (train/data/messages.py checks them).

OpenAI form: `content` may be a list of text parts, reasoning may be called `reasoning` or `thinking`, and the older
`function_call` and the role `function` stand for tool calls and their results.
ShareGPT form: `from` names who speaks, and a tool call is a turn of its own whose text is JSON.

A role that is not known here keeps its name, and is refused where messages are checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.heads.chat import Message
from eyas.train.data.messages import BadConversation

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
REASONING = ("reasoning_content", "reasoning", "thinking")


def openai_message(message: Any) -> Message:
    """One message of the OpenAI form in ours; what is neither is returned as it is, for the check to refuse."""
    if not isinstance(message, Mapping):
        return message
    converted: Message = {name: value for name, value in message.items() if value is not None}
    role = converted.get("role")
    if isinstance(role, str):
        converted["role"] = ROLES.get(role, role)
    if isinstance(converted.get("content"), list):
        converted["content"] = joined_parts(converted["content"])
    reasoning = next((converted[name] for name in REASONING if converted.get(name)), None)
    if reasoning is not None:
        converted["reasoning_content"] = reasoning
    if isinstance(converted.get("function_call"), Mapping):
        converted["tool_calls"] = [{"type": "function", "function": dict(converted.pop("function_call"))}]
    return converted


def sharegpt_messages(turns: Sequence[Any]) -> list[Message]:
    """All turns of a ShareGPT conversation in our form."""
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise BadConversation("message_not_an_object", "a turn is not an object with 'from' and 'value'")
        role = turn.get("from")
        if role not in CALL_ROLES:
            known = ROLES.get(role, role) if isinstance(role, str) else role
            messages.append({"role": known, "content": turn.get("value")})
        elif messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            messages[-1]["tool_calls"] = _calls(turn.get("value"))
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": _calls(turn.get("value"))})
    return [message for message in messages if not (message["role"] == "system" and message["content"] == "")]


def joined_parts(parts: Sequence[Any]) -> str:
    """Text of a content that is a list of parts.

    Raises:
        BadConversation: a part is an image, a file or the like, which a text model cannot be shown.
    """
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise BadConversation("content_not_text", "a message has a part that is not text")
        texts.append(text)
    return "".join(texts)


def tool_list(tools: Any) -> Any:
    """Tool definitions as a list: some data keep them as JSON text, some without the "function" around each."""
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = _json(tools, reason="bad_tools")
    if isinstance(tools, list):
        return [
            {"type": "function", "function": tool} if isinstance(tool, dict) and "name" in tool else tool
            for tool in tools
        ]
    return tools


def _calls(text: Any) -> list[dict[str, Any]]:
    """The tool calls that a ShareGPT turn holds as JSON text, one object or a list of them."""
    value = _json(text, reason="bad_tool_calls") if isinstance(text, str) else text
    calls = value if isinstance(value, list) else [value]
    return [{"type": "function", "function": call} for call in calls]


def _json(text: str, *, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConversation(reason, f"tool calls or tools are not valid JSON ({error})") from error
