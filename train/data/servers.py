"""The backend that answers over HTTP: any number of OpenAI-compatible servers that pull from one queue.

A server takes the next request whenever one of its places is free, so a slow one gets less. A server that fails is taken
out, and one request at a time is tried on it after a wait that doubles each time, until one succeeds; its requests go
back into the queue. A request that fails on servers which are otherwise well is given up after some attempts and counted.
Refusals (4xx) end the round, since the next request would be refused as well.

Every answer is appended as it arrives: Ctrl-C loses only what is on its way.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx2

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import Answer, GenerationRequest, answer_file, append_answer, read_finished
from eyas.train.data.server_client import ServerClient, Unavailable, target_facts

PROGRESS_EVERY = 50
CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Which servers, and how patient to be with them.

    Attributes:
        urls: base URLs, with or without /v1.
        model: name under which the servers know the target; None = the only one they list.
        concurrency: requests in flight per server.
        timeout_s: seconds after which a request counts as failed.
        retries: further attempts of a request that fails on servers which are otherwise well.
        dead_after_s: seconds without any working server after which to stop.
        backoff_s, max_backoff_s: first and longest wait before a failed server is tried again.
        api_key_variable: environment variable that holds the API key.
    """

    urls: Sequence[str]
    model: str | None = None
    concurrency: int = 32
    timeout_s: float = 600.0
    retries: int = 5
    dead_after_s: float = 300.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    api_key_variable: str | None = None


class Servers:
    """Answers from servers, kept in files of `work_dir`."""

    def __init__(
        self, settings: ServerSettings, *, chat: TargetChat, max_model_len: int, work_dir: Path, seed: int = 0
    ) -> None:
        """Nothing is asked yet.

        Raises:
            ValueError: something that is no URL, or an API key that is not in the environment.
        """
        for url in settings.urls:
            _check_url(url)
        self.settings = settings
        self.work_dir = work_dir
        self._facts = target_facts(chat, max_model_len=max_model_len)
        self._headers = _headers(settings.api_key_variable)
        self._random = random.Random(seed)

    def __call__(self, requests: list[GenerationRequest], name: str) -> dict[str, Answer]:
        """Answers of the round `name`, by request id; those of an earlier, killed call are reused.

        Raises:
            ValueError: a server refuses or serves another model, or none has worked for `dead_after_s`.
        """
        output = answer_file(self.work_dir, name)
        finished = read_finished(output)
        missing = [request for request in requests if request.id not in finished]
        if not missing:
            return finished
        with output.open("a", encoding="utf-8") as stream:
            asyncio.run(self._ask_all(missing, stream=stream))
        return read_finished(output)

    async def _ask_all(self, requests: Sequence[GenerationRequest], *, stream: TextIO) -> None:
        settings = self.settings
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # Beside the connection only the whole request has a time limit: a server is silent until an answer is complete.
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        async with httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=timeout) as http:
            places = [
                _Place(ServerClient(url, http=http, model=settings.model, facts=self._facts)) for url in settings.urls
            ]
            await _Round(requests, places=places, settings=settings, stream=stream, generator=self._random).run()


class _Place:
    """A server in the rotation: `failures` in a row, and whether it was checked since it last failed."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self.failures = 0
        self.checked = False
        self.error = ""
        self.turn = asyncio.Lock()
        """Held by the one who tries a server that is out."""

    @property
    def well(self) -> bool:
        return self.checked and not self.failures


class _Round:
    """The requests of one call, and who works on them."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        *,
        places: Sequence[_Place],
        settings: ServerSettings,
        stream: TextIO,
        generator: random.Random,
    ) -> None:
        self.places = places
        self.settings = settings
        self.stream = stream
        self.random = generator
        self.queue: asyncio.Queue[GenerationRequest] = asyncio.Queue()
        for request in requests:
            self.queue.put_nowait(request)
        self.total = len(requests)
        self.done = 0
        self.attempts: Counter[str] = Counter()
        self.dead_since: float | None = None

    async def run(self) -> None:
        """Until every request has an answer, or somebody raises."""
        per_place = min(self.settings.concurrency, self.total)
        workers = [asyncio.create_task(self._work(place)) for place in self.places for _ in range(per_place)]
        answered = asyncio.create_task(self.queue.join())
        try:
            ended, _ = await asyncio.wait([answered, *workers], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in (answered, *workers):
                task.cancel()
            await asyncio.gather(answered, *workers, return_exceptions=True)

    async def _work(self, place: _Place) -> None:
        while True:
            if not place.well:
                async with place.turn:
                    if not place.well:
                        await self._try(place)
                continue
            request = await self.queue.get()
            if place.well:
                await self._answer(place, request)
            else:  # it failed while this worker waited for a request
                self.queue.put_nowait(request)
                self.queue.task_done()

    async def _try(self, place: _Place) -> None:
        """Wait as long as the failures in a row ask for, then check the server and give it one request."""
        settings = self.settings
        if place.failures:
            longest = min(settings.max_backoff_s, settings.backoff_s * 2 ** min(place.failures - 1, 30))
            await asyncio.sleep(longest * self.random.uniform(0.5, 1.0))
        if not place.checked:
            try:
                await place.client.check()
            except Unavailable as error:
                self._failed(place, error, before=place.failures)
                return
            place.checked = True
        if place.failures:
            await self._answer(place, await self.queue.get())

    async def _answer(self, place: _Place, request: GenerationRequest) -> None:
        before = place.failures
        try:
            answer = await place.client.complete(request, timeout_s=self.settings.timeout_s)
        except Unavailable as error:
            self.attempts[request.id] += error.reached
            if self.attempts[request.id] > self.settings.retries:
                self._write({"id": request.id, "token_ids": [], "finish_reason": "error", "error": str(error)})
            else:
                self.queue.put_nowait(request)
            self._failed(place, error, before=before)
        else:
            place.failures = 0
            self.dead_since = None
            self._write(answer)
        self.queue.task_done()

    def _failed(self, place: _Place, error: Unavailable, *, before: int) -> None:
        """Take a server out; stop when none has worked for too long.

        `before` is the number of failures when the request began: all that were under way when a server died are one.
        """
        place.failures = max(place.failures, before + 1)
        place.checked = False
        place.error = str(error)
        if not all(other.failures for other in self.places):
            return
        now = asyncio.get_running_loop().time()
        self.dead_since = now if self.dead_since is None else self.dead_since
        if now - self.dead_since > self.settings.dead_after_s:
            errors = "; ".join(other.error or f"{other.client.url} is not ready" for other in self.places)
            raise ValueError(
                f"no server has worked for {self.settings.dead_after_s:g} s: {errors}. Start them again, or change "
                "data.generation.servers.urls, and run the same command: what was answered is kept"
            )

    def _write(self, answer: Answer) -> None:
        append_answer(self.stream, answer)
        self.done += 1
        if self.done % PROGRESS_EVERY == 0 or self.done == self.total:
            sys.stdout.write(f"generated {self.done}/{self.total} answers\n")
            sys.stdout.flush()


def _check_url(url: str) -> None:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"data.generation.servers.urls: {url!r} is no URL; write for example http://host:8000/v1")


def _headers(api_key_variable: str | None) -> dict[str, str]:
    if api_key_variable is None:
        return {}
    key = os.environ.get(api_key_variable)
    if not key:
        raise ValueError(
            f"data.generation.servers.api_key_variable: the environment has no {api_key_variable}; export it, or set the "
            "key to null if the servers ask for none"
        )
    return {"Authorization": f"Bearer {key}"}
