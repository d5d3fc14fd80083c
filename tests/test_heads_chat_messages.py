"""What the server makes of messages and tools before a template sees them (against vLLM: test_heads_chat_engine.py)."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.heads.chat_facts import template_facts
from eyas.heads.chat_messages import served_messages, served_tools

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (PLAIN, False),
        (PARTS, True),
        (PARTS.replace("m.content", "m['content']"), True),
        (PARTS.replace("in messages", "in messages[1:]"), True),
        ("{% set turns = messages[1:] %}" + PARTS.replace("in messages", "in turns"), True),
        (PARTS.replace("in messages", "in others"), False),
        (PARTS.replace("in m.content", "in m.content.split()"), False),
        (PARTS.replace("m.content", "m.tool_calls"), False),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}x{% endfor %}{% endfor %}", True),
        ("{% macro show(c) %}{% for p in c %}x{% endfor %}{% endmacro %}" + PLAIN, False),
        (
            "{% macro show(c) %}{% for p in c %}x{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(c) %}{% for p in c %}x{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}",
            True,
        ),
        ("{% macro show(content) %}{% for p in content %}x{% endfor %}{% endmacro %}" + PLAIN, False),
    ],
)
def test_a_template_that_loops_over_parts_is_known(template: str, parts: bool) -> None:
    assert template_facts(template).loops_over_parts == parts


def test_a_templates_variables_and_tags_are_known() -> None:
    facts = template_facts("{% if enable_thinking %}{% generation %}x{% endgeneration %}{% break %}{% endif %}")
    assert facts.variables == {"enable_thinking"}
    assert facts.tags_answers
    assert not template_facts(PLAIN).tags_answers
    with pytest.raises(ValueError, match="not valid Jinja"):
        template_facts("{% for %}")


def test_messages_are_served_with_what_the_server_keeps() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi", "name": "ann", "other": 1},
        {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": "r", "token_ids": [1]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    assert served_messages(messages, facts=template_facts(PLAIN)) == [
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    assert [message["content"] for message in served_messages(messages, facts=template_facts(PARTS))] == [
        [{"type": "text", "text": "hi"}],
        [{"type": "text", "text": ""}],
        "x",
    ]
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    assert served_messages([called], facts=template_facts(PARTS))[0]["content"] == []
    thinking = template_facts(PLAIN + "{{ messages[0].thinking }}")
    assert served_messages(messages, facts=thinking)[1]["thinking"] == "r"


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("{", {}), ("[1]", {}), ("", {}), (None, {}), (3, {})],
)
def test_arguments_become_a_mapping(arguments: Any, parsed: dict[str, Any]) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    (message,) = served_messages(
        [{"role": "assistant", "content": "", "tool_calls": [call]}], facts=template_facts(PLAIN)
    )
    assert message["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": parsed}}]
    assert call["function"]["arguments"] == arguments  # the caller's own message stays as it is


@pytest.mark.parametrize("template", [PLAIN, PARTS])
def test_a_developer_turn_becomes_one_system_turn_where_it_is_unknown(template: str) -> None:
    user = {"role": "user", "content": "hi"}
    developer = {"role": "developer", "content": "be kind"}
    system = {"role": "system", "content": "be brief"}
    facts = template_facts(template)
    (alone, _) = served_messages([developer, user], facts=facts)
    assert alone["role"] == "system"
    for messages in ([system, developer, user], [system, user, developer]):
        (merged, asked) = served_messages(messages, facts=facts)
        assert merged == {"role": "system", "content": "be brief\n\nbe kind"}
        assert asked["role"] == "user"
    known = template_facts(template + "{% if messages[0].role == 'developer' %}{% endif %}")
    assert [message["role"] for message in served_messages([developer, user], facts=known)] == ["developer", "user"]


def test_tools_are_completed_and_ordered() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "extra": 1}, "other": 2}
    (served,) = served_tools([tool]) or []
    assert served == {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}},
    }
    assert list(served["function"]) == ["name", "description", "parameters"]
    assert served_tools([]) is served_tools(None) is None
    for broken in ({}, {"function": "f"}, {"function": {"name": 1}}):
        with pytest.raises(ValueError, match="no function name"):
            served_tools([broken])
