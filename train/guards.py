"""Guards of a training run: what is not finite is skipped, what jumps is reported, what no longer improves stops.

Counts live in TrainingState and survive a restart. The losses that SpikeGuard compares with do not:
it only reports, and fills its window again.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import torch

from eyas.train.checkpoint import TrainingState

SHOWN_DOCUMENTS = 12
WINDOW = 128
"""Losses that a loss is compared with."""

ENOUGH = 16
"""Losses before which nothing is called a spike."""


class NonFiniteGuard:
    """Skips steps whose gradient is not finite; a loss that is not finite has such a gradient."""

    def __init__(self, *, limit: int, say: Callable[[str], None] = lambda _line: None) -> None:
        """
        Args:
            limit: steps of a run that may be skipped (train.max_skipped_steps).
            say: takes a line about every skipped step.
        """
        self._limit, self._say = limit, say

    def accepts(self, norm: float, *, step: int, documents: Sequence[int], state: TrainingState) -> bool:
        """Whether to take a step whose gradient has this norm; a refused one is counted in `state`.

        Args:
            norm: over all processes, the same in each, so that all decide alike.
            step: 0-based. documents: its global batch, by numbers in the train split.

        Raises:
            ValueError: one more step was refused than may be.
        """
        if math.isfinite(norm):
            return True
        state.skipped += 1
        what = f"the gradient of step {step} is not finite ({shown_documents(documents)})"
        if state.skipped > self._limit:
            raise ValueError(
                f"{what}, and train.max_skipped_steps={self._limit} steps were skipped before it; look for broken features of "
                "these conversations and raise train.max_skipped_steps to go on, or train anew (another run_dir) with a lower "
                "train.learning_rate or train.precision=fp32"
            )
        self._say(f"{what}; skipped, {state.skipped} of at most {self._limit}")
        return False


class SpikeGuard:
    """Finds a loss far above those before it: over `factor` deviations and over half as much again as their median.

    The deviation is the median absolute one, so that earlier spikes do not hide later ones.
    """

    def __init__(self, *, factor: float = 8.0) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._spiking = False

    def look(self, loss: float, *, step: int, documents: Sequence[int]) -> str | None:
        """A sentence about the loss if it is the first of a spike.

        Args:
            step: optimiser steps done. documents: the global batch of the last one.
        """
        if not math.isfinite(loss):
            return None  # NonFiniteGuard has said so
        seen = list(self._losses)
        self._losses.append(loss)
        if len(seen) < ENOUGH:
            return None
        median = statistics.median(seen)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in seen)
        before, self._spiking = self._spiking, loss > max(median + self._factor * deviation, 1.5 * median)
        if before or not self._spiking:
            return None
        return (
            f"the loss at step {step} is {loss:.4g}, {loss / median:.1f} times the median {median:.4g} of the last {len(seen)} "
            f"({shown_documents(documents)})"
        )

    def forget(self) -> None:
        """Begin anew, for when the loss changes its meaning, as with another number of TTT steps."""
        self._losses.clear()
        self._spiking = False


class EarlyStop:
    """Ends a run whose held-out tau no longer rises.

    A head that has not yet been trained on its own output has a tau that levels off early: what a run does in its TTT
    warm-up says nothing of whether it is done, and is not counted.
    """

    def __init__(self, *, patience: int | None, first: int) -> None:
        """
        Args:
            patience: evaluations in a row without a new best tau (train.stop_after_evaluations); None never stops.
            first: the first step (0-based) that trains all TTT steps.
        """
        self._patience, self._first = patience, first

    def count(self, state: TrainingState) -> None:
        """Count the evaluation that was just made of the head after `state.step` steps."""
        counts = state.step > self._first and state.step != state.best_step
        state.since_best = state.since_best + 1 if counts else 0

    def stalled(self, state: TrainingState) -> bool:
        """Whether to stop."""
        return self._patience is not None and state.since_best >= self._patience


def shown_documents(documents: Sequence[int]) -> str:
    """The batch in words, its first documents by number."""
    names = ", ".join(map(str, documents[:SHOWN_DOCUMENTS]))
    more = f" and {len(documents) - SHOWN_DOCUMENTS} more" if len(documents) > SHOWN_DOCUMENTS else ""
    return f"its batch: conversations {names}{more} of the train split, counted from 0"


def explain_out_of_memory(
    error: BaseException, *, tokens: int, rows: Sequence[int], draft_vocab_size: int, documents: int
) -> None:
    """Turn an allocation failure into a sentence with the numbers; return when `error` is something else.

    Args:
        tokens: of the pack. rows: trained rows at each TTT step. draft_vocab_size: of the head. documents: of the pack.

    Raises:
        ValueError: memory ran out; says how large the pack was and what to lower.
    """
    if not is_out_of_memory(error):
        return
    smaller = (
        "train.pack_tokens, which changes no result" if documents > 1 else "data.max_length: it is one conversation"
    )
    raise ValueError(
        f"a pack of {tokens} tokens with {' + '.join(map(str, rows)) or 0} trained rows in {len(rows)} TTT steps, a draft "
        f"vocabulary of {draft_vocab_size}, does not fit memory ({_memory(error)}); lower {smaller}, or train.ttt_steps or "
        "head.draft_vocab_size"
    ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _memory(error: BaseException) -> str:
    found = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    facts = [f"{found[1]} more were asked for"] if found else ["an allocation failed"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        facts.append(
            f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    return ", ".join(facts)
