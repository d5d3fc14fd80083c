"""The target writes the answers: what is asked, what is kept, and that no kill loses or doubles anything."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.heads.chat import Message, TargetChat
from eyas.train.data.answers import (
    Answer,
    GenerationRequest,
    answer_file,
    append_answer,
    read_finished,
    stable_number,
)
from eyas.train.data.conversations import Conversation, iterate_conversations, write_conversations
from eyas.train.data.cut import Cut
from eyas.train.data.dialogues import Sampling, turns
from eyas.train.data.follow_ups import FollowUps
from eyas.train.data.generate import EngineSettings, OfflineEngine
from eyas.train.data.loops import repeated_ngram_share
from eyas.train.data.prepare import prepare
from eyas.train.data.regenerate import JOURNAL_NAME, OUTPUT_NAME, TokenLimit, regenerate
from eyas.train.data.user_turns import UserTurnSettings
from eyas.train.features.encoding import StoreForm
from eyas.train.features.states import generation_states_settings
from eyas.train.features.store import FeatureStore
from tests import tiny

END = "<|im_end|>"
LOOP = "again and again and again and again and again and again and again"
CALLS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Killed(Exception):
    """What a kill looks like to the code under test."""


class Backend:
    """Answers by a function of the prompt, and keeps them in files as the real backends do."""

    def __init__(self, chat: TargetChat, work_dir: Path, reply: Callable[[str], tuple[str, str]]) -> None:
        self.chat = chat
        self.work_dir = work_dir
        self.reply = reply
        self.die_after: int | None = None
        self.asked: list[GenerationRequest] = []

    def __call__(self, requests: list[GenerationRequest], name: str) -> dict[str, Answer]:
        path = answer_file(self.work_dir, name)
        finished = read_finished(path)
        with path.open("a") as stream:
            for request in requests:
                if request.id in finished:
                    continue
                if self.die_after is not None and len(self.asked) >= self.die_after:
                    raise Killed
                self.asked.append(request)
                append_answer(stream, self.answer(request))
        return read_finished(path)

    def answer(self, request: GenerationRequest) -> Answer:
        text, reason = self.reply(self.chat.tokenizer.decode(request.token_ids))
        return {"id": request.id, "token_ids": self.chat.encode(text), "finish_reason": reason}

    def by_id(self) -> dict[str, GenerationRequest]:
        return {request.id: request for request in self.asked}


def scripted(prompt: str) -> tuple[str, str]:
    """Loops, cuts and silence where the last user turn asks for them."""
    last = prompt.rsplit("user\n", 1)[1]
    if "loop here" in last:
        return LOOP + END, "stop"
    if "cut here" in last:
        return "an answer that is cut", "length"
    if "silence" in last:
        return END, "stop"
    if "error" in last:
        return "", "error"
    return f"answer to {stable_number(prompt) % 1000}{END}", "stop"


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"temperatures": [0.7], "min_p": 0.02, "max_tokens": 32, "max_model_len": 256, **changes})


def conversation(name: str, *texts: str, split: Any = "train", system: str | None = None, **more: Any) -> Conversation:
    """User turns, each with an answer that somebody else wrote."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "somebody else's words"}]
    return Conversation(
        **{"id": name, "split": split, "source": "test", "truncated": True, "messages": messages, **more}
    )


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> TargetChat:
    return TargetChat(tiny_target)


def run(
    tmp_path: Path,
    chat: TargetChat,
    rows: Sequence[Conversation],
    *,
    reply: Callable[[str], tuple[str, str]] = scripted,
    sampled: Sampling | None = None,
    **more: Any,
) -> tuple[list[Conversation], dict[str, Any], Backend]:
    source, out_dir = tmp_path / "source.jsonl", tmp_path / "out"
    out_dir.mkdir(exist_ok=True)
    write_conversations(source, rows)
    backend = Backend(chat, out_dir, reply)
    counts = regenerate(
        out_dir, conversations=source, chat=chat, generate=backend, sampling=sampled or sampling(), **more
    )
    return list(iterate_conversations(out_dir / OUTPUT_NAME, on_bad_line="stop")), counts, backend


def test_every_answer_is_asked_after_the_ones_before_it(tmp_path: Path, chat: TargetChat) -> None:
    rows, counts, backend = run(
        tmp_path, chat, [conversation("a", "first", "second", system="be kind"), conversation("b", "third")]
    )
    first = rows[0]
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "somebody" not in json.dumps([row.messages for row in rows])
    asked = backend.by_id()
    assert asked["a-0"].token_ids == chat.prompt_ids(first.messages[:2])
    assert asked["a-1"].token_ids == chat.prompt_ids(first.messages[:4])
    assert [asked[name].last for name in ("a-0", "a-1", "b-0")] == [False, True, True]
    assert asked["a-0"].seed != asked["a-1"].seed
    assert [row.truncated for row in rows] == [False, False]
    assert counts["conversations"] == 2
    assert counts["answers"] == 3
    assert counts["answer_tokens"] == sum(
        len(message["token_ids"]) for row in rows for message in row.messages if message["role"] == "assistant"
    )
    for row in rows:
        (document,) = chat.encode_conversation(row.messages)
        assert sum(document.answer_mask) == sum(len(message.get("token_ids", ())) for message in row.messages)
        assert document.token_ids[-1] in chat.stop_token_ids


def test_what_cannot_be_used_ends_the_conversation_and_is_counted(tmp_path: Path, chat: TargetChat) -> None:
    source = [
        conversation("later", "good", "loop here"),
        conversation("at-once", "loop here", "never asked"),
        conversation("cut", "cut here please", "never asked"),
        conversation("silent", "silence", "never asked"),
        conversation("failed", "error", "never asked"),
        conversation("long", "x" * 300),
        conversation("long-later", "fine", "x" * 300),
    ]
    rows, counts, backend = run(tmp_path, chat, source)
    assert {row.id: (len(row.messages), row.truncated) for row in rows} == {
        "later": (2, False),
        "cut": (2, True),
        "long-later": (2, False),
    }
    assert counts["dropped"] == {"loop": 2, "empty": 1, "failed": 1, "too_long": 2}
    assert counts["finish_reasons"] == {"stop": 5, "length": 1, "error": 1}
    assert counts["conversations_truncated"] == 1
    assert counts["conversations_without_answer"] == 4
    assert counts["conversations_read"] == len(source)
    assert "never asked" not in "".join(chat.tokenizer.decode(request.token_ids) for request in backend.asked)


def test_cut_answers_are_dropped_when_the_recipe_says_so(tmp_path: Path, chat: TargetChat) -> None:
    source = [conversation("a", "good", "cut here"), conversation("b", "cut here")]
    rows, counts, _ = run(tmp_path, chat, source, sampled=sampling(truncated="drop"))
    assert [(row.id, len(row.messages), row.truncated) for row in rows] == [("a", 2, False)]
    assert counts["dropped"] == {"truncated": 2}


def test_an_answer_gets_no_more_room_than_the_engine_has(tmp_path: Path, chat: TargetChat) -> None:
    _, _, backend = run(tmp_path, chat, [conversation("a", "x" * 200)], sampled=sampling(max_tokens=200))
    (request,) = backend.asked
    assert len(request.token_ids) + request.max_tokens == 256


def test_heldout_conversations_are_one_greedy_turn(tmp_path: Path, chat: TargetChat) -> None:
    source = [conversation(f"c{i}", "question", "and then", split="heldout" if i % 2 else "train") for i in range(6)]
    rows, counts, backend = run(tmp_path, chat, source)
    asked = backend.by_id()
    heldout = [row for row in rows if row.split == "heldout"]
    assert len(heldout) == counts["conversations_heldout"] == 3
    assert all(len(row.messages) == 2 and asked[f"{row.id}-0"].temperature == 0.0 for row in heldout)
    assert all(asked[f"{row.id}-0"].last for row in heldout)
    assert sum(request.temperature == 0.0 for request in backend.asked) == 3
    assert counts["temperatures"] == {"0": 3, "0.7": 3}


def test_temperatures_are_mixed_by_conversation_and_stay_on_a_second_run(tmp_path: Path, chat: TargetChat) -> None:
    source = [conversation(f"c{i}", "question", "and then") for i in range(60)]
    mixed = sampling(temperatures=[0.0, 0.5, 1.0], top_p=0.9, top_k=20)
    _, counts, backend = run(tmp_path, chat, source, sampled=mixed)
    chosen = {request.id: request.temperature for request in backend.asked}
    assert all(chosen[f"c{i}-0"] == chosen[f"c{i}-1"] for i in range(60))
    assert sorted(counts["temperatures"]) == ["0", "0.5", "1"]
    assert min(counts["temperatures"].values()) > 10
    written = [json.loads(line) for line in (tmp_path / "out" / OUTPUT_NAME).read_text().splitlines()]
    assert all(row["temperature"] == chosen[f"{row['id']}-0"] for row in written)
    assert {(request.top_p, request.top_k, request.min_p) for request in backend.asked} == {(0.9, 20, 0.02)}
    (tmp_path / "again").mkdir()
    _, again, _ = run(tmp_path / "again", chat, source[::-1], sampled=mixed)
    assert again["temperatures"] == counts["temperatures"]


def limited(tokens: int, *, max_length: int = 256, seed: int = 0) -> TokenLimit:
    return TokenLimit(tokens=tokens, cut=Cut(max_length=max_length), seed=seed)


def test_no_more_is_answered_than_training_takes(tmp_path: Path, chat: TargetChat, tiny_target: Path) -> None:
    """The prepare stage, which counts for itself, finds the limit filled and next to nothing that it must leave out."""
    source = [conversation(f"c{i}", f"question {i}", "and then") for i in range(200)]
    source += [conversation(f"h{i}", f"held out {i}", split="heldout") for i in range(5)]
    mean = len(chat.encode_conversation(run(tmp_path, chat, source[:1])[0][0].messages)[0].token_ids)
    (tmp_path / "limited").mkdir()
    rows, counts, backend = run(tmp_path / "limited", chat, source, limit=limited(20 * mean), chunk_conversations=4)
    assert [row.id for row in rows[:5]] != [f"h{i}" for i in range(5)], "shuffled"
    assert {row.id for row in rows[:5]} == {f"h{i}" for i in range(5)}
    asked = {request.id.partition("-")[0] for request in backend.asked}
    assert asked == {row.id for row in rows}, "what is asked is kept"
    trained = asked - {f"h{i}" for i in range(5)}
    assert 20 - 3 <= len(trained) <= 20 + 4 + 3
    assert max(int(name[1:]) for name in trained) > 100, "a sample of the whole file"
    assert counts["not_needed"] == 200 - len(trained)
    made = tmp_path / "limited" / "out" / OUTPUT_NAME
    found = prepare(
        tmp_path / "tokens",
        target_dir=tiny_target,
        conversations=made,
        max_length=256,
        max_train_tokens=None,
        on_bad_line="stop",
        trust_remote_code=False,
        seed=0,
    )
    assert found["train_tokens"] == counts["train_tokens"] >= 20 * mean


def test_a_limit_counts_documents_as_they_will_be_cut(tmp_path: Path, chat: TargetChat) -> None:
    source = [conversation("h", "held out", split="heldout")]
    source += [conversation(f"c{i}", f"question {i}", "and then") for i in range(40)]
    _, counts, _ = run(tmp_path, chat, source, limit=limited(60 * 20, max_length=60), chunk_conversations=1)
    assert (counts["train_tokens"], counts["not_needed"]) == (60 * 20, 20)
    (tmp_path / "other").mkdir()
    other, *_ = run(tmp_path / "other", chat, source, limit=limited(60 * 20, max_length=60, seed=1))
    assert len(other) == 41, "one chunk of the least size is more than there is"
    assert [row.id for row in other] != [row.id for row in source]


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path, chat: TargetChat) -> None:
    with pytest.raises(ValueError, match=r"nothing is left .*'loop': 2"):
        run(tmp_path, chat, [conversation("a", "loop here"), conversation("b", "loop here")])


def test_two_conversations_of_one_id_are_refused(tmp_path: Path, chat: TargetChat) -> None:
    with pytest.raises(ValueError, match="two conversations have the id 'a'"):
        run(tmp_path, chat, [conversation("a", "one"), conversation("a", "two")])


def test_bad_lines_are_counted(tmp_path: Path, chat: TargetChat) -> None:
    source, out_dir = tmp_path / "source.jsonl", tmp_path / "out"
    out_dir.mkdir()
    write_conversations(source, [conversation("a", "one"), conversation("b", "two")])
    source.write_bytes(source.read_bytes() + b"{\n")
    backend = Backend(chat, out_dir, scripted)
    arguments: dict[str, Any] = {"conversations": source, "chat": chat, "generate": backend, "sampling": sampling()}
    counts = regenerate(out_dir, **arguments, on_bad_line="skip", chunk_conversations=1)
    assert sum(counts["lines_skipped"].values()) == 1
    with pytest.raises(ValueError, match=r"data\.on_bad_line"):
        regenerate(out_dir, **arguments, on_bad_line="stop", chunk_conversations=1)


def test_turns_of_a_conversation() -> None:
    def message(role: str) -> Message:
        return {"role": role, "content": role}

    def shape(*roles: str) -> list[tuple[list[str], bool]]:
        found = turns([message(role) for role in roles])
        return [([part["role"] for part in turn.inputs], turn.original is not None) for turn in found]

    assert shape("user") == [(["user"], False)]
    assert shape("system", "user", "assistant") == [(["system", "user"], True)]
    assert shape("user", "assistant", "tool", "tool", "assistant", "user") == [
        (["user"], True),
        (["tool", "tool"], True),
        (["user"], False),
    ]
    assert shape("user", "assistant", "system") == [(["user"], True)]


@pytest.fixture(scope="module")
def calling_chat(tmp_path_factory: pytest.TempPathFactory) -> TargetChat:
    directory = tmp_path_factory.mktemp("calls")
    tiny.write_tokenizer(directory, chat_template=CALLS_TEMPLATE)
    return TargetChat(directory)


def test_a_conversation_goes_past_tool_results_only_after_the_same_call(
    tmp_path: Path, calling_chat: TargetChat
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]

    def with_call(name: str, text: str) -> Conversation:
        messages: list[Message] = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_call_id": "1"},
            {"role": "assistant", "content": "It rains."},
        ]
        return Conversation(name, "train", "test", False, messages, tools)

    def reply(prompt: str) -> tuple[str, str]:
        if "tool\nrain" in prompt:
            return f"Take an umbrella.{END}", "stop"
        city = "Oslo" if "in Oslo" in prompt else "Rome"
        return f'<call>weather {{"city": "{city}"}}</call>{END}', "stop"

    source = [with_call("same", "weather in Oslo"), with_call("other", "weather in Rome")]
    rows, counts, backend = run(tmp_path, calling_chat, source, reply=reply)
    same, other = rows
    assert [message["role"] for message in same.messages] == ["user", "assistant", "tool", "assistant"]
    assert same.messages[1]["tool_calls"] == [call]
    assert same.messages[3]["content"] == "Take an umbrella."
    assert [message["role"] for message in other.messages] == ["user", "assistant"]
    assert counts["dropped"] == {"tool_call_differs": 1}
    assert same.tools == tools
    (document,) = calling_chat.encode_conversation(same.messages, tools=tools)
    assert document.token_ids[: len(backend.by_id()["same-1"].token_ids)] == backend.by_id()["same-1"].token_ids


def test_the_target_goes_on_after_its_own_prompts(tmp_path: Path, chat: TargetChat) -> None:
    evaluation = tmp_path / "evaluation.jsonl"
    evaluation.write_text(json.dumps({"text": "Is this in the exam?", "from": "exam"}) + "\n")

    def reply(prompt: str) -> tuple[str, str]:
        if prompt.endswith("assistant\n"):
            return scripted(prompt)
        first = prompt.split("user\n")[1]
        if "exam" in first:
            return f"Is this in the exam?{END}", "stop"
        if "short" in first:
            return f"ok{END}", "stop"
        return f"And what about number {prompt.count('assistant')}?{END}", "stop"

    source = [
        conversation("self-1", "tell me something", source="self"),
        conversation("self-2", "ask me an exam question", source="self"),
        conversation("self-3", "be short with me", source="self"),
        conversation("self-4", "something held out", source="self", split="heldout"),
        conversation("self-5", "x" * 160, source="self"),
        conversation("other", "tell me something else"),
    ]
    follow_ups = FollowUps(count=2, user_turns=UserTurnSettings(), evaluation_prompts=evaluation)
    rows, counts, backend = run(tmp_path, chat, source, reply=reply, follow_ups=follow_ups)
    assert {row.id: len(row.messages) for row in rows} == {
        "self-1": 6,
        "self-2": 2,
        "self-3": 2,
        "self-4": 2,
        "self-5": 2,
        "other": 2,
    }
    assert rows[0].messages[4]["content"] == "And what about number 2?"
    assert counts["dropped"] == {"follow_up_evaluation_prompt": 1, "follow_up_short": 1, "follow_up_too_long": 1}
    asked = backend.by_id()
    assert [asked[f"self-1-{turn}"].last for turn in range(3)] == [False, False, True]
    assert asked["other-0"].last


def crash_and_resume(
    tmp_path: Path,
    chat: TargetChat,
    rows: Sequence[Conversation],
    *,
    kills: Sequence[tuple[int, int, int]],
    chunk: int,
    limit: TokenLimit | None = None,
) -> tuple[bytes, dict[str, Any], Backend]:
    """The output after the kills: each lets `deaths` answers through and then cuts a file short."""
    source, out_dir = tmp_path / "source.jsonl", tmp_path / "out"
    out_dir.mkdir(parents=True)
    write_conversations(source, rows)
    arguments: dict[str, Any] = {"conversations": source, "chat": chat, "sampling": sampling()}
    arguments |= {"chunk_conversations": chunk, "follow_ups": FollowUps(count=1), "limit": limit}
    for answers, which, cut in kills:
        backend = Backend(chat, out_dir, scripted)
        backend.die_after = answers
        with suppress(Killed):
            regenerate(out_dir, generate=backend, **arguments)
        files = sorted(path for path in out_dir.iterdir() if path.stat().st_size)
        if files:
            path = files[which % len(files)]
            os.truncate(path, max(0, path.stat().st_size - cut % (path.stat().st_size + 1)))
    backend = Backend(chat, out_dir, scripted)
    counts = regenerate(out_dir, generate=backend, **arguments)
    return (out_dir / OUTPUT_NAME).read_bytes(), counts, backend


@settings(max_examples=40)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["hello", "cut here", "loop here", "silence", "what now"]), min_size=1, max_size=3),
        min_size=1,
        max_size=7,
    ),
    kills=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 600)), min_size=1, max_size=4),
    chunk=st.integers(1, 4),
    tokens=st.none() | st.integers(1, 400),
)
def test_no_kill_loses_or_doubles_a_conversation(
    tmp_path_factory: pytest.TempPathFactory,
    chat: TargetChat,
    texts: list[list[str]],
    kills: list[tuple[int, int, int]],
    chunk: int,
    tokens: int | None,
) -> None:
    """Answers are stopped anywhere and any file loses any number of its last bytes; the end is as if nothing happened."""
    rows = [conversation("sure", "an easy question")]
    rows += [conversation(f"c{i}", *turns, source="self" if i % 2 else "test") for i, turns in enumerate(texts)]
    limit = None if tokens is None else limited(tokens)
    calm, killed = tmp_path_factory.mktemp("calm"), tmp_path_factory.mktemp("killed")
    wanted, counts, _ = crash_and_resume(calm, chat, rows, kills=[], chunk=chunk, limit=limit)
    found, again, _ = crash_and_resume(killed, chat, rows, kills=kills, chunk=chunk, limit=limit)
    assert found == wanted
    assert again == counts


def test_a_resumed_run_asks_only_for_what_is_missing(tmp_path: Path, chat: TargetChat) -> None:
    rows = [conversation(f"c{i}", "hello", "and then") for i in range(6)]
    *_, backend = crash_and_resume(tmp_path, chat, rows, kills=[(7, 0, 0)], chunk=2)
    assert len(backend.asked) == 12 - 7
    assert Counter(path.name for path in (tmp_path / "out").iterdir()) == {OUTPUT_NAME: 1, JOURNAL_NAME: 1}


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_answer_files_survive_any_cut(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "round.jsonl"
    with path.open("w") as stream:
        for i in range(3):
            append_answer(stream, {"id": f"r{i}", "token_ids": [i], "finish_reason": "stop"})
    os.truncate(path, path.stat().st_size - cut)
    kept = 3 if cut == 0 else 2
    assert list(read_finished(path)) == [f"r{i}" for i in range(kept)]
    with path.open("a") as stream:
        append_answer(stream, {"id": "next", "token_ids": [9], "finish_reason": "stop"})
    assert list(read_finished(path)) == [*(f"r{i}" for i in range(kept)), "next"]


def test_repeated_ngram_share() -> None:
    assert repeated_ngram_share(list(range(100))) == 0.0
    assert repeated_ngram_share([1, 2, 3]) == 0.0
    assert repeated_ngram_share([1, 2] * 20) == pytest.approx(1 - 2 / 33)


def engine_settings(target: Path, **changes: Any) -> EngineSettings:
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "batch_size": 4, "seed": 0, "threads": 1}
    return EngineSettings(**{"target_dir": target, "kv_cache_gib": 1, **fields, **changes})


def engine_requests(count: int, *, max_tokens: int = 6) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=f"r{i}",
            token_ids=[3 + i, 4, 5],
            temperature=float(i % 2),
            max_tokens=max_tokens,
            top_p=0.9,
            top_k=50,
            seed=i,
        )
        for i in range(count)
    ]


@pytest.mark.engine
def test_the_worker_answers_round_after_round_and_survives_a_kill(tmp_path: Path, tiny_target: Path) -> None:
    requests = engine_requests(6)
    kept = {"id": "r2", "token_ids": [1], "finish_reason": "stop"}
    (tmp_path / "first.jsonl").write_text(json.dumps(kept) + '\n{"id": "r3", "tok')  # as a kill leaves it
    with OfflineEngine(engine_settings(tiny_target), work_dir=tmp_path) as engine:
        answers = engine(requests, "first")
        process = engine._worker
        assert process is not None
        second = engine(requests[:2], "second")
        assert engine._worker is process
        path = answer_file(tmp_path, "third")
        many = engine_requests(64, max_tokens=120)
        killer = threading.Thread(target=_kill_after_first_answer, args=(path, process.pid))
        killer.start()
        with pytest.raises(ValueError, match=r"exit code -9.*engine\.log"):
            engine(many, "third")
        killer.join()
        before = read_finished(path)
        assert 0 < len(before) < 64
        third = engine(many, "third")
    assert process.poll() is not None
    assert answers.keys() == {request.id for request in requests}
    assert answers["r2"] == kept
    assert all(1 <= len(answers[f"r{i}"]["token_ids"]) <= 6 for i in (0, 1, 3, 4, 5))
    assert {name: answers[name] for name in second} == second, "a seed of its own makes an answer repeatable"
    assert third.keys() == {request.id for request in many}
    assert before.items() <= third.items()
    assert len(path.read_text().splitlines()) == 64


def _kill_after_first_answer(path: Path, pid: int) -> None:
    while not (path.is_file() and b"\n" in path.read_bytes()):
        os.sched_yield()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.engine
def test_the_worker_keeps_the_states_of_last_requests_only(tmp_path: Path, tiny_target: Path) -> None:
    form = StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=False)
    states = generation_states_settings(
        tmp_path / "states", target_dir=tiny_target, capture_layers=tiny.CAPTURE_LAYERS, dtype="float32", form=form
    )
    requests = [
        GenerationRequest(
            id=f"r{i}", token_ids=[3 + i, 4, 5], temperature=1.0, max_tokens=6, min_p=0.01, last=i % 2 == 0
        )
        for i in range(6)
    ]
    with OfflineEngine(engine_settings(tiny_target, states=states), work_dir=tmp_path) as engine:
        answers = {**engine(requests[:4], "first"), **engine(requests[4:], "second")}
    store = FeatureStore(tmp_path / "states", split="generated")
    kept = sorted(store.token_ids(index).tolist() for index in range(len(store)) if not store.missing_among([index]))
    whole = [request.token_ids + answers[request.id]["token_ids"] for request in requests if request.last]
    # The last token of an answer has no state, since it was never an input.
    assert [tokens[:-1] for tokens in sorted(whole)] == [
        tokens[: len(one) - 1] for tokens, one in zip(kept, sorted(whole), strict=True)
    ]
