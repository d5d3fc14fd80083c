"""One child process: its log, the lines it prints, what is said to it, and a clean end on every path."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GRACE_SECONDS = 10
READY = "@ready"
"""The line by which a worker says that it waits for the next word; every other line is progress for the user."""
GO = "go"


@dataclass(frozen=True)
class Child:
    """A running child and the queue of its ready lines; None in the queue means that it closed its output."""

    process: subprocess.Popen[str]
    ready: queue.SimpleQueue[str | None]

    def wait(self, *, timeout_s: float) -> str | None:
        """Wait for its end; None when it ended well, or why not."""
        try:
            code = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"timed out after {timeout_s:g} s"
        return None if code == 0 else f"exit code {code}"

    def wait_ready(self, *, deadline: float) -> str | None:
        """Wait until it asks for the next word; None when it does, or why it will not. `deadline`: of time.monotonic()."""
        try:
            line = self.ready.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return "timed out"
        if line is not None:
            return None
        return self.wait(timeout_s=GRACE_SECONDS) or "ended too early"

    def go(self) -> None:
        """Tell it to go on. A child that is gone is noticed by the next `wait_ready`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(GO + "\n")
            self.process.stdin.flush()


@contextmanager
def started_child(
    command: Sequence[str], *, environment: dict[str, str], log_path: Path, relay: Callable[[str], None]
) -> Iterator[Child]:
    """Start `command`, its stderr into a log and its lines to `relay`, and end it with the block, however that ends.

    It gets a session of its own: Ctrl-C reaches only this process, which then ends the child and all its children.
    """
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        child = Child(process, queue.SimpleQueue())
        reader = threading.Thread(target=_read_lines, args=(process.stdout, child.ready, relay), daemon=True)
        reader.start()
        try:
            yield child
        finally:
            end_process_group(process)
            reader.join(timeout=GRACE_SECONDS)
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()


def _read_lines(stream: IO[str], ready: queue.SimpleQueue[str | None], relay: Callable[[str], None]) -> None:
    for line in stream:
        if line.rstrip("\n") == READY:
            ready.put(line)
        else:
            relay(line)
    ready.put(None)


def end_process_group(process: subprocess.Popen[str]) -> None:
    """Ask the child's process group to end, wait, then kill it. Does nothing to a child that ended by itself."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
            return
