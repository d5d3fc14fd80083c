"""A closed loop run through step times: what throughput the cost model predicts for a whole cell.

A throughput holds more than decode steps at the nominal batch: prompts are read, and at the end fewer and fewer requests
are left. So the cell is replayed: requests are admitted as in the real loop, each step costs what the model says for the
requests that decode in it, and each prompt costs what reading a prompt cost on average. Answer lengths are given; nothing
of the replayed cell's timing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from eyas.eval.records import CellRecord


def steps_needed(answer_lengths: Sequence[int], *, tau: float) -> list[int]:
    """Decode steps of each request after its first token, so that all together take (tokens after the first) / tau."""
    ends = np.cumsum([max(0, length - 1) / tau for length in answer_lengths])
    whole = np.floor(ends + 0.5).astype(int)
    return np.diff(whole, prepend=0).tolist()


def replay(
    needed: Sequence[int], *, batch_size: int, step_seconds: Callable[[int], float], prefill_seconds: float
) -> float:
    """Seconds of a closed loop in which request i takes `needed[i]` decode steps after the step that reads its prompt.

    Args:
        batch_size: requests in flight until fewer are left.
        step_seconds: seconds of a step in which that many requests decode.
        prefill_seconds: seconds that reading one prompt adds to a step.
    """
    waiting = list(needed)[::-1]
    running: list[int] = []
    total = 0.0
    while waiting or running:
        admitted = [waiting.pop() for _ in range(min(batch_size - len(running), len(waiting)))]
        total += (step_seconds(len(running)) if running else 0.0) + prefill_seconds * len(admitted)
        running = [left - 1 for left in running if left > 1] + [left for left in admitted if left > 0]
    return total


def prefill_seconds(blocks: Iterable[CellRecord], *, tau: float, step_seconds: Callable[[int], float]) -> float | None:
    """Mean seconds that one prompt added: what the steps with prompts took beyond decoding the others; None without any.

    A prompt may be read in several steps of which only the last is recorded as its prefill, so every step that is not pure
    decoding counts.
    """
    extra, prompts = 0.0, 0
    for cell in blocks:
        for step in cell.steps:
            if step.prefills == 0 and step.tokens >= step.running:
                continue
            decoding = min(step.running, round((step.tokens - step.prefills) / tau))
            extra += step.seconds - (step_seconds(decoding) if decoding > 0 else 0.0)
            prompts += step.prefills
    return max(0.0, extra / prompts) if prompts else None
