"""The target in a process of its own, on a device of its own, working ahead while the head trains.

The trainer tells the windows of a whole run (online.py) and reads their batches as they come. The target computes the
next window while the last one is on its way: up to three windows are in its memory, and a few batches here. Settings
and windows cross a socket as JSON, documents as safetensors. Every message back is a kind and a body; the kind of
documents is the number of the stream that they belong to, since a run that ends early leaves one half read.

It is started as a module and not forked or spawned by multiprocessing, so that no script needs a guard for being
imported again. It runs in a session of its own, where Ctrl-C does not reach it: the trainer ends it. Were the trainer
killed, the kernel ends it, and elsewhere than on Linux the closed socket does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from eyas.heads.serving import end_with_parent
from eyas.train.data.tokens import Split
from eyas.train.features.encoding import EncodedDocument
from eyas.train.features.identity import StoreIdentity
from eyas.train.features.online import TargetSettings, TargetStates, Window

READY_BATCHES = 4
"""Batches that wait in the trainer, so that reading the socket overlaps with training."""

PATHS = ("target_dir", "tokens_dir", "cache")
ERROR = b"error"
Message = tuple[bytes, bytes]


class TargetProcess:
    """The trainer's side (implements `StateSource`)."""

    def __init__(self, settings: TargetSettings) -> None:
        """Start the process; it loads the target while the trainer goes on."""
        self._device = settings.device
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._inbox: queue.Queue[Message | None] = queue.Queue(maxsize=READY_BATCHES)
        self._stream = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(_settings_json(settings))

    def stream(self, split: Split, windows: Sequence[Window]) -> Iterator[list[EncodedDocument]]:
        """As `StateSource`; computing begins at once, after the window that is being computed for the stream before.

        Raises:
            ValueError: the target failed, or its process ended.
        """
        self._stream += 1
        self._make_room()
        fields = [dataclasses.asdict(window) for window in windows]
        self._send({"stream": self._stream, "split": split, "windows": fields})
        return self._receive(self._stream, due=sum(len(window.batches) for window in windows))

    def close(self) -> None:
        """End the process. What it was computing is lost, and what it cached is whole."""
        if self._process.poll() is None:
            self._process.kill()
        self._stream += 1
        self._make_room()
        self._reader.join()
        self._process.wait()
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended, and the next read says why

    def _receive(self, stream: int, *, due: int) -> Iterator[list[EncodedDocument]]:
        while due > 0:
            assert stream == self._stream, "another stream was begun"
            message = self._inbox.get()
            if message is None:
                self._inbox.put(None)  # for whoever asks again
                raise ValueError(self._obituary())
            kind, body = message
            if kind == ERROR:
                raise ValueError(f"the target's own process on {self._device} failed: {body.decode()}")
            if kind == _kind(stream):
                due -= 1
                yield unpack(body)

    def _read(self) -> None:
        """Body of the reading thread: messages of the current stream until the other side ends."""
        try:
            while True:
                kind, body = self._connection.recv_bytes(), self._connection.recv_bytes()
                # Documents of an earlier stream would stop up the socket, with the next order behind them.
                if kind in (ERROR, _kind(self._stream)):
                    self._inbox.put((kind, body))
        except (EOFError, OSError):
            self._inbox.put(None)

    def _make_room(self) -> None:
        """Drop what waits to be read of an earlier stream."""
        kept: list[Message | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if message is None or message[0] == ERROR:
                    kept.append(message)
        for message in kept:
            self._inbox.put(message)

    def _obituary(self) -> str:
        code = self._process.wait()
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return (
            f"the target's own process on {self._device} {reason}, and training needs it (features.where=process); if "
            "memory ran out, lower features.batch_tokens. The same command goes on from the last checkpoint"
        )


def _kind(stream: int) -> bytes:
    """Kind of the messages that hold documents of a stream."""
    return str(stream).encode()


def pack(documents: Sequence[EncodedDocument]) -> bytes:
    """The documents of one batch as one safetensors file."""
    return save(
        {f"{place}/{name}": t for place, document in enumerate(documents) for name, t in document.tensors.items()}
    )


def unpack(body: bytes) -> list[EncodedDocument]:
    """What `pack` packed."""
    documents: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load(body).items():
        place, name = key.split("/", 1)
        documents.setdefault(int(place), {})[name] = tensor
    return [EncodedDocument(documents[place]) for place in sorted(documents)]


def _settings_json(settings: TargetSettings) -> dict[str, Any]:
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    paths = {name: None if fields[name] is None else str(fields[name]) for name in PATHS}
    return fields | paths | {"identity": settings.identity.as_json()}


def _settings(message: dict[str, Any]) -> TargetSettings:
    fields: dict[str, Any] = {name: None if message[name] is None else Path(message[name]) for name in PATHS}
    fields["identity"] = StoreIdentity.from_json(message["identity"])
    return TargetSettings(**(message | fields))


def main(handle: int) -> None:
    """The target's side: windows in, batches out, until the trainer closes the socket."""
    # A scheduler signals every process of a job; the trainer decides when to stop, and closes the socket then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    connection = Connection(handle)
    outgoing: queue.Queue[list[Message] | None] = queue.Queue(maxsize=1)
    sender = threading.Thread(target=_write, args=(connection, outgoing), daemon=True)
    sender.start()
    try:
        _work(connection, outgoing)
    except EOFError:
        return
    except Exception as error:
        expected = isinstance(error, ValueError)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        outgoing.put([(ERROR, text.encode())])
        outgoing.put(None)
        sender.join()
        if not expected:
            raise
        sys.exit(2)


def _work(connection: Connection, outgoing: queue.Queue[list[Message] | None]) -> None:
    settings = _settings(json.loads(connection.recv_bytes()))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    target = TargetStates(settings)
    while True:
        message = json.loads(connection.recv_bytes())
        for window in message["windows"]:
            batches = target.window(message["split"], Window(**window))
            outgoing.put([(_kind(message["stream"]), pack(batch)) for batch in batches])
            if connection.poll():
                break  # a new stream, or the end


def _write(connection: Connection, outgoing: queue.Queue[list[Message] | None]) -> None:
    """Body of the sending thread."""
    try:
        while (messages := outgoing.get()) is not None:
            for kind, body in messages:
                connection.send_bytes(kind)
                connection.send_bytes(body)
    except OSError:
        os._exit(1)  # the trainer is gone


if __name__ == "__main__":
    main(int(sys.argv[1]))
