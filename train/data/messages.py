"""What a message may hold, and which message may follow which: the one grammar of conversations.

    system, developer   {"content": text}                                 anywhere
    user                {"content": text}                                 not directly after a user turn
    assistant           {"content": text, "reasoning_content": text, "tool_calls": [...], "token_ids": [...]}
                                                                          after a user turn or a tool result
    tool                {"content": text, "tool_call_id": text, "name": text}
                                                                          after an assistant turn, one for each of its calls

An assistant turn without text must have something else that the target wrote. Everything else is refused with a reason,
because a template would render it into a conversation that nobody had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.heads.chat import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


class BadConversation(ValueError):
    """A record that is no usable conversation; `reason` is the short word that it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_messages(messages: Any) -> list[Message]:
    """The messages with what this file lists and nothing else.

    Raises:
        BadConversation: they are not of the form above.
    """
    if not isinstance(messages, list) or not messages:
        raise BadConversation("no_messages", "'messages' is missing or empty")
    checked = [_check_message(message) for message in messages]
    if not any(message["role"] == "user" for message in checked):
        raise BadConversation("no_user_turn", "there is no user turn")
    _check_order(checked)
    return checked


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool definitions: a list of objects; an empty one counts as none.

    Raises:
        BadConversation: they are something else.
    """
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadConversation("bad_tools", "'tools' is not a list of objects")
    return tools


def _check_message(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise BadConversation("message_not_an_object", "a message is not an object with a role and a text 'content'")
    role = message.get("role")
    if role not in ROLES:
        raise BadConversation(
            "unknown_role", f"a message has the role {role!r}, and must have one of {', '.join(ROLES)}"
        )
    if role == "assistant":
        return _check_answer(message)
    content = _text(message, "content")
    if content is None:
        raise BadConversation("content_not_text", "a message is not an object with a text 'content'")
    if role == "user" and not content:
        raise BadConversation("empty_user_turn", "a user turn is empty")
    checked: Message = {"role": role, "content": content}
    if role == "tool":
        checked |= _texts(message, "tool_call_id", "name")
    return checked


def _check_answer(message: Mapping[str, Any]) -> Message:
    more: Message = _texts(message, "reasoning_content")
    if message.get("tool_calls"):
        more["tool_calls"] = _check_calls(message["tool_calls"])
    if message.get("token_ids"):
        more["token_ids"] = _check_token_ids(message["token_ids"])
    content = _text(message, "content")
    if content is None and not more:
        raise BadConversation("content_not_text", "a message is not an object with a text 'content'")
    if not content and not more:
        raise BadConversation("empty_answer", "an assistant turn is empty")
    return {"role": "assistant", "content": content or "", **more}


def _check_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadConversation("bad_tool_calls", "'tool_calls' is not a list")
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            raise BadConversation(
                "bad_tool_calls", "a tool call has no function with a name and with arguments (an object or JSON text)"
            )
        own_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        checked.append({**own_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return checked


def _check_token_ids(token_ids: Any) -> list[int]:
    if not isinstance(token_ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in token_ids):
        raise BadConversation("bad_token_ids", "'token_ids' is not a list of token ids")
    return token_ids


def _check_order(messages: list[Message]) -> None:
    before = None
    open_calls = 0
    for message in messages:
        role = message["role"]
        if role in ("system", "developer"):
            continue
        if role == "assistant" and before is None:
            raise BadConversation("assistant_first", "the conversation begins with an assistant turn")
        if role == before and role in ("user", "assistant"):
            raise BadConversation(f"two_{role}_turns", f"two {role} turns follow one another")
        if role == "tool" and (before not in ("assistant", "tool") or not open_calls):
            raise BadConversation("tool_without_call", "a tool result answers no tool call before it")
        open_calls = open_calls - 1 if role == "tool" else len(message.get("tool_calls", ()))
        before = role


def _text(message: Mapping[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise BadConversation("content_not_text", f"a message is not an object with a text {key!r}")
    return value


def _texts(message: Mapping[str, Any], *keys: str) -> Message:
    return {key: text for key in keys if (text := _text(message, key))}
