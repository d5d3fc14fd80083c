"""The client: one streamed completion after the other at the times it is told, on a bounded number of connections.

aiohttp is what vLLM itself depends on and benchmarks with, and parses in C: the client runs beside the server on the
same cores, so what it costs is taken from what is measured. Every request has a connection of its own: a kept one
may be closed by the server in the moment it is used again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from eyas.eval.openloop.metrics import Snapshot, read_metrics
from eyas.eval.openloop.records import LoadRequest
from eyas.eval.openloop.stream import DONE, BadStream, Chunk, EventReader, Summary, excerpt, read_event
from eyas.eval.workload import Request

SHORT_SECONDS = 30.0
"""For questions to the server that are not completions."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled: everything explicit, so that nothing comes from the target's generation_config.json.

    With `ignore_eos` every answer has exactly `max_tokens` tokens. Request i is sampled with seed `seed + i`.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool = False


def completion_body(name: str, prompt: list[int], *, index: int, sampling: Sampling) -> dict[str, Any]:
    """The body of one /v1/completions request: token ids in, a stream of token ids out."""
    greedy = sampling.temperature == 0
    return {
        "model": name,
        "prompt": prompt,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_tokens,
        "seed": None if greedy else sampling.seed + index,
        "stop_token_ids": [] if sampling.ignore_eos else sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


class Client:
    """Connections to one server."""

    def __init__(self, http: aiohttp.ClientSession, *, url: str, name: str) -> None:
        """`name` is what the server calls the target."""
        self._http = http
        self._url = url
        self._name = name

    async def complete(
        self,
        record: LoadRequest,
        prompt: list[int],
        *,
        sampling: Sampling,
        timeout_s: float,
        clock: Callable[[], float],
        progress: Callable[[], None],
    ) -> None:
        """Ask for the answer to `prompt` and write what comes into `record`; failures are written and not raised.

        Args:
            timeout_s: for the whole answer.
            clock: seconds since the cell began.
            progress: called with every event of the answer; comments that keep a connection open are none.
        """
        body = completion_body(self._name, prompt, index=record.index, sampling=sampling)
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream(record, body, clock=clock, progress=progress)
        except TimeoutError:
            record.failure = f"no complete answer within {timeout_s:g} s"
        except BadStream as error:
            record.failure = str(error)
        except (aiohttp.ClientError, OSError) as error:
            record.failure = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            record.failure = "given up with its cell"
            raise
        finally:
            record.t_finish = clock() if record.failure is not None or record.t_finish is None else record.t_finish

    async def _stream(
        self, record: LoadRequest, body: dict[str, Any], *, clock: Callable[[], float], progress: Callable[[], None]
    ) -> None:
        reader = EventReader()
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise BadStream(f"HTTP {response.status}: {excerpt(await response.content.read(1000))}")
            async for data in response.content.iter_any():
                now = clock()
                for payload in reader.feed(data):
                    progress()
                    if payload == DONE:
                        require_complete(record)
                        return
                    add_event(record, read_event(payload), now)
        raise BadStream("the stream ended before its answer")

    async def metrics(self) -> Snapshot:
        """The server's counters and gauges now.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: no answer.
        """
        async with asyncio.timeout(SHORT_SECONDS), self._http.get(f"{self._url}/metrics") as response:
            response.raise_for_status()
            return read_metrics(await response.text())

    async def empty_prefix_cache(self) -> None:
        """Forget cached prompts.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: no answer, or a refusal.
        """
        async with asyncio.timeout(SHORT_SECONDS), self._http.post(f"{self._url}/reset_prefix_cache") as response:
            response.raise_for_status()
            # It answers 200 also when it could not: blocks that a request still holds are not emptied.
            if '"success":false' in (await response.text()).replace(" ", ""):
                raise OSError("the server did not empty its prefix cache")


def open_http() -> aiohttp.ClientSession:
    """A session without limits of its own: the number of connections and the time are bounded by whoever uses it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


def new_record(index: int, request: Request, *, t_scheduled: float, t_released: float) -> LoadRequest:
    """The record of a request of which nothing has come yet."""
    return LoadRequest(
        index=index,
        prompt_id=request.prompt_id,
        conversation=request.conversation,
        n_in=len(request.token_ids),
        t_scheduled=t_scheduled,
        t_released=t_released,
        t_sent=None,
        t_finish=None,
        chunk_times=[],
        chunk_sizes=[],
        token_ids=[],
        finish_reason=None,
        completion_tokens=None,
        queue_seconds=None,
        steps=None,
        drafted=None,
        accepted=None,
        failure=None,
    )


def add_event(record: LoadRequest, event: Chunk | Summary, now: float) -> None:
    """Write one event of the stream into `record`."""
    if isinstance(event, Summary):
        record.completion_tokens = event.completion_tokens
        record.queue_seconds = event.queue_seconds
        record.steps, record.drafted, record.accepted = event.steps, event.drafted, event.accepted
        return
    if event.token_ids:
        record.chunk_times.append(now)
        record.chunk_sizes.append(len(event.token_ids))
        record.token_ids.extend(event.token_ids)
    if event.finish_reason is not None:
        record.finish_reason = event.finish_reason
        record.t_finish = now


def require_complete(record: LoadRequest) -> None:
    """Refuse an answer that lacks something.

    Raises:
        BadStream: it has no reason to be finished, no token, or fewer or more tokens than the server counted.
    """
    if record.finish_reason not in ("stop", "length"):
        raise BadStream(f"the server ended the answer with {record.finish_reason!r}")
    if not record.token_ids:
        raise BadStream("the answer has no token")
    if record.completion_tokens != record.n_out:
        raise BadStream(f"{record.n_out} tokens came, the server counts {record.completion_tokens}")


def seconds_since(began: float) -> Callable[[], float]:
    """A clock that reads 0 at `time.perf_counter()` = `began`."""
    return lambda: time.perf_counter() - began
