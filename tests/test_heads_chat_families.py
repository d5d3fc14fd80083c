"""Answer masks in every family of templates: what is masked is what the target wrote, after the server's own prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.heads.chat import MaskedConversation, Message, TargetChat
from tests import chat_templates as templates
from tests.chat_templates import CALL, TOOLS

Chats = Callable[[str], TargetChat]

TURNS = [
    {"role": "user", "content": "what is this"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no thanks"},
]
REASONED = [
    TURNS[0],
    {**TURNS[1], "reasoning_content": "a greeting"},
    TURNS[2],
    {**TURNS[3], "reasoning_content": "too much"},
]
TOOL_USE = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": "", "reasoning_content": "must look", "tool_calls": [CALL]},
    {"role": "tool", "content": "wet", "tool_call_id": "call-1", "name": "weather"},
    {"role": "assistant", "content": "It rains."},
]
ANY_TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
PIECES = st.sampled_from(["\n", "\n\n", " ", "  ", "th", "he", ":", "a", *templates.SPECIAL, *templates.WORDS])
TEXT = st.lists(ANY_TEXT | PIECES, min_size=1, max_size=5).map("".join)
PLAIN = st.lists(st.sampled_from(["\n", "\n\n", " ", "th", "he", ":", "a", "é", "日"]), min_size=1, max_size=6).map(
    "".join
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    """Chats by family and options, each made once."""
    root = tmp_path_factory.mktemp("chats")
    made: dict[str, TargetChat] = {}

    def make(name: str) -> TargetChat:
        if name not in made:
            family, _, mode = name.partition("/")
            directory = templates.write_chat(root / family, templates.FAMILIES[family])
            made[name] = TargetChat(directory, template_options={"enable_thinking": False} if mode else {})
        return made[name]

    return make


def spans(document: MaskedConversation) -> list[tuple[int, int]]:
    """Runs [start, end) of masked tokens."""
    mask = [False, *document.answer_mask, False]
    edges = [index - 1 for index in range(1, len(mask)) if mask[index] != mask[index - 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def written(chat: TargetChat, documents: Sequence[MaskedConversation]) -> list[list[str]]:
    """The masked texts of each document."""
    return [[chat.tokenizer.decode(doc.token_ids[start:end]) for start, end in spans(doc)] for doc in documents]


def render(chat: TargetChat, messages: Sequence[Message], **options: Any) -> str:
    """The template alone, past all of our own code."""
    return chat.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)


def prompts(documents: Sequence[MaskedConversation]) -> list[list[int]]:
    """What precedes each masked run in its document, all documents in a row."""
    return [document.token_ids[:start] for document in documents for start, _ in spans(document)]


# Texts that the target wrote in `TURNS`, `REASONED` and `TOOL_USE`, one list a document.
EXPECTED: dict[str, tuple[list[list[str]], list[list[str]] | None, list[list[str]] | None]] = {
    "chatml": ([["hello there<|im_end|>", "no thanks<|im_end|>"]], None, None),
    "llama3": (
        [["hello there<|eot_id|>", "no thanks<|eot_id|>"]],
        None,
        [['{"name": "weather", "parameters": {"place": "Bonn"}}<|eom_id|>', "It rains.<|eot_id|>"]],
    ),
    "qwen3": (
        [["hello there<|im_end|>"], ["no thanks<|im_end|>"]],
        [
            ["<think>\na greeting\n</think>\n\nhello there<|im_end|>"],
            ["<think>\ntoo much\n</think>\n\nno thanks<|im_end|>"],
        ],
        [
            [
                "<think>\nmust look\n</think>\n\n\n<tool_call>\n"
                '{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call><|im_end|>',
                "It rains.<|im_end|>",
            ]
        ],
    ),
    "thinking-only": (
        [["hello there<|im_end|>"], ["no thanks<|im_end|>"]],
        [["a greeting\n</think>\n\nhello there<|im_end|>"], ["too much\n</think>\n\nno thanks<|im_end|>"]],
        None,
    ),
    "mistral": ([[" hello there</s>", " no thanks</s>"]], None, None),
    "harmony": (
        [
            ["<|channel|>final<|message|>hello there<|return|>"],
            ["<|channel|>final<|message|>no thanks<|return|>"],
        ],
        [
            [
                "<|channel|>analysis<|message|>a greeting<|end|><|start|>assistant<|channel|>final<|message|>"
                "hello there<|return|>"
            ],
            [
                "<|channel|>analysis<|message|>too much<|end|><|start|>assistant<|channel|>final<|message|>"
                "no thanks<|return|>"
            ],
        ],
        [
            [
                "<|channel|>analysis<|message|>must look<|end|><|start|>assistant to=functions.weather<|channel|>"
                'commentary json<|message|>{"place": "Bonn"}<|call|>',
                "<|channel|>final<|message|>It rains.<|return|>",
            ]
        ],
    ),
    "tagged": ([["hello there<|im_end|>", "no thanks<|im_end|>"]], None, None),
    "tagged-header": (
        [["hello there<|im_end|>", "no thanks<|im_end|>"]],
        [
            [
                "<think>\na greeting\n</think>\nhello there<|im_end|>",
                "<think>\ntoo much\n</think>\nno thanks<|im_end|>",
            ]
        ],
        None,
    ),
    "phi": ([["hello there<|end|>", "no thanks<|end|>"]], None, None),
    "parts": ([["hello there<|im_end|>", "no thanks<|im_end|>"]], None, None),
    "glm": (
        [["hello there<|user|>", "no thanks<|user|>"]],
        [["\n<think>a greeting</think>\nhello there<|user|>", "\n<think>too much</think>\nno thanks<|user|>"]],
        [["\n<think>must look</think>\n<tool_call>weather</tool_call><|observation|>", "It rains.<|user|>"]],
    ),
    "cohere": ([["hello there<|end|><|eot_id|>", "no thanks<|end|><|eot_id|>"]], None, None),
    "r1-tagged": ([["hello there</s>", "no thanks</s>"]], None, None),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_masked_text_is_what_the_target_wrote(chats: Chats, family: str) -> None:
    chat = chats(family)
    turns, reasoned, tool_use = EXPECTED[family]
    assert written(chat, chat.encode_conversation(TURNS)) == turns
    if reasoned is not None:
        assert written(chat, chat.encode_conversation(REASONED)) == reasoned
    if tool_use is not None:
        assert written(chat, chat.encode_conversation(TOOL_USE, tools=TOOLS)) == tool_use


@pytest.mark.parametrize("family", ["qwen3", "qwen3/off", "thinking-only", "tagged-header/off"])
def test_an_empty_think_block_belongs_to_the_prompt(chats: Chats, family: str) -> None:
    chat = chats(family)
    documents = chat.encode_conversation(TURNS)
    block = "<think>\n\n</think>\n" if family.startswith("tagged") else "<think>\n\n</think>\n\n"
    for prompt in prompts(documents):
        assert chat.tokenizer.decode(prompt).endswith(f"<|im_start|>assistant\n{block}")
    if family.endswith("/off"):
        assert prompts(documents) == [chat.prompt_ids(TURNS[:1]), chat.prompt_ids(TURNS[:3])]


@pytest.mark.parametrize("options", [{}, {"thinking": True}, {"thinking": False}])
def test_an_answer_without_reasoning_follows_the_prompt_of_the_mode_that_has_none(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    """DeepSeek-V3.1: `</think>` alone closes what was never opened."""
    template = (
        "{% for message in messages %}{{ '<|user|>' + message.content if message.role == 'user' else "
        "'<|assistant|></think>' + message.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"
    )
    directory = templates.write_chat(tmp_path, templates.Family(template, ("</s>",)))
    chat = TargetChat(directory, template_options=options)
    (document,) = chat.encode_conversation(TURNS)
    assert written(chat, [document]) == [["hello there</s>", "no thanks</s>"]]
    assert prompts([document])[0] == chat.encode("<|user|>what is this<|assistant|></think>")


def test_the_indent_of_an_answer_after_an_empty_think_block_is_the_targets(chats: Chats) -> None:
    for family in ("qwen3", "thinking-only"):
        chat = chats(family)
        documents = chat.encode_conversation([TURNS[0], {"role": "assistant", "content": "  x"}])
        assert written(chat, documents) == [["  x<|im_end|>"]]


def test_a_think_block_in_the_text_itself_is_the_targets(chats: Chats) -> None:
    text = "<think>\n\n</think>\n\nhello"
    chat = chats("chatml")
    assert written(chat, chat.encode_conversation([TURNS[0], {"role": "assistant", "content": text}])) == [
        [f"{text}<|im_end|>"]
    ]


def test_reasoning_dropped_from_history_makes_further_documents(chats: Chats) -> None:
    chat = chats("qwen3")
    first, second = chat.encode_conversation(REASONED)
    assert first.token_ids[: len(chat.prompt_ids(REASONED[:1]))] == chat.prompt_ids(REASONED[:1])
    assert "a greeting" not in chat.tokenizer.decode(second.token_ids)
    assert second.token_ids[: len(chat.prompt_ids(REASONED[:3]))] == chat.prompt_ids(REASONED[:3])


def test_a_system_turn_that_moves_makes_further_documents(chats: Chats) -> None:
    chat = chats("mistral-late-system")
    assert len(chat.encode_conversation(TURNS)) == 1
    documents = chat.encode_conversation([{"role": "system", "content": "be brief"}, *TURNS])
    assert written(chat, documents) == [[" hello there</s>"], [" no thanks</s>"]]


def test_a_refused_conversation_is_a_clear_error(chats: Chats) -> None:
    with pytest.raises(ValueError, match=r"refuses the conversation: .*must alternate"):
        chats("mistral").encode_conversation([{"role": "system", "content": "be brief"}, *TURNS])


def test_an_answer_that_no_rendering_shows_needs_its_tokens(chats: Chats) -> None:
    chat = chats("r1")
    with pytest.raises(ValueError, match=r"data\.regenerate=true"):
        chat.encode_conversation(REASONED)
    tokens = chat.encode("because\n</think>\n\nhello</s>")
    messages = [TURNS[0], chat.parse_answer(tokens), TURNS[2], {**TURNS[3], "token_ids": tokens}]
    documents = chat.encode_conversation(messages)
    assert [len(document.token_ids) for document in documents] == [
        len(chat.prompt_ids(messages[:1])) + len(tokens),
        len(chat.prompt_ids(messages[:3])) + len(tokens),
    ]
    assert written(chat, documents) == [["because\n</think>\n\nhello</s>"]] * 2


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3/off", "mistral", "harmony", "tagged", "phi"])
@given(texts=st.lists(st.tuples(TEXT, PLAIN), min_size=1, max_size=3))
def test_every_answer_follows_the_servers_prompt(chats: Chats, family: str, texts: list[tuple[str, str]]) -> None:
    """User text of any kind, special tokens spelled out included: the reference is the template's own rendering."""
    chat = chats(family)
    messages = [
        message
        for asked, answered in texts
        for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})
    ]
    documents = chat.encode_conversation(messages)
    options = {"enable_thinking": False} if family.endswith("/off") else {}
    reference = [chat.encode(render(chat, messages[:index], **options)) for index in range(1, len(messages), 2)]
    assert prompts(documents) == reference
    shown = [_as_shown(family, answered) for _, answered in texts]
    assert [text for document in written(chat, documents) for text in document] == shown


def _as_shown(family: str, text: str) -> str:
    """What each family makes of an answer's text, written down by hand."""
    return {
        "chatml": f"{text}<|im_end|>",
        "llama3": f"{text.strip()}<|eot_id|>",
        "qwen3/off": text.lstrip("\n") + "<|im_end|>",
        "mistral": f" {text}</s>",
        "harmony": f"<|channel|>final<|message|>{text}<|return|>",
        "tagged": f"{text}<|im_end|>",
        "phi": f"{text}<|end|>",
    }[family]


@given(texts=st.lists(PLAIN, min_size=2, max_size=4))
def test_unmasked_text_holds_no_answer(chats: Chats, texts: list[str]) -> None:
    chat = chats("chatml")
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": f"{'QW'[index % 2]}{text}"}
        for index, text in enumerate(texts[: len(texts) // 2 * 2])
    ]
    (document,) = chat.encode_conversation(messages)
    unmasked = [token for token, inside in zip(document.token_ids, document.answer_mask, strict=True) if not inside]
    assert "W" not in chat.tokenizer.decode(unmasked)


@given(answer=TEXT)
def test_special_tokens_spelled_in_an_answer_stay_in_it(chats: Chats, answer: str) -> None:
    """The end of the turn is where the template ends it, not where the text speaks of an end."""
    chat = chats("chatml")
    documents = chat.encode_conversation([TURNS[0], {"role": "assistant", "content": answer}])
    assert written(chat, documents) == [[f"{answer}<|im_end|>"]]


def test_tags_agree_with_the_mask_of_transformers(chats: Chats) -> None:
    chat = chats("tagged")
    encoded = chat.tokenizer.apply_chat_template(
        TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tagged = [token for token, inside in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if inside]
    (ours,) = written(chat, chat.encode_conversation(TURNS))
    assert chat.tokenizer.decode(tagged) == "".join(text.removesuffix("<|im_end|>") for text in ours)


def test_tags_without_a_boundary_count_only_after_the_servers_own_history(chats: Chats, tmp_path: Path) -> None:
    chat = chats("r1-tagged")
    (document,) = chat.encode_conversation(TURNS)
    assert chat.tokenizer.decode(document.token_ids[: spans(document)[0][0]]) == "<s><|user|>what is this<|assistant|>"
    for name, before in (("moves", "{{ messages | length }}"), ("asks", "{{ 'ask' if add_generation_prompt }}")):
        moving = templates.Family(before + templates.R1_TAGGED.template, ("</s>",))
        with pytest.raises(ValueError, match="answer's start cannot be found"):
            TargetChat(templates.write_chat(tmp_path / name, moving)).encode_conversation(TURNS)


def test_tags_that_mark_nothing_or_everything_are_refused(tmp_path: Path) -> None:
    untagged = templates.TAGGED.template.replace(
        "{% generation %}{{ message.content }}", "{{ message.content }}{% generation %}"
    )
    for name, template, message in (
        ("nothing", untagged, "all zeros"),
        (
            "everything",
            "{% generation %}{% for message in messages %}{{ message.content }}{% endfor %}{% endgeneration %}",
            "mark everything",
        ),
    ):
        chat = TargetChat(templates.write_chat(tmp_path / name, templates.Family(template, ("</s>",))))
        with pytest.raises(ValueError, match=message):
            chat.encode_conversation(TURNS)


def test_a_template_that_closes_a_turn_only_before_the_next_still_ends_answers(tmp_path: Path) -> None:
    closed_late = templates.CHATML.template.replace(
        "<|im_end|>\n{% endfor %}",
        "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}",
    )
    chat = TargetChat(templates.write_chat(tmp_path, templates.Family(closed_late, ("<|im_end|>",))))
    assert written(chat, chat.encode_conversation(TURNS)) == [["hello there<|im_end|>", "no thanks<|im_end|>"]]


@pytest.mark.parametrize("family", ["qwen3", "thinking-only", "llama3", "harmony"])
def test_a_cut_answer_ends_where_its_text_does(chats: Chats, family: str) -> None:
    chat = chats(family)
    ((*_, text),) = written(chat, chat.encode_conversation(TURNS[:2], truncated=True))
    assert text.endswith("hello there")
    if family != "llama3":
        cut = [TURNS[0], {"role": "assistant", "content": "", "reasoning_content": "a greeting"}]
        ((*_, text),) = written(chat, chat.encode_conversation(cut, truncated=True))
        assert text.endswith("a greeting")
