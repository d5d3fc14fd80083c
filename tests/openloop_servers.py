"""Servers for the tests of the open loop that misbehave in ways a real one cannot be made to: run as a program on a port.

`python -m tests.openloop_servers BEHAVIOUR PORT NAME [MEMORY]` answers health, models, metrics and streamed completions.
It speaks HTTP by hand so that broken streams can be sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

TOKENS = 6
SYSTEM = {"vllm_version": "0.32.0", "cpu_info": "CPU(s):    2\nModel name:   Some: Processor\nCPU MHz: 2000\n"}
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
Behaviour = Callable[["Program", asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]


def chunk(token_ids: list[int], *, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": token_ids, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    metrics = {"queue_time_ms": 250.0, "speculative_decoding": None}
    return (
        b"data: "
        + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}, "metrics": metrics}).encode()
        + b"\n\n"
    )


async def well(_server: Program, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Two tokens a chunk, a comment and an odd split in between."""
    writer.write(SSE + b": keep-alive\n\n")
    count = min(body["max_tokens"], TOKENS)
    for at in range(0, count, 2):
        last = at + 2 >= count
        data = chunk(list(range(at, min(at + 2, count))), finish="length" if last else None)
        writer.write(data[:7])
        await writer.drain()
        writer.write(data[7:])
        await writer.drain()
    writer.write(usage(count) + b"data: [DONE]\n\n")


async def hang(_server: Program, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Warm-ups are answered; every other stream stops after one chunk and stays open."""
    if body["prompt"][0] == 0:
        await well(_server, writer, body)
        return
    writer.write(SSE + chunk([1]))
    await writer.drain()
    await asyncio.Event().wait()


async def keep_open(_server: Program, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Warm-ups are answered; every other stream gets comments, which keep the connection, and nothing else."""
    if body["prompt"][0] == 0:
        await well(_server, writer, body)
        return
    writer.write(SSE)
    while not writer.is_closing():
        writer.write(b": keep-alive\n\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def trickle(_server: Program, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Warm-ups are answered; every other answer goes on token by token and never ends."""
    if body["prompt"][0] == 0:
        await well(_server, writer, body)
        return
    writer.write(SSE)
    while not writer.is_closing():
        writer.write(chunk([1]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def hang_once(server: Program, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Hangs for good from the first measured request on, but not if another process did before."""
    if server.first_of_all():
        server.behave = hang
    await server.behave(server, writer, body) if server.behave is hang else await well(server, writer, body)


async def die(_server: Program, _writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """The whole program is gone with the third request."""
    if body["prompt"][0] == 3:
        os._exit(7)
    await well(_server, _writer, body)


async def wear_out(server: Program, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Refuses everything after the fourth measured request; a fresh one does better."""
    server.measured += body["prompt"][0] != 0
    if server.measured < 4 or (server.measured == 4 and body["prompt"][0] != 0):
        await well(server, writer, body)
    else:
        writer.write(b"HTTP/1.1 503 Worn out\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


async def odd(_server: Program, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Each request of a number fails in its own way; others are answered."""
    done = b"data: [DONE]\n\n"
    wrong = {
        1: SSE + b"data: {broken\n\n",
        2: SSE + chunk([1]),
        3: b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops",
        4: SSE + b'data: {"error": {"message": "engine died"}}\n\n' + done,
        5: SSE + chunk([1, 2], finish="length") + usage(3) + done,
        6: SSE + chunk([1, 2]) + usage(2) + done,
        7: SSE + b'data: {"choices": [{"text": "no ids", "finish_reason": "stop"}]}\n\n' + done,
        8: b"",
        9: SSE + chunk([], finish="stop") + usage(0) + done,
    }
    reply = wrong.get(body["prompt"][0])
    if reply is None:
        await well(_server, writer, body)
    else:
        writer.write(reply)


class Program:
    """The server: one behaviour for completions."""

    def __init__(self, behave: Behaviour, *, name: str, memory: Path | None) -> None:
        self.behave = behave
        self.name = name
        self.memory = memory
        self.generated = 0
        self.measured = 0

    def first_of_all(self) -> bool:
        """Whether no other process of the test has been here."""
        assert self.memory is not None
        try:
            self.memory.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")]
            body = json.loads(await reader.readexactly(lengths[0])) if lengths and lengths[0] else {}
            path = head.split()[1]
            if path == "/v1/completions":
                await self.behave(self, writer, body)
                self.generated += min(body["max_tokens"], TOKENS)
            else:
                writer.write(self.page(path.partition("?")[0]))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client gave up
        finally:
            writer.close()

    def page(self, path: str) -> bytes:
        pages = {
            "/health": "",
            "/v1/models": json.dumps({"data": [{"id": self.name}]}),
            "/metrics": f'vllm:num_requests_running{{engine="0"}} 2.0\nvllm:generation_tokens_total {self.generated}.0\n',
            "/server_info": json.dumps({"vllm_config": {"seed": 0}, "vllm_env": {}, "system_env": SYSTEM}),
            "/reset_prefix_cache": json.dumps({"success": self.behave is not odd}),
        }
        if path not in pages:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        text = pages[path].encode()
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text


async def serve(behave: Behaviour, port: int, name: str, memory: Path | None) -> None:
    program = Program(behave, name=name, memory=memory)
    await (await asyncio.start_server(program.handle, "127.0.0.1", port)).serve_forever()


def stubborn(memory: Path, *, port: int, name: str) -> None:
    """A server that ignores SIGTERM and has a child that does so too; their ids go into a file."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
    memory.write_text(f"{os.getpid()} {child.pid}")
    asyncio.run(serve(well, port, name, memory))


BEHAVIOURS: dict[str, Behaviour] = {
    each.__name__: each for each in (well, hang, keep_open, trickle, hang_once, die, wear_out, odd)
}

if __name__ == "__main__":
    which, at, called = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    file = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    if which == "stubborn":
        assert file is not None
        stubborn(file, port=at, name=called)
    elif which == "taken":
        print("[Errno 98] error while attempting to bind: address already in use")
        sys.exit(1)
    elif which == "broken":
        print("cannot load the model: no such file")
        sys.exit(3)
    else:
        asyncio.run(serve(BEHAVIOURS[which], at, called, file))
