"""Signals set a flag; the training loop decides.

SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 (what schedulers send before a time limit or a preemption) only record that they
came. The loop looks once per step, agrees over all processes, saves at the step boundary, leaves the marker file
REQUEUE, and the process ends with exit code 75 (EX_TEMPFAIL): run the same command again and it goes on. A signal may
come twice (from the scheduler to the step and to the batch script) and changes nothing the second time, but for SIGINT:
a person who presses Ctrl-C again does not want to wait.

Under `accelerate launch` and torchrun:

- SIGTERM and SIGINT to the launcher reach the processes, which are killed 30 s later. If a step and a checkpoint take
  longer, set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to more seconds (torchrun has --shutdown-timeout too).
- SIGUSR1 and SIGUSR2 end the launcher at once and leave its processes alone. Set
  PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1,SIGUSR2 (torchrun: --signals-to-handle), or signal the processes only.
- The launcher's own exit code is 1 whatever the processes end with. A batch script decides by the marker file.
- A signal that comes before the processes stand (imports take seconds) ends the launcher: trap it in the batch script.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from eyas.heads.files import write_json

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
EXIT_REQUEUE = 75
"""Exit code of a process that saved and stopped because a signal asked for it."""

MARKER = "REQUEUE"
SAME_CTRL_C_SECONDS = 2.0
"""A terminal sends Ctrl-C to the launcher and to its processes, and the launcher passes its own on."""


class Preempted(Exception):
    """A signal asked to stop, and the run was saved after `step` optimiser steps.

    `signal_number` is None in a process that stops because another one was signalled.
    """

    def __init__(self, *, signal_number: int | None, step: int) -> None:
        self.signal_number, self.step = signal_number, step
        super().__init__(f"stopped by {signal_name(signal_number)}, saved at step {step}")


class StopRequest:
    """Whether a signal asked this process to stop, and which."""

    def __init__(self, *, same_within: float = 0.0) -> None:
        """
        Args:
            same_within: seconds in which a second SIGINT counts as the first one.
        """
        self.signal_number: int | None = None
        self._owner, self._same_within, self._first = os.getpid(), same_within, 0.0

    def handle(self, signal_number: int, _frame: FrameType | None) -> None:
        """Signal handler: remember; a forked child leaves the decision to its parent."""
        if os.getpid() != self._owner:
            return
        if self.signal_number is None:
            self.signal_number, self._first = signal_number, time.monotonic()
        elif signal_number == signal.SIGINT and time.monotonic() - self._first >= self._same_within:
            raise KeyboardInterrupt

    @property
    def requested(self) -> bool:
        """True once any of the signals came."""
        return self.signal_number is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Install the handlers for the duration of the block; outside the main thread signals cannot be handled."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    request = StopRequest(same_within=SAME_CTRL_C_SECONDS if launched else 0.0)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def signal_name(number: int | None) -> str:
    """Name of a signal, such as SIGTERM."""
    return "a signal to another process" if number is None else signal.Signals(number).name


def mark_for_requeue(run_dir: Path, *, signal_number: int | None, step: int) -> None:
    """Leave the marker that tells a batch script to submit the run again."""
    name = None if signal_number is None else signal_name(signal_number)
    write_json(
        run_dir / MARKER, {"signal": name, "step": step, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    )


def clear_requeue(run_dir: Path) -> None:
    """Remove the marker: the run goes on, or has ended."""
    (run_dir / MARKER).unlink(missing_ok=True)
