"""Generated tokens read back as messages, in each family's form."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.heads.chat import TargetChat
from tests import chat_templates as templates

TURNS = [{"role": "user", "content": "what is this"}]


def _chat(directory: Path, family: str) -> TargetChat:
    return TargetChat(templates.write_chat(directory, templates.FAMILIES[family]))


@pytest.mark.parametrize(
    ("family", "text", "content", "reasoning"),
    [
        ("chatml", "hello<|im_end|>", "hello", None),
        ("chatml", "  hello\n", "  hello\n", None),
        ("chatml", "", "", None),
        ("qwen3", "<think>\na b\n</think>\n\n hello<|im_end|>", " hello", "a b"),
        ("qwen3", "<think>\n\n</think>\n\nhello<|im_end|>", "hello", None),
        ("qwen3", "hello </think> there<|im_end|>", "hello </think> there", None),
        ("qwen3", "<think>\na b", "", "a b"),
        ("thinking-only", "a b\n</think>\n\nhello<|im_end|>", "hello", "a b"),
        ("thinking-only", "a b", "", "a b"),
        (
            "qwen3",
            '<think>\na\n</think>\n\n<tool_call>\n{"name": "x"}\n</tool_call><|im_end|>',
            '<tool_call>\n{"name": "x"}\n</tool_call>',
            "a",
        ),
        ("harmony", "<|channel|>final<|message|>hello<|return|>", "hello", None),
        (
            "harmony",
            "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>",
            "hello",
            "a < b",
        ),
        ("harmony", "<|channel|>analysis<|message|>a b", "", "a b"),
        (
            "harmony",
            "<|channel|>commentary<|message|>one moment<|end|><|start|>assistant<|channel|>final<|message|>hello",
            "one moment\nhello",
            None,
        ),
    ],
)
def test_text_and_reasoning_are_told_apart(
    tmp_path: Path, family: str, text: str, content: str, reasoning: str | None
) -> None:
    chat = _chat(tmp_path, family)
    tokens = chat.encode(text)
    expected = {"role": "assistant", "content": content, "token_ids": tokens}
    assert chat.parse_answer(tokens) == expected | ({} if reasoning is None else {"reasoning_content": reasoning})


@pytest.mark.parametrize(
    "call",
    [
        '<|start|>assistant<|channel|>commentary to=functions.weather json<|message|>{"place": "Bonn"}',
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"place": "Bonn"}',
    ],
)
def test_a_tool_call_in_a_channel_stays_in_the_text(tmp_path: Path, call: str) -> None:
    chat = _chat(tmp_path, "harmony")
    message = chat.parse_answer(chat.encode(f"<|channel|>analysis<|message|>ask<|end|>{call}<|call|>"))
    assert (message["content"], message["reasoning_content"]) == (call, "ask")
    bare = call.removeprefix("<|start|>assistant")
    assert chat.parse_answer(chat.encode(f"{bare}<|call|>"))["content"] == bare


def test_channels_spelled_by_a_target_that_has_none_are_text(tiny_target: Path) -> None:
    chat = TargetChat(tiny_target)
    text = "<|channel|>final<|message|>x"
    assert chat.parse_answer(chat.encode(text))["content"] == text


def test_a_think_tag_that_is_a_special_token_is_found(tmp_path: Path) -> None:
    chat = _chat(tmp_path, "qwen3")
    chat.tokenizer.add_special_tokens({"additional_special_tokens": list(templates.WORDS)})
    message = chat.parse_answer(chat.encode("<think>\na b\n</think>\n\nhello<|im_end|>"))
    assert (message["content"], message["reasoning_content"]) == ("hello", "a b")


@pytest.mark.parametrize("family", ["chatml", "qwen3", "thinking-only", "llama3", "mistral", "harmony", "phi"])
def test_a_parsed_answer_encodes_to_the_same_tokens_with_and_without_them(tmp_path: Path, family: str) -> None:
    """What the target wrote, read as a message and rendered again, is what it wrote."""
    chat = _chat(tmp_path, family)
    stop = templates.FAMILIES[family].stops[-1] if family != "harmony" else "<|return|>"
    stop = "<|im_end|>" if family in ("chatml", "qwen3") else stop
    text = {
        "qwen3": "<think>\na b\n</think>\n\nhello",
        "thinking-only": "a b\n</think>\n\nhello",
        "harmony": "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>hello",
        "mistral": " hello",
    }.get(family, "hello")
    tokens = chat.encode(text + stop)
    message = chat.parse_answer(tokens)
    (with_tokens,) = chat.encode_conversation([*TURNS, message])
    assert with_tokens.token_ids == chat.prompt_ids(TURNS) + tokens
    if family != "mistral":  # its template puts the space there itself
        del message["token_ids"]
        assert chat.encode_conversation([*TURNS, message]) == [with_tokens]
