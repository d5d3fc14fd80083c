"""One instrumented block of a cell, as the worker serves and records it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from eyas.eval.timing.clock import StepClock
from eyas.eval.timing.instrument import NotMeasured, drafts, engine_version, instrumented, require_all_seen


@contextmanager
def timed_block(llm: Any) -> Iterator[dict[str, Any]]:
    """Serve a block within; afterwards the yielded dict is what the block's raw record keeps as `timing`.

    The dict holds the engine's `version` and the clock's `report`. With a vLLM whose methods are others it holds
    `not_measured`, the reason, instead of a report: the block is served all the same.
    """
    timing: dict[str, Any] = {"version": engine_version()}
    with ExitStack() as instruments:
        clock = _put_on(llm, instruments, timing)
        yield timing
    if clock is not None:
        timing |= _checked(clock.report(), drafts=drafts(llm))


def _put_on(llm: Any, instruments: ExitStack, timing: dict[str, Any]) -> StepClock | None:
    try:
        return instruments.enter_context(instrumented(llm))
    except NotMeasured as reason:
        timing["not_measured"] = str(reason)
        return None


def _checked(report: dict[str, Any], *, drafts: bool) -> dict[str, Any]:
    try:
        require_all_seen(report, drafts=drafts)
    except NotMeasured as reason:
        return {"not_measured": str(reason)}
    return {"report": report}
