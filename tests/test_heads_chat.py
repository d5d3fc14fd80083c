"""Prompts and answer masks on the plain template of the tiny target, and what is refused."""

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
    (encoded,) = chat.encode_conversation(CONVERSATION)
    assert _answers(chat, encoded.token_ids, encoded.answer_mask) == ["hello you<|im_end|>", "no<|im_end|>"]
    # What the server is prompted with for the last turn is exactly what precedes its mask.
    last_answer = len(encoded.answer_mask) - len(chat.encode("no<|im_end|>"))
    assert encoded.token_ids[:last_answer] == chat.prompt_ids(CONVERSATION[:-1])


def test_a_truncated_answer_has_no_end_of_turn_token(chat: TargetChat) -> None:
    (encoded,) = chat.encode_conversation(CONVERSATION, truncated=True)
    assert _answers(chat, encoded.token_ids, encoded.answer_mask) == ["hello you<|im_end|>", "no"]


@given(texts=st.lists(st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=20), min_size=2, max_size=6))
def test_mask_recovers_any_text(chat: TargetChat, texts: list[str]) -> None:
    roles = ("user", "assistant")
    texts = texts[: len(texts) // 2 * 2]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    if any(special in text for special in tiny.SPECIAL for text in texts):
        return
    (encoded,) = chat.encode_conversation(messages)
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


def test_a_template_whose_generation_prompt_is_no_prefix_of_the_answer_is_refused(tmp_path: Path) -> None:
    template = "{{ messages | length }}" + tiny.CHAT_TEMPLATE
    tiny.write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match=r"generation prompt.*data\.regenerate"):
        TargetChat(tmp_path).encode_conversation(CONVERSATION)


def test_an_answer_of_no_token_is_left_out_and_others_stay(chat: TargetChat) -> None:
    cut = [*CONVERSATION[:-1], {"role": "assistant", "content": ""}]
    (encoded,) = chat.encode_conversation(cut, truncated=True)
    assert _answers(chat, encoded.token_ids, encoded.answer_mask) == ["hello you<|im_end|>"]
    with pytest.raises(ValueError, match="all zeros"):
        chat.encode_conversation([*CONVERSATION[:2], {"role": "assistant", "content": ""}], truncated=True)


def test_turns_after_the_last_answer_are_left_out(chat: TargetChat) -> None:
    assert chat.encode_conversation([*CONVERSATION, {"role": "user", "content": "x"}]) == chat.encode_conversation(
        CONVERSATION
    )


def test_written_tokens_win_over_the_text(chat: TargetChat) -> None:
    written = [*chat.encode("other"), 300, 2]  # 300: a row of the embedding that no token has
    messages = [*CONVERSATION[:-1], {"role": "assistant", "content": "no", "token_ids": written}]
    (encoded,) = chat.encode_conversation(messages, truncated=True)
    assert encoded.token_ids == chat.prompt_ids(CONVERSATION[:-1]) + written
    assert (
        encoded.token_ids[-len(written) :]
        == [token for token, inside in zip(encoded.token_ids, encoded.answer_mask, strict=True) if inside][
            -len(written) :
        ]
    )


@pytest.mark.parametrize("written", [[1, -1], ["1"], [True], 5, [tiny.VOCAB_SIZE]])
def test_tokens_of_another_target_are_refused(chat: TargetChat, written: object) -> None:
    messages = [*CONVERSATION[:-1], {"role": "assistant", "content": "no", "token_ids": written}]
    with pytest.raises(ValueError, match="another target"):
        chat.encode_conversation(messages)


def test_the_next_user_turn_begins_after_the_conversation(chat: TargetChat) -> None:
    text = chat.user_turn_prefix_after(CONVERSATION)
    assert text.endswith("assistant\nno<|im_end|>\n<|im_start|>user\n")
    assert chat.encode(text)[: len(chat.prompt_ids(CONVERSATION[:-1]))] == chat.prompt_ids(CONVERSATION[:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"enable_thinking": False}, "has no effect"), ({"add_generation_prompt": False}, "set by eyas itself")],
)
def test_options_that_do_nothing_are_refused(tiny_target: Path, options: dict[str, bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetChat(tiny_target, template_options=options)


def test_a_template_that_prints_todays_date_can_be_given_a_day(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path, chat_template="Today is {{ strftime_now('%d %b %Y') }}." + tiny.CHAT_TEMPLATE)
    user = CONVERSATION[:2]
    fixed = TargetChat(tmp_path, template_options={"strftime_now": "2025-01-30"})
    assert fixed.decode(fixed.prompt_ids(user)).startswith("Today is 30 Jan 2025.")
    (document,) = fixed.encode_conversation(CONVERSATION[:3])
    assert document.token_ids[: len(fixed.prompt_ids(user))] == fixed.prompt_ids(user)
    today = TargetChat(tmp_path)
    assert today.prompt_ids(user) != fixed.prompt_ids(user)
    assert (today.prints_today, fixed.prints_today) == (True, False)
    with pytest.raises(ValueError, match=r"strftime_now='30 Jan' is no day.* such as '2026-11-30'"):
        TargetChat(tmp_path, template_options={"strftime_now": "30 Jan"})


def test_a_date_that_a_variable_fixes_is_not_todays(tmp_path: Path) -> None:
    """Llama 3.2: the function is asked where the variable is not given."""
    day = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}"
    tiny.write_tokenizer(tmp_path, chat_template=day + tiny.CHAT_TEMPLATE)
    assert TargetChat(tmp_path).prints_today
    assert not TargetChat(tmp_path, template_options={"date_string": "26 Jul 2024"}).prints_today


def test_mistrals_own_tokenizer_beside_the_usual_one_is_not_read(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "mistral", "vocab_size": {tiny.VOCAB_SIZE}}}')
    prompt = TargetChat(tmp_path).prompt_ids(CONVERSATION[:1])
    (tmp_path / "tekken.json").write_text("no tokenizer")
    assert TargetChat(tmp_path).prompt_ids(CONVERSATION[:1]) == prompt


def test_a_template_that_is_no_jinja_is_refused(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path, chat_template="{% for %}")
    with pytest.raises(ValueError, match="not valid Jinja"):
        TargetChat(tmp_path)


def test_a_target_without_template_or_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        TargetChat(tmp_path)
    tiny.write_tokenizer(tmp_path, chat_template="x")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="chat template"):
        TargetChat(tmp_path).prompt_ids(CONVERSATION[:2])
