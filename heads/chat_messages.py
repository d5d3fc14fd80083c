"""Messages and tools in the form in which vLLM hands them to a chat template.

The server does not pass a client's JSON through: it wraps text into parts for templates that loop over parts, parses
the arguments of tool calls, calls a developer turn a system turn where the template knows no developer, and fills in
the fields of tools. A prompt is the same to the token only when all of that is done here too. What it does was read
from vLLM 0.32 (`renderers/hf.py`, `renderers/chat_utils.py`) and is compared with it in tests/test_heads_chat_engine.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from eyas.heads.chat_facts import TemplateFacts

Message = dict[str, Any]
"""role and content; perhaps reasoning_content, tool_calls, tool_call_id, name, and token_ids of a regenerated answer."""


def served_messages(messages: Sequence[Message], *, facts: TemplateFacts) -> list[Message]:
    """Messages as the template sees them in the server; fields that the server drops are dropped."""
    served = [_served_message(message, facts=facts) for message in messages]
    if not facts.knows_developer and any(message["role"] == "developer" for message in served):
        return _developer_as_system(served)
    return served


def served_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as the server's request form writes them out: fields in its order, absent ones null, others dropped.

    Raises:
        ValueError: a tool has no function with a name.
    """
    if not tools:
        return None
    served = []
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                'a tool has no function name; write each as {"type": "function", "function": {"name": ..., '
                '"description": ..., "parameters": {...}}}'
            )
        fields = {key: function.get(key) for key in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            fields["strict"] = function["strict"]
        served.append({"type": "function", "function": fields})
    return served


def _served_message(message: Message, *, facts: TemplateFacts) -> Message:
    role, content = message["role"], message.get("content") or ""
    calls = message.get("tool_calls") if role == "assistant" else None
    served: Message = {"role": role, "content": content}
    if facts.loops_over_parts and role != "tool":
        # Clients send null beside tool calls, and the server makes no part of it.
        served["content"] = [{"type": "text", "text": content}] if content or not calls else []
    if calls:
        served["tool_calls"] = [_served_call(call) for call in calls]
    if role == "assistant" and message.get("reasoning_content") is not None:
        # Templates read one name or the other; the server sets the first two. The third is that of gpt-oss, whose
        # prompts the server builds without the template.
        names = ("reasoning", "reasoning_content", *(["thinking"] if facts.reads_thinking else []))
        served |= dict.fromkeys(names, message["reasoning_content"])
    if role == "tool" and "tool_call_id" in message:
        served["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        served["name"] = message["name"]
    return served


def _served_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise ValueError('a tool call has no function; write it as {"function": {"name": ..., "arguments": {...}}}')
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> dict[str, Any]:
    """A mapping, as templates need; the server makes an empty one of what is none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """Developer turns become system turns, and several system turns or a late one become one at the start."""
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    systems = [index for index, message in enumerate(renamed) if message["role"] == "system"]
    if systems == [0]:
        return renamed
    texts = [_text(renamed[index]["content"]) for index in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
