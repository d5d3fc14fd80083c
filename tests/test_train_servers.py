"""Servers that misbehave: every request is answered once, nothing is asked twice that stands on disk, errors say what to do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import GenerationRequest, answer_file, read_finished
from eyas.train.data.server_client import Unavailable
from eyas.train.data.servers import Servers, ServerSettings, _Place, _Round

STOP = 2
MAX_MODEL_LEN = 256
Body = dict[str, Any]
Behaviour = Callable[["FakeServer", Body], Awaitable[tuple[int, Any] | None]]
"""What a server does with a completion request: status and JSON (or raw bytes) to send, or None to hang up."""


async def well(_server: FakeServer, body: Body) -> tuple[int, Any] | None:
    """An answer that depends on the prompt alone."""
    choice = {"token_ids": expected(body["prompt"]), "text": "x", "finish_reason": "stop"}
    return 200, {"choices": [choice]}


def expected(prompt: list[int]) -> list[int]:
    return [3 + sum(prompt) % 90, 3 + len(prompt) % 90, STOP]


@dataclass
class FakeServer:
    """An HTTP server on loopback, in a thread of its own, with one behaviour for completions."""

    chat: TargetChat
    behave: Behaviour = well
    models: list[Body] = field(default_factory=lambda: [{"id": "target", "max_model_len": 512}])
    wrong_tokens: bool = False
    has_tokenize: bool = True
    asked: list[Body] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            self.headers.append(head)
            reply = await self.route(head.split()[1], body)
            if reply is not None:
                status, content = reply
                payload = content if isinstance(content, bytes) else json.dumps(content).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
                    + payload
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client gave up, or the test is over
        finally:
            writer.close()

    async def route(self, path: str, body: Body) -> tuple[int, Any] | None:
        if path == "/v1/models":
            return 200, {"data": self.models}
        if path == "/tokenize":
            tokens = [0] if self.wrong_tokens else self.chat.encode(body["prompt"])
            return (200, {"tokens": tokens}) if self.has_tokenize else (404, {"detail": "Not Found"})
        self.asked.append(body)
        return await self.behave(self, body)


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", server.port)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await listener.serve_forever()

    def run() -> None:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main())
        loop.call_soon(lambda: None)
        server_tasks.append(task)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            rest = asyncio.all_tasks(loop)
            for left in rest:
                left.cancel()
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            loop.close()

    server_tasks: list[asyncio.Task[None]] = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server_tasks[0].cancel)
        thread.join(20)


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> TargetChat:
    return TargetChat(tiny_target)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def make_requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(id=f"r{i}", token_ids=[5 + i, 6], temperature=0.7, max_tokens=8, stop_token_ids=[STOP])
        for i in range(count)
    ]


def backend(chat: TargetChat, work_dir: Path, *urls: str, **changes: Any) -> Servers:
    quick = {"concurrency": 4, "timeout_s": 20.0, "dead_after_s": 20.0, "backoff_s": 0.001, "max_backoff_s": 0.01}
    settings = ServerSettings(urls=urls, **{**quick, **changes})
    return Servers(settings, chat=chat, max_model_len=MAX_MODEL_LEN, work_dir=work_dir)


def assert_answered_once(work_dir: Path, requests: list[GenerationRequest], name: str = "round") -> None:
    lines = [json.loads(line) for line in answer_file(work_dir, name).read_text().splitlines()]
    assert Counter(line["id"] for line in lines) == Counter(request.id for request in requests)
    wanted = {request.id: expected(request.token_ids) for request in requests}
    assert {line["id"]: line["token_ids"] for line in lines} == wanted


def misbehaving(seed: int) -> Behaviour:
    """Any failure that may pass, more often than not."""
    generator = random.Random(seed)

    async def behave(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        kind = generator.randrange(10)
        replies: dict[int, tuple[int, Any] | None] = {
            0: None,
            1: (500, {"error": "engine"}),
            2: (200, b"not json {"),
            3: (429, {"error": "slow down"}),
            4: (200, {"choices": []}),
            5: (200, {"choices": [{"token_ids": [1], "finish_reason": "abort"}]}),
        }
        return replies[kind] if kind in replies else await well(server, body)

    return behave


@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_answered_once_whatever_passes(chat: TargetChat, tmp_path: Path, seed: int) -> None:
    requests = make_requests(40)
    with (
        serving(FakeServer(chat, misbehaving(seed))) as first,
        serving(FakeServer(chat, misbehaving(seed + 100))) as second,
    ):
        answers = backend(chat, tmp_path, first.url, second.url + "/v1/", retries=1000)(requests, "round")
    assert_answered_once(tmp_path, requests)
    assert answers.keys() == {request.id for request in requests}
    assert len(first.asked) + len(second.asked) > 40, "nothing went wrong, so nothing was tested"


def test_what_is_sent_leaves_nothing_to_the_defaults_of_the_server(chat: TargetChat, tmp_path: Path) -> None:
    with serving(FakeServer(chat)) as server:
        backend(chat, tmp_path, server.url)(make_requests(1), "round")
    (body,) = server.asked
    assert body["prompt"] == [5, 6]
    assert body["model"] == "target"
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert neutral.items() <= body.items()
    assert body["return_token_ids"] is True
    assert body["stop_token_ids"] == [STOP]


def test_a_dead_server_costs_nothing_but_its_share(chat: TargetChat, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
        requests = make_requests(20)
        with serving(FakeServer(chat)) as server:
            backend(chat, tmp_path, dead, server.url)(requests, "round")
    assert_answered_once(tmp_path, requests)
    assert len(server.asked) == 20


def test_all_dead_names_the_urls_and_a_second_call_asks_only_for_the_rest(chat: TargetChat, tmp_path: Path) -> None:
    requests = make_requests(12)

    async def dies(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        return await well(server, body) if len(server.asked) <= 5 else None

    with serving(FakeServer(chat, dies)) as server:
        with pytest.raises(ValueError, match="no server has worked") as error:
            backend(chat, tmp_path, server.url, dead_after_s=0.05, retries=10_000)(requests, "round")
        assert server.url in str(error.value)
        done = read_finished(answer_file(tmp_path, "round"))
        assert len(done) == 5
        server.asked.clear()
        server.behave = well
        backend(chat, tmp_path, server.url)(requests, "round")
        assert len(server.asked) == 7
    assert_answered_once(tmp_path, requests)


def test_a_server_that_comes_back_is_used_again(chat: TargetChat, tmp_path: Path) -> None:
    """The other one holds its answers back until the first has recovered and answered."""
    recovered = threading.Event()

    async def recovers(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        if len(server.asked) < 6:
            return 503, {"error": "starting"}
        recovered.set()
        return await well(server, body)

    async def patient(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        await asyncio.to_thread(recovered.wait, 20)
        return await well(server, body)

    requests = make_requests(20)
    with serving(FakeServer(chat, recovers)) as first, serving(FakeServer(chat, patient)) as second:
        backend(chat, tmp_path, first.url, second.url, retries=100)(requests, "round")
    assert_answered_once(tmp_path, requests)


def test_a_server_that_never_works_does_not_end_a_run_that_goes_on(chat: TargetChat, tmp_path: Path) -> None:
    """However long it is dead, and however little patience there is with all being dead."""
    failed_often = threading.Event()

    async def fails(server: FakeServer, _body: Body) -> tuple[int, Any] | None:
        if len(server.asked) >= 10:
            failed_often.set()
        return 503, {"error": "out of memory"}

    async def patient(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        await asyncio.to_thread(failed_often.wait, 20)
        return await well(server, body)

    requests = make_requests(30)
    with serving(FakeServer(chat, fails)) as first, serving(FakeServer(chat, patient)) as second:
        backend(chat, tmp_path, first.url, second.url, retries=1000, dead_after_s=0.0)(requests, "round")
    assert_answered_once(tmp_path, requests)


def test_requests_that_fail_together_are_one_failure(tmp_path: Path) -> None:
    """Else a busy server that restarts would be left alone for the longest wait at once."""
    requests = make_requests(8)

    class Failing:
        url = "http://somewhere"

        async def complete(self, _request: GenerationRequest, *, timeout_s: float) -> None:
            await asyncio.sleep(timeout_s)
            raise Unavailable("gone", reached=False)

    async def fail_together() -> list[int]:
        place = _Place(Failing())  # type: ignore[arg-type]
        settings = ServerSettings(urls=[Failing.url], timeout_s=0.0)
        with (tmp_path / "answers.jsonl").open("w") as stream:
            work = _Round(requests, places=[place], settings=settings, stream=stream, generator=random.Random(0))
            failures = []
            for together in (8, 1, 3):
                taken = [await work.queue.get() for _ in range(together)]
                await asyncio.gather(*(work._answer(place, request) for request in taken))
                failures.append(place.failures)
            assert work.queue.qsize() == 8
            return failures

    assert asyncio.run(fail_together()) == [1, 2, 3]


def test_a_slow_server_gets_less(chat: TargetChat, tmp_path: Path) -> None:
    rest_is_done = threading.Event()

    async def slow(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        await asyncio.to_thread(rest_is_done.wait, 20)
        return await well(server, body)

    async def fast(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        if len(server.asked) == 26:
            rest_is_done.set()
        return await well(server, body)

    requests = make_requests(30)
    with serving(FakeServer(chat, slow)) as first, serving(FakeServer(chat, fast)) as second:
        backend(chat, tmp_path, first.url, second.url)(requests, "round")
    assert_answered_once(tmp_path, requests)
    assert len(first.asked) <= 4


def test_a_server_never_has_more_requests_than_its_places(chat: TargetChat, tmp_path: Path) -> None:
    running: list[int] = [0, 0]
    full = asyncio.Event()

    async def count(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        running[0] += 1
        running[1] = max(running)
        if running[0] == 4:
            full.set()
        await full.wait()
        running[0] -= 1
        return await well(server, body)

    requests = make_requests(40)
    with serving(FakeServer(chat, count)) as server:
        backend(chat, tmp_path, server.url)(requests, "round")
    assert running[1] == 4


def test_a_refusal_is_passed_on_and_not_repeated(chat: TargetChat, tmp_path: Path) -> None:
    async def refuses(_server: FakeServer, _body: Body) -> tuple[int, Any] | None:
        return 400, {"error": {"message": "min_p is unknown here"}}

    with serving(FakeServer(chat, refuses)) as server:
        with pytest.raises(ValueError, match="min_p is unknown here"):
            backend(chat, tmp_path, server.url, concurrency=1)(make_requests(5), "round")
        assert len(server.asked) == 1


def test_a_request_that_hangs_is_asked_again(chat: TargetChat, tmp_path: Path) -> None:
    async def hangs_once(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        if len(server.asked) == 1:
            await asyncio.Event().wait()
        return await well(server, body)

    requests = make_requests(6)
    with serving(FakeServer(chat, hangs_once)) as server:
        backend(chat, tmp_path, server.url, timeout_s=0.5)(requests, "round")
    assert_answered_once(tmp_path, requests)
    assert len(server.asked) >= 7


def test_a_request_that_always_fails_is_given_up_alone(chat: TargetChat, tmp_path: Path) -> None:
    async def poisoned(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        return (500, {"error": "assert"}) if body["prompt"][0] == 5 + 3 else await well(server, body)

    requests = make_requests(10)
    with serving(FakeServer(chat, poisoned)) as server:
        answers = backend(chat, tmp_path, server.url, retries=2)(requests, "round")
    assert answers["r3"]["finish_reason"] == "error"
    assert [answer["id"] for answer in answers.values() if answer["finish_reason"] != "stop"] == ["r3"]
    assert sum(body["prompt"][0] == 8 for body in server.asked) == 3


def test_text_of_a_server_without_tokens_is_split_by_the_target(chat: TargetChat, tmp_path: Path) -> None:
    async def text_only(_server: FakeServer, body: Body) -> tuple[int, Any] | None:
        reason = "length" if body["prompt"][0] == 5 else "stop"
        return 200, {"choices": [{"text": "so be it", "finish_reason": reason}]}

    with serving(FakeServer(chat, text_only, has_tokenize=False)) as server:
        answers = backend(chat, tmp_path, server.url)(make_requests(2), "round")
    assert answers["r0"]["token_ids"] == chat.encode("so be it")
    assert answers["r1"]["token_ids"] == chat.encode("so be it<|im_end|>")
    assert all(answer["retokenised"] for answer in answers.values())


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"models": [{"id": "a"}, {"id": "b"}]}, {}, "one of several models.*a, b.*servers.model"),
        ({}, {"model": "other"}, "'other', and serves target"),
        ({"models": [{"id": "t", "max_model_len": 100}]}, {}, "lower data.generation.max_model_len to 100"),
        ({"wrong_tokens": True}, {}, "serves another model"),
        ({"models": []}, {}, "serves none"),
    ],
)
def test_another_model_is_refused(
    chat: TargetChat, tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with serving(FakeServer(chat, **changes)) as server:
        with pytest.raises(ValueError, match=message):
            backend(chat, tmp_path, server.url, **settings)(make_requests(2), "round")
        assert server.asked == []


def test_the_api_key_comes_from_the_environment(
    chat: TargetChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUR_KEY", raising=False)
    with pytest.raises(ValueError, match="environment has no OUR_KEY"):
        backend(chat, tmp_path, "http://127.0.0.1:1", api_key_variable="OUR_KEY")
    monkeypatch.setenv("OUR_KEY", "abc")
    with serving(FakeServer(chat)) as server:
        backend(chat, tmp_path, server.url, api_key_variable="OUR_KEY")(make_requests(1), "round")
    assert all("authorization: bearer abc" in head.lower() for head in server.headers)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", ""])
def test_what_is_no_url_is_said_before_anything_starts(chat: TargetChat, tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="is no URL"):
        backend(chat, tmp_path, url)


def test_ctrl_c_ends_at_once_and_keeps_what_is_done(chat: TargetChat, tmp_path: Path) -> None:
    async def interrupts(server: FakeServer, body: Body) -> tuple[int, Any] | None:
        if len(server.asked) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        if len(server.asked) >= 6:
            await asyncio.Event().wait()  # these never get an answer
        return await well(server, body)

    requests = make_requests(20)
    with serving(FakeServer(chat, interrupts)) as server:
        with pytest.raises(KeyboardInterrupt):
            backend(chat, tmp_path, server.url, concurrency=1)(requests, "round")
        assert len(read_finished(answer_file(tmp_path, "round"))) == 5
        server.asked.clear()
        server.behave = well
        backend(chat, tmp_path, server.url)(requests, "round")
        assert len(server.asked) == 15
    assert_answered_once(tmp_path, requests)
