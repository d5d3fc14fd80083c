"""One open-loop measurement: warm-up, requests by the timetable, the server watched meanwhile, everything recorded.

The timetable is kept whatever the server does. Three things run beside the requests: a sampler of /metrics, a timer that
notes by how much it is late (what the client's own slowness adds to every timestamp), and a watch that gives the cell up
when the server is gone or sends nothing at all any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from eyas.eval.openloop.client import Client, Sampling, new_record, open_http, seconds_since
from eyas.eval.openloop.metrics import Snapshot, counted
from eyas.eval.openloop.records import LoadRequest, Sample
from eyas.eval.openloop.server import Server, ServerNotReady
from eyas.eval.workload import Request

SAMPLE_SECONDS = 0.5
"""Between two readings of /metrics: each costs the server some milliseconds of the core that also feeds the engine."""

TICK_SECONDS = 0.05
WATCH_SECONDS = 0.25
DYING_SECONDS = 15.0
"""For a server that is on its way out to be gone, so that its end is reported and not what follows from it."""

WARMUP_TOKENS = 8
"""Tokens of each warm-up answer: enough for every kernel of a prefill, a decode and a draft step."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait.

    Attributes:
        request_s: for one complete answer; then the request has failed.
        silence_s: without a token to anybody while answers are due; then the cell has failed. Shorter than `request_s`:
            a server that hangs must not pass for so many requests that failed on their own.
    """

    request_s: float
    silence_s: float

    def __post_init__(self) -> None:
        assert 0 < self.silence_s < self.request_s, "a silent server is given up before its requests are"


SILENCE_SECONDS = 120.0
"""Longest silence of a server that is to be believed alive: the prefill of a long prompt on a slow machine."""


def patience_of(timeout_s: float) -> Patience:
    """Requests are waited for as long as an engine process is; a silent server at most a quarter of that."""
    return Patience(request_s=timeout_s, silence_s=min(SILENCE_SECONDS, timeout_s / 4))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement yields; `given_up` says why it has no result although some requests have."""

    seconds: float
    counters: dict[str, int]
    accepted_per_position: list[int]
    samples: list[Sample]
    loop_lags: list[float]
    requests: list[LoadRequest]
    given_up: str | None


def measure(
    server: Server,
    *,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    warmup: Sequence[list[int]],
    sampling: Sampling,
    max_connections: int,
    patience: Patience,
    empty_prefix_cache: bool,
) -> Measured:
    """Serve `requests` at `arrivals` (seconds from the beginning) and record everything.

    Args:
        warmup: prompts answered all at once before anything is measured; none of them is measured.
        max_connections: requests under way at once; later ones wait in the client, and their records say so.

    Raises:
        ServerNotReady: the warm-up failed or /metrics is not to be read: nothing was measured.
    """
    assert len(requests) == len(arrivals), "every request has its time"

    async def session() -> Measured:
        async with open_http() as http:
            client = Client(http, url=server.url, name=server.name)
            before = await _prepare(client, warmup, sampling, patience, empty_prefix_cache=empty_prefix_cache)
            run = _Run(client, server, sampling=sampling, max_connections=max_connections, patience=patience)
            await run.through(list(zip(requests, arrivals, strict=True)))
            return await run.result(before)

    with _old_objects_left_alone():
        measured = asyncio.run(session())
    return replace(measured, given_up=measured.given_up or _lost_at_the_end(server, measured.requests))


def _lost_at_the_end(server: Server, requests: Sequence[LoadRequest]) -> str | None:
    """Why a cell with failed requests is no result: the server did not survive it. None when they failed on their own."""
    failures = [request.failure for request in requests if request.failure is not None]
    if not failures or server.serves():
        return None
    return (
        server.ended(wait_s=DYING_SECONDS) or f"the server is not well after {len(failures)} failures ({failures[-1]})"
    )


@contextlib.contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keep the garbage collector from walking what the process held before: torch alone makes that 100 ms of pause."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _prepare(
    client: Client, warmup: Sequence[list[int]], sampling: Sampling, patience: Patience, *, empty_prefix_cache: bool
) -> Snapshot:
    short = replace(sampling, max_tokens=min(WARMUP_TOKENS, sampling.max_tokens))
    clock = seconds_since(time.perf_counter())
    records = [
        new_record(index, Request("", "warm-up", prompt), t_scheduled=0.0, t_released=0.0)
        for index, prompt in enumerate(warmup)
    ]
    asked = [
        client.complete(
            record, prompt, sampling=short, timeout_s=patience.request_s, clock=clock, progress=_nobody_waits
        )
        for record, prompt in zip(records, warmup, strict=True)
    ]
    await asyncio.gather(*asked)
    failures = [record.failure for record in records if record.failure is not None]
    if failures:
        raise ServerNotReady(f"{len(failures)} of {len(records)} warm-up requests failed: {failures[0]}")
    try:
        if empty_prefix_cache:
            await client.empty_prefix_cache()
        return await client.metrics()
    except (aiohttp.ClientError, OSError) as error:
        raise ServerNotReady(
            f"the server answers requests but not questions ({type(error).__name__}: {error})"
        ) from error


def _nobody_waits() -> None:
    """Progress of a warm-up."""


class _Run:
    """The requests of one cell, and who watches over them."""

    def __init__(
        self, client: Client, server: Server, *, sampling: Sampling, max_connections: int, patience: Patience
    ) -> None:
        self.client = client
        self.server = server
        self.sampling = sampling
        self.connections = asyncio.Semaphore(max_connections)
        self.patience = patience
        self.records: list[LoadRequest] = []
        self.samples: list[Sample] = []
        self.loop_lags: list[float] = []
        self.given_up: str | None = None
        self.under_way = 0
        self.clock: Callable[[], float] = seconds_since(time.perf_counter())
        self.last_progress = 0.0

    async def through(self, timetable: Sequence[tuple[Request, float]]) -> None:
        """Until every request has ended, or the watch gives up."""
        self.clock = seconds_since(time.perf_counter())
        work = asyncio.create_task(self._keep(timetable))
        beside = [asyncio.create_task(task) for task in (self._sample(), self._tick())]
        watch = asyncio.create_task(self._watch())
        try:
            ended, _ = await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in (work, watch, *beside):
                task.cancel()
            await asyncio.gather(work, watch, *beside, return_exceptions=True)

    async def result(self, before: Snapshot) -> Measured:
        """The records, and what the server counted."""
        seconds = max((record.t_finish or 0.0 for record in self.records), default=0.0)
        try:
            counters, per_position = counted(before, await self.client.metrics())
        except (aiohttp.ClientError, OSError) as error:
            counters, per_position = {}, []
            gone = self.given_up or self.server.ended(wait_s=DYING_SECONDS)
            self.given_up = gone or f"the server's counters are not to be read ({type(error).__name__}: {error})"
        return Measured(
            seconds=seconds,
            counters=counters,
            accepted_per_position=per_position,
            samples=self.samples,
            loop_lags=self.loop_lags,
            requests=self.records,
            given_up=self.given_up,
        )

    async def _keep(self, timetable: Sequence[tuple[Request, float]]) -> None:
        async with asyncio.TaskGroup() as group:
            for index, (request, t_scheduled) in enumerate(timetable):
                await asyncio.sleep(max(0.0, t_scheduled - self.clock()))
                record = new_record(index, request, t_scheduled=t_scheduled, t_released=self.clock())
                self.records.append(record)
                group.create_task(self._serve(record, request.token_ids))

    async def _serve(self, record: LoadRequest, prompt: list[int]) -> None:
        async with self.connections:
            record.t_sent = self.clock()
            self._progress_if_first()
            self.under_way += 1
            try:
                await self.client.complete(
                    record,
                    prompt,
                    sampling=self.sampling,
                    timeout_s=self.patience.request_s,
                    clock=self.clock,
                    progress=self._progress,
                )
            finally:
                self.under_way -= 1

    def _progress(self) -> None:
        self.last_progress = self.clock()

    def _progress_if_first(self) -> None:
        """Silence counts from the moment when something was due."""
        if self.under_way == 0:
            self._progress()

    async def _watch(self) -> None:
        while self.given_up is None:
            await asyncio.sleep(WATCH_SECONDS)
            silence = self.clock() - self.last_progress
            if self.server.ended() is not None:
                self.given_up = self.server.ended()
            elif self.under_way and silence > self.patience.silence_s:
                self.given_up = f"the server stopped answering: nothing came for {silence:.1f} s with {self.under_way} requests under way"

    async def _sample(self) -> None:
        async def once() -> None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                gauges = (await self.client.metrics()).gauges
                self.samples.append(Sample(self.clock(), gauges["running"], gauges["waiting"], gauges["kv_cache"]))

        await _steadily(once, SAMPLE_SECONDS)

    async def _tick(self) -> None:
        while True:
            due = self.clock() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.loop_lags.append(max(0.0, self.clock() - due))


async def _steadily(do: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
    while True:
        await do()
        await asyncio.sleep(seconds)
