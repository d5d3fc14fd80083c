"""A process that imports everything once and forks a child for each attempt at a tiny training run.

Reads one JSON order a line on stdin ({"out", "target", "tokens", "features", "fault"}), answers with one JSON line on
stdout: {"code": exit code, or minus the signal that ended the child; "seconds"; "counts": of what faults can be set at}.

A fault is {"kind": "forward" | "file" | "time", "at": number, "signal": number}: the signal comes at a forward of the
head, before a file operation, or after some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eyas.train import checkpoint_files
from eyas.train.objective import HeadObjective
from eyas.train.preemption import EXIT_REQUEUE, Preempted
from tests import training

LOOP = training.shorter(training.LOOP, pack_tokens=60)
"""Several packs a step, so that a kill also comes between them."""


class Fault:
    """Counts what happens in this process and sends it a signal at one of the events."""

    def __init__(self, order: dict[str, Any] | None) -> None:
        self._order = order or {"kind": "none", "at": 0, "signal": 0}
        self.counts = {"forward": 0, "file": 0}

    def watch(self, holder: Any, name: str, *, kind: str) -> None:
        """Count the calls of a function as events of `kind`."""
        function: Callable[..., Any] = getattr(holder, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.counts[kind] += 1
            if kind == self._order["kind"] and self.counts[kind] == self._order["at"]:
                os.kill(os.getpid(), self._order["signal"])
            return function(*arguments, **keywords)

        setattr(holder, name, counted)


def attempt(order: dict[str, Any], *, answer: int) -> int:
    """Train, as the command line would: the exit code."""
    fault = Fault(order["fault"])
    fault.watch(HeadObjective, "forward", kind="forward")
    for name in ("fsync", "replace", "rename", "rmdir"):
        fault.watch(os, name, kind="file")
    fault.watch(checkpoint_files._Hashed, "write", kind="file")
    out, target, tokens, features = (Path(order[name]) for name in ("out", "target", "tokens", "features"))
    try:
        training.train(out, target=target, tokens=tokens, features=features, loop=LOOP)
    except Preempted:
        return EXIT_REQUEUE
    os.write(answer, json.dumps(fault.counts).encode())
    return 0


def run_child(order: dict[str, Any], *, answer: int) -> None:
    """Be the child: never returns."""
    code = 1
    log = os.open(f"{order['out']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed(0)  # Python seeds it by chance in a forked child, and its state is compared too
    try:
        code = attempt(order, answer=answer)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(order: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for one order and wait for its end."""
    reading, writing = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        run_child(order, answer=writing)
    os.close(writing)
    fault = order["fault"] or {}
    if fault.get("kind") == "time":
        time.sleep(fault["at"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, fault["signal"])
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - start
    with os.fdopen(reading) as stream:
        counts = stream.read()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "counts": json.loads(counts) if counts else None,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread pool that a fork would lose
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
