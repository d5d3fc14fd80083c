"""Two engines loaded side by side, one working at a time: blocks in the order A B, B A, A B, ...

What the machine does within a minute (another user, heat) then meets both arms alike, so ratios are sharp. What it
cannot remove is the luck of a start, and two loaded engines run slower than one alone; so several pairs are started, and
the report says which protocol made a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from eyas.eval.child import Child

Starter = Callable[[], AbstractContextManager[Child]]
"""Starts a worker, which ends with the block."""

Reasons = tuple[str | None, str | None]
"""Why each child of a pair failed; None for one that ended well."""

PARTNER_FAILED = "ended because its partner failed"


def drive_pair(starters: tuple[Starter, Starter], *, blocks: int, timeout_s: float) -> Reasons:
    """Load two workers one after the other and let them take turns until each has done all its blocks.

    Args:
        starters: start a worker that says when it waits and does one block at every word. The second one is loaded when
            the first is: an engine measures the free memory of its GPU while it loads.
        blocks: of each worker, all cells together.
        timeout_s: of the whole pair.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        pair: list[Child] = []
        for index, start in enumerate(starters):
            pair.append(stack.enter_context(start()))
            reason = pair[index].wait_ready(deadline=deadline)
            if reason is not None:
                return _failed(index, _with_limit(reason, timeout_s))
        return _take_turns((pair[0], pair[1]), blocks=blocks, deadline=deadline, timeout_s=timeout_s)


def _take_turns(pair: tuple[Child, Child], *, blocks: int, deadline: float, timeout_s: float) -> Reasons:
    for number in range(blocks):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            pair[index].go()
            reason = pair[index].wait_ready(deadline=deadline)
            if reason is not None:
                return _failed(index, _with_limit(reason, timeout_s))
    return _finish(pair, deadline=deadline)


def _finish(pair: tuple[Child, Child], *, deadline: float) -> Reasons:
    """The last word lets each worker write its result and end."""
    for child in pair:
        child.go()
    one, other = (child.wait(timeout_s=max(0.0, deadline - time.monotonic())) for child in pair)
    return one, other


def _failed(index: int, reason: str) -> Reasons:
    return (reason, PARTNER_FAILED) if index == 0 else (PARTNER_FAILED, reason)


def _with_limit(reason: str, timeout_s: float) -> str:
    return f"timed out after {timeout_s:g} s" if reason == "timed out" else reason
