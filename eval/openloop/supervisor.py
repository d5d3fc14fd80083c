"""A parent for a server: `python -m eyas.eval.openloop.supervisor PARENT_PID COMMAND...`.

A vLLM server is several processes, and killing the one that was started can leave the engine behind with the cores and
the memory. The supervisor leads their process group and ends all of it when it is told to (SIGTERM), when whoever
started it is gone, however that ended, and when the server itself ends. It imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eyas.heads.serving import end_with_parent

GRACE_SECONDS = 10.0
"""What a server is given to end by itself before it is killed."""

POLL_SECONDS = 0.05


class _Told(Exception):
    """SIGTERM arrived."""


def supervise(command: Sequence[str], *, parent: int) -> int:
    """Run `command` until it ends or this process is told to end, then end the whole group; returns its exit code.

    Args:
        command: program and arguments.
        parent: id of the process that asked for it.
    """
    code = 1
    try:
        signal.signal(signal.SIGTERM, _told)
        try:
            end_with_parent()
            if os.getppid() != parent:
                return code  # it ended before this process could ask to be told
            code = subprocess.Popen(command).wait()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Told:
        code = 128 + signal.SIGTERM
    end_group()
    return code


def _told(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Told


def end_group() -> None:
    """End every other process of the own group; if some will not, kill the group, this process included."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while others_in_group():
        if time.monotonic() > deadline:
            os.killpg(0, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def others_in_group() -> list[int]:
    """Ids of the other live processes of the own group, as Linux lists them; none elsewhere."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    own, group = os.getpid(), os.getpgrp()
    others = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group ...; a name may hold spaces and brackets.
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and int(path.parent.name) != own and state != "Z":
                others.append(int(path.parent.name))
    return others


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[2:], parent=int(sys.argv[1])))
