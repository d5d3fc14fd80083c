"""A clock for the parts of engine steps: nested calls, each second counted once, in the innermost part that spent it.

Two sources of time. On a CPU the work is done when a call returns, so `perf_counter` around it is its time. On a GPU a call
returns when its kernels are queued; events recorded in the stream before and after them tell when the device
was there, and are read only after the measurement, so that no step waits for the device because it is timed.

Timing slows a step down, by little, and how little is part of the result. So only every other step is timed, in the
order plain, timed, timed, plain: neighbours share the state of the machine, and a steady drift harms both alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

DRAFT = "draft"
"""The drafter may call what else counts as another part (a shared lm_head): inside it everything is drafting."""

ORDER = (False, True, True, False)
"""Which of four calls of `step()` are timed."""

COST_CALLS = 1000

DECIMALS = 8
"""Seconds are stored to 10 ns; the clock itself resolves no less."""


class Stamps(Protocol):
    """A source of time. A stamp is opaque; `seconds` may be asked only after `settle`."""

    @property
    def name(self) -> str: ...
    def now(self) -> Any: ...
    def settle(self) -> None: ...
    def seconds(self, begin: Any, end: Any) -> float: ...


class HostStamps:
    """Time of this thread's calls, for engines that compute on the CPU."""

    name = "perf_counter"

    def now(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is in flight."""

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaStamps:
    """Time on the current CUDA stream, by events. Not run here: no GPU was at hand when this was written."""

    name = "CUDA events"

    def now(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000


class StepFacts(NamedTuple):
    """What a step worked on.

    Attributes:
        running: requests scheduled. scheduled: tokens the target read. drafted: drafted tokens among them.
        decode: no request was reading its prompt.
    """

    running: int
    scheduled: int
    drafted: int
    decode: bool


@dataclass(slots=True)
class _Call:
    part: str
    begin: Any
    end: Any = None
    inside: list[_Call] = field(default_factory=list)


class _Step(NamedTuple):
    call: int
    seconds: float
    facts: StepFacts
    calls: list[_Call]


class StepClock:
    """Collects steps. `begin_step` and `end_step` enclose a step; `enter` and `leave` enclose a call of a part in it.

    Args:
        stamps: source of time.
        order: which of the steps are timed, over and over.
    """

    def __init__(self, stamps: Stamps, *, order: Sequence[bool] = ORDER) -> None:
        self._stamps = stamps
        self._order = order
        self._index = -1
        self._steps: list[_Step] = []
        self._stack: list[_Call] = []
        self._ignored = 0
        self._facts: StepFacts | None = None
        self._began = 0.0

    def begin_step(self) -> None:
        assert not self._stack and not self._ignored, "steps do not nest"
        self._index += 1
        if not self._order[self._index % len(self._order)]:
            return
        self._facts = None
        self._began = time.perf_counter()
        self._stack.append(_Call("step", None))

    def end_step(self) -> None:
        """Close the step. One in which no model ran (nothing was scheduled) is left out."""
        if not self._stack:
            return
        seconds = time.perf_counter() - self._began
        root = self._stack.pop()
        assert not self._stack and not self._ignored, "every part was left"
        if self._facts is not None:
            self._steps.append(_Step(self._index, seconds, self._facts, root.inside))

    def note(self, facts: StepFacts) -> None:
        """Say what the present step works on."""
        self._facts = facts

    def enter(self, part: str) -> None:
        # Outside timed steps and inside the drafter nothing is told apart.
        if self._ignored or not self._stack or self._stack[-1].part == DRAFT:
            self._ignored += 1
            return
        call = _Call(part, self._stamps.now())
        self._stack[-1].inside.append(call)
        self._stack.append(call)

    def leave(self) -> None:
        if self._ignored:
            self._ignored -= 1
            return
        self._stack.pop().end = self._stamps.now()

    def report(self) -> dict[str, Any]:
        """The steps since the last report, as plain values.

        Returns:
            clock: name of the source of time. step_calls: calls of `step()`, timed or not. calls: timed calls of each part.
            call_cost: seconds that timing adds to one call. steps: one row for each timed step: `index` among the calls
            of `step()`, `seconds` on the wall, the fields of StepFacts, `parts`: part -> seconds spent in it and in no part
            within it, and `rest`: what no part claims. Parts and rest add up to `seconds`; of CUDA events that is so by
            definition of `rest`, which then holds all time in which the device did not work on a part.
        """
        assert not self._stack, "a report is made between steps"
        self._stamps.settle()
        rows = [self._row(step) for step in self._steps]
        calls = Counter(call.part for step in self._steps for call in _all_calls(step.calls))
        facts = {"clock": self._stamps.name, "step_calls": self._index + 1, "call_cost": call_cost(self._stamps)}
        self._steps, self._index = [], -1
        return facts | {"calls": dict(calls), "steps": rows}

    def _row(self, step: _Step) -> dict[str, Any]:
        parts: dict[str, float] = {}
        for call in _all_calls(step.calls):
            own = self._duration(call) - sum(map(self._duration, call.inside))
            parts[call.part] = parts.get(call.part, 0.0) + own
        rest = step.seconds - sum(map(self._duration, step.calls))
        rounded = {part: round(seconds, DECIMALS) for part, seconds in parts.items()}
        return {
            "index": step.call,
            "seconds": round(step.seconds, DECIMALS),
            **step.facts._asdict(),
            "parts": rounded,
            "rest": round(rest, DECIMALS),
        }

    def _duration(self, call: _Call) -> float:
        return self._stamps.seconds(call.begin, call.end)


def call_cost(stamps: Stamps) -> float:
    """Seconds that timing one call takes, by timing many that do nothing."""
    clock = StepClock(stamps, order=(True,))
    clock.begin_step()
    began = time.perf_counter()
    for _ in range(COST_CALLS):
        clock.enter("nothing")
        clock.leave()
    seconds = time.perf_counter() - began
    clock.end_step()
    return seconds / COST_CALLS


def _all_calls(calls: list[_Call]) -> list[_Call]:
    return [each for call in calls for each in (call, *_all_calls(call.inside))]
