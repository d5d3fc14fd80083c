"""Prompts that the target writes itself: what is taken, what is refused and why, and that a kill loses nothing."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import Answer, GenerationRequest, answer_file, append_answer, read_finished
from eyas.train.data.conversations import iterate_conversations
from eyas.train.data.synthesise import MIN_PER_OPENING, OUTPUT_NAME, synthesise
from eyas.train.data.user_turns import UserTurns, UserTurnSettings, self_prompt_seeds, user_turn_end
from tests import tiny

END = "<|im_end|>"
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron")
INST_TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system turns') }}{% elif message.role == 'user' %}"
    "[INST]{{ message.content }}<|im_start|>{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> TargetChat:
    return TargetChat(tiny_target)


class Backend:
    """Answers by a function of the request, kept in files; dies after a number of answers when told to."""

    def __init__(self, chat: TargetChat, work_dir: Path, reply: Callable[[GenerationRequest], str]) -> None:
        self.chat, self.work_dir, self.reply = chat, work_dir, reply
        self.die_after: int | None = None
        self.asked: list[GenerationRequest] = []

    def __call__(self, requests: list[GenerationRequest], name: str) -> dict[str, Answer]:
        path = answer_file(self.work_dir, name)
        finished = read_finished(path)
        with path.open("a") as stream:
            for request in requests:
                if request.id in finished:
                    continue
                if len(self.asked) == self.die_after:
                    raise KeyboardInterrupt
                self.asked.append(request)
                text = self.reply(request)
                reason = "stop" if text.endswith(END) else "length"
                append_answer(stream, {"id": request.id, "token_ids": self.chat.encode(text), "finish_reason": reason})
        return read_finished(path)


def question(request: GenerationRequest) -> str:
    """A question of its own for every request."""
    generator = random.Random(request.seed)
    return f"{' '.join(generator.sample(WORDS, 3))} {generator.randrange(10_000)}?{END}"


def run(tmp_path: Path, chat: TargetChat, reply: Callable[[GenerationRequest], str], **more: Any) -> dict[str, Any]:
    backend = Backend(chat, tmp_path, reply)
    return synthesise(tmp_path, chat=chat, generate=backend, **{"settings": UserTurnSettings(), "count": 20, **more})


def test_turns_are_sampled_from_the_bare_user_prefix(tmp_path: Path, chat: TargetChat) -> None:
    backend = Backend(chat, tmp_path, question)
    settings = UserTurnSettings(temperature=0.8, min_p=0.1, max_tokens=70)
    counts = synthesise(tmp_path, chat=chat, generate=backend, count=20, settings=settings)
    rows = list(iterate_conversations(tmp_path / OUTPUT_NAME, on_bad_line="stop"))
    assert counts == {"prompts_sampled": 20, "prompts": len(rows), "dropped": {}}
    assert len(rows) == 20
    assert all([message["role"] for message in row.messages] == ["user"] and row.source == "self" for row in rows)
    assert len({row.id for row in rows}) == 20
    assert '"split"' not in (tmp_path / OUTPUT_NAME).read_text(), "collect decides it, by data.heldout_share"
    for request in backend.asked:
        assert request.token_ids == chat.encode("<|im_start|>user\n")
        assert (request.temperature, request.min_p, request.max_tokens) == (0.8, 0.1, 70)
        assert set(chat.stop_token_ids) <= set(request.stop_token_ids)
    assert len({request.seed for request in backend.asked}) == 20, "without seeds of their own all would be the same"
    assert all(END not in row.messages[0]["content"] for row in rows)


def test_topics_and_openers_spread_the_prompts_and_the_topic_is_not_kept(tmp_path: Path, chat: TargetChat) -> None:
    backend = Backend(chat, tmp_path, question)
    topics, openers = ["bees", "rust", "maps"], ["How", "Why does"]
    synthesise(
        tmp_path,
        chat=chat,
        generate=backend,
        count=9,
        settings=UserTurnSettings(),
        topics=topics,
        openers=openers,
    )
    prompts = [chat.tokenizer.decode(request.token_ids) for request in backend.asked]
    assert [sum(topic in prompt for prompt in prompts) for topic in topics] == [3, 3, 3]
    assert all(prompt.endswith(("user\nHow", "user\nWhy does")) for prompt in prompts)
    rows = list(iterate_conversations(tmp_path / OUTPUT_NAME, on_bad_line="stop"))
    assert all(row.messages[0]["content"].startswith(("How", "Why does")) for row in rows)
    assert all(len(row.messages) == 1 for row in rows)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a perfectly good question about bees?" + END, None),
        ("Wie viele Bienen leben in einem Stock? Ich weiß es nicht." + END, None),
        ("a question that was cut off", "unfinished"),
        ("short" + END, "short"),
        ("word " * 200 + END, "loop"),
        ("".join(chr(97 + i % 26) + str(i) for i in range(400)) + END, "long"),
        ("please say <|im_start|>assistant\nhello to me" + END, "template"),
        ("what is this?\nAssistant: it is nothing at all" + END, "template"),
        ("what is this?\nassistant\nit is nothing at all" + END, "template"),
        ("[INST] what is this thing" + END, "template"),
        ("an assistant that helps: how do I build one?" + END, None),
        ("1234567890 + 9876543210 = ?" + END, "few_letters"),
    ],
)
def test_what_is_taken_and_what_is_not(chat: TargetChat, text: str, reason: str | None) -> None:
    user_turns = UserTurns(chat, settings=UserTurnSettings())
    finish = "stop" if text.endswith(END) else "length"
    found, refusal = user_turns.read({"id": "a", "token_ids": chat.encode(text), "finish_reason": finish})
    assert refusal == reason
    if reason is None:
        assert found == text.removesuffix(END)


def test_the_language_is_looked_at_only_when_asked_for(chat: TargetChat) -> None:
    pytest.importorskip("py3langid")
    german = "Wie viele Bienen leben in einem Bienenstock, und wovon ernähren sie sich im Winter?"
    english = "How many bees live in a hive, and what do they live on during the winter?"
    only_english = UserTurns(chat, settings=UserTurnSettings(languages=("en",)))
    assert only_english.refusal(german) == "language"
    assert only_english.refusal(english) is None
    assert UserTurns(chat, settings=UserTurnSettings(languages=("en", "de"))).refusal(german) is None
    with pytest.raises(ValueError, match=r"data\.self_prompts\.languages.*klingon"):
        UserTurns(chat, settings=UserTurnSettings(languages=("klingon",)))


def test_repeated_prompts_and_common_openings_are_dropped(tmp_path: Path, chat: TargetChat) -> None:
    def reply(request: GenerationRequest) -> str:
        number = int(request.id.removeprefix("self-"))
        if number % 2:
            return f"what is the best {WORDS[number % 8]} number {number}?{END}"
        return ("Tell me about  the Amber road" if number % 4 else "tell me about the amber road") + END

    counts = run(tmp_path, chat, reply, count=60)
    assert counts["dropped"] == {"repeated": 29, "common_opening": 30 - MIN_PER_OPENING}
    assert counts["prompts"] == 1 + MIN_PER_OPENING


def test_nothing_usable_is_an_error(tmp_path: Path, chat: TargetChat) -> None:
    with pytest.raises(ValueError, match=r"none of 20 .*'short': 20.*data\.sources"):
        run(tmp_path, chat, lambda _request: "no" + END)


def test_a_template_that_ends_user_turns_in_its_own_way(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path, chat_template=INST_TEMPLATE)
    chat = TargetChat(tmp_path)
    assert user_turn_end(chat) == chat.encode("<|im_start|>")
    user_turns = UserTurns(chat, settings=UserTurnSettings())
    ids = chat.encode("what are bees made of?<|im_start|>")
    assert user_turns.read({"id": "a", "token_ids": ids, "finish_reason": "stop"}) == ("what are bees made of?", None)
    with pytest.raises(ValueError, match="no system turns"):
        run(tmp_path, chat, question, topics=["bees"])


@pytest.mark.parametrize("deaths", [0, 1, 7, 19])
@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_kill_loses_and_doubles_nothing(tmp_path: Path, chat: TargetChat, deaths: int, cut: int) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    counts = run(tmp_path / "calm", chat, question)
    backend = Backend(chat, tmp_path / "killed", question)
    backend.die_after = deaths
    arguments: dict[str, Any] = {"chat": chat, "count": 20, "settings": UserTurnSettings()}
    with pytest.raises(KeyboardInterrupt):
        synthesise(tmp_path / "killed", generate=backend, **arguments)
    answers = tmp_path / "killed" / "prompts-00000.jsonl"
    os.truncate(answers, max(0, answers.stat().st_size - cut))
    again = Backend(chat, tmp_path / "killed", question)
    assert synthesise(tmp_path / "killed", generate=again, **arguments) == counts
    assert len(again.asked) == 20 - max(0, deaths - (cut > 0))
    assert (tmp_path / "killed" / OUTPUT_NAME).read_bytes() == (tmp_path / "calm" / OUTPUT_NAME).read_bytes()


def test_seeds_go_through_topics_and_openers_evenly() -> None:
    topics = [f"topic {i}" for i in range(10)]
    openers = ["How", "Why", "What"]
    seeds = list(self_prompt_seeds(30, topics=topics, openers=openers, seed=0))
    assert len(seeds) == 30
    assert all(sum(f"{topic}." in (seed.system or "") for seed in seeds) == 3 for topic in topics)
    assert min(sum(seed.opener == opener for seed in seeds) for opener in openers) >= 9
    assert seeds == list(self_prompt_seeds(30, topics=topics, openers=openers, seed=0))
    assert seeds != list(self_prompt_seeds(30, topics=topics, openers=openers, seed=1))
    bare = list(self_prompt_seeds(5, topics=[], openers=[], seed=0))
    assert [(seed.system, seed.opener) for seed in bare] == [(None, "")] * 5
    assert {seed.opener for seed in self_prompt_seeds(6, topics=[], openers=openers, seed=0)} == set(openers)
    assert json.dumps([vars(seed) for seed in self_prompt_seeds(3, topics=topics, openers=[], seed=0)])
