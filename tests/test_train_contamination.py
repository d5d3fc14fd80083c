"""The prompt guard against a brute force over words, and the normal form of texts."""

from __future__ import annotations

import functools
import random
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.train.data.contamination import PromptGuard, words
from eyas.train.data.conversations import iterate_conversations

LONG = "Write a function that takes a list of numbers and returns the sum of all those that are even."
SHIPPED = Path(__file__).parent.parent / "recipes" / "data" / "smollm2-135m-chat.jsonl.gz"


@functools.cache
def slow_words(text: str) -> list[str]:
    """The normal form of text in a script that writes spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"[\W_]", " ", text).split()


def slow_overlap(prompts: list[str], text: str, *, ngram: int | None) -> str | None:
    own = slow_words(text)
    for prompt in prompts:
        if own and "".join(own) == "".join(slow_words(prompt)):
            return "exact"
    if ngram is None:
        return None
    for prompt in prompts:
        other = slow_words(prompt)
        for start in range(len(own) - ngram + 1):
            for place in range(len(other) - ngram + 1):
                if own[start : start + ngram] == other[place : place + ngram]:
                    return "ngram"
    return None


few_words = st.lists(st.sampled_from(["a", "b", "Ab", "1", "--", "é", "\uff26"]), max_size=12).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(few_words, max_size=4), few_words, st.sampled_from([None, 1, 2, 3, 5]))
def test_the_guard_finds_what_brute_force_finds(prompts: list[str], text: str, ngram: int | None) -> None:
    assert PromptGuard(prompts, ngram=ngram).overlap(text) == slow_overlap(prompts, text, ngram=ngram)


def test_the_guard_on_real_prompts_is_brute_force() -> None:
    """13-grams of real conversations, with passages of the guarded ones pasted into some of the others."""
    texts = []
    for row in iterate_conversations(SHIPPED, on_bad_line="stop"):
        texts += [message["content"] for message in row.messages]
        if len(texts) > 240:
            break
    guarded, others = texts[:20], texts[20:]
    generator = random.Random(0)
    for index in range(0, len(others), 5):
        passage = generator.choice(guarded).split()
        start = generator.randrange(max(1, len(passage) - 20))
        others[index] += " " + " ".join(passage[start : start + generator.randint(9, 20)]).upper()
    guard = PromptGuard(guarded, ngram=13)
    found = [guard.overlap(text) for text in others]
    assert found == [slow_overlap(guarded, text, ngram=13) for text in others]
    assert 5 < sum(kind == "ngram" for kind in found) < 80


def test_exact_ignores_case_width_punctuation_and_spacing() -> None:
    guard = PromptGuard(["What is 2 + 2, my friend?", "Ein Straßenname"], ngram=13)
    for text in ("what is 2+2 my friend", "WHAT   IS 2 2, MY FRIEND!!", "\uff37hat is 2 + 2, my friend\uff1f"):
        assert guard.overlap(text) == "exact"
    assert guard.overlap("EIN STRASSENNAME") == "exact"
    assert guard.overlap("What is 2 + 3, my friend?") is None


def test_a_passage_of_thirteen_words_is_enough_and_twelve_are_not() -> None:
    guard = PromptGuard([LONG], ngram=13)
    given = LONG.split()
    assert guard.overlap("Please: " + " ".join(given[2:15]).upper() + ", thanks.") == "ngram"
    assert guard.overlap("Please: " + " ".join(given[2:14]) + " thanks and so on and on") is None
    assert PromptGuard([LONG], ngram=12).overlap("Please: " + " ".join(given[2:14])) == "ngram"
    assert PromptGuard([LONG], ngram=None).overlap(LONG + " Thanks.") is None
    assert PromptGuard([LONG], ngram=None).overlap(LONG) == "exact"


def test_short_prompts_match_only_as_a_whole() -> None:
    guard = PromptGuard(["Say hello"], ngram=13)
    assert guard.overlap("say hello!") == "exact"
    assert guard.overlap("say hello to everybody who is there and then come back home at once, please") is None


@pytest.mark.parametrize("text", ["", "   ", "?!", "😀", "\u0301"])
def test_texts_without_words_overlap_nothing(text: str) -> None:
    assert words(text) == []
    assert PromptGuard([text, LONG], ngram=13).overlap(text) is None
    assert PromptGuard([], ngram=13).overlap(text) is None
    assert PromptGuard([], ngram=13).overlap(LONG) is None


def test_scripts_without_spaces_have_a_word_for_each_character() -> None:
    chinese = "请写一个函数计算列表中所有偶数的和并返回"
    assert words("请写abc函") == ["请", "写", "abc", "函"]
    guard = PromptGuard([chinese], ngram=13)
    assert guard.overlap("你好。" + chinese[3:16] + "。") == "ngram"
    assert guard.overlap("你好。" + chinese[3:15] + "。") is None


def test_marks_do_not_cut_words() -> None:
    assert words("हिन्दी भाषा") == ["हनद", "भष"]
    assert words("Cafe\u0301 naïve") == ["café", "naïve"]
