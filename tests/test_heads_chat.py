"""Answer masks: exact, template-independent, and refused where a template makes them impossible."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.heads.chat import TargetChat
from tests import tiny

CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> TargetChat:
    return TargetChat(tiny_target)


def _answers(chat: TargetChat, ids: list[int], mask: list[bool]) -> list[str]:
    spans: list[list[int]] = []
    for index, inside in enumerate(mask):
        if inside and (index == 0 or not mask[index - 1]):
            spans.append([])
        if inside:
            spans[-1].append(ids[index])
    return [chat.tokenizer.decode(span) for span in spans]


def test_mask_covers_each_answer_and_its_end_of_turn_token(chat: TargetChat) -> None:
    encoded = chat.encode_conversation(CONVERSATION)
    assert _answers(chat, encoded.token_ids, encoded.answer_mask) == ["hello you<|im_end|>", "no<|im_end|>"]
    # What the server is prompted with for the last turn is exactly what precedes its mask.
    last_answer = len(encoded.answer_mask) - len(chat.encode("no<|im_end|>"))
    assert encoded.token_ids[:last_answer] == chat.prompt_ids(CONVERSATION[:-1])


def test_a_truncated_answer_has_no_end_of_turn_token(chat: TargetChat) -> None:
    encoded = chat.encode_conversation(CONVERSATION, truncated=True)
    assert _answers(chat, encoded.token_ids, encoded.answer_mask) == ["hello you<|im_end|>", "no"]


@given(texts=st.lists(st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=20), min_size=2, max_size=6))
def test_mask_recovers_any_text(chat: TargetChat, texts: list[str]) -> None:
    roles = ("user", "assistant")
    texts = texts[: len(texts) // 2 * 2]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    if any(special in text for special in tiny.SPECIAL for text in texts):
        return
    encoded = chat.encode_conversation(messages)
    assert _answers(chat, encoded.token_ids, encoded.answer_mask) == [text + "<|im_end|>" for text in texts[1::2]]


def test_user_turn_prefix_ends_where_the_user_types(chat: TargetChat) -> None:
    assert chat.user_turn_prefix(system="s") == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n"
    assert chat.user_turn_prefix(system=None) == "<|im_start|>user\n"


def test_stop_tokens_come_from_the_generation_config(chat: TargetChat) -> None:
    assert chat.stop_token_ids == [2]


def test_a_conversation_without_answer_is_refused(chat: TargetChat) -> None:
    with pytest.raises(ValueError, match="all zeros"):
        chat.encode_conversation(CONVERSATION[:2])


def test_a_template_that_shows_only_answers_is_refused(tmp_path: Path) -> None:
    template = "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}{% endif %}{% endfor %}"
    tiny.write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match="every token of the conversation counts as an answer"):
        TargetChat(tmp_path).encode_conversation(CONVERSATION[1:3])


def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    template = "{{ messages | length }}" + tiny.CHAT_TEMPLATE
    tiny.write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match="generation prompt"):
        TargetChat(tmp_path).encode_conversation(CONVERSATION)


def test_a_target_without_template_or_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        TargetChat(tmp_path)
    tiny.write_tokenizer(tmp_path, chat_template="x")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="chat template"):
        TargetChat(tmp_path).prompt_ids(CONVERSATION[:2])
