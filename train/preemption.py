"""Signals set a flag; the training loop decides.

SIGINT, SIGTERM and SIGUSR2 (what SLURM is asked to send before a time limit) only record that they came. The loop
looks once per step, agrees over all processes, saves at the step boundary and stops. A second Ctrl-C stops at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class StopRequest:
    """Whether a signal asked this process to stop, and which."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def handle(self, signal_number: int, _frame: FrameType | None) -> None:
        """Signal handler: remember; a repeated SIGINT is a person who does not want to wait."""
        if self.signal_number is not None and signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = signal_number

    @property
    def requested(self) -> bool:
        """True once any of the signals came."""
        return self.signal_number is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Install the handlers for the duration of the block; outside the main thread signals cannot be handled."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
