"""An exponential moving average of the weights, kept in float32 beside them.

The decay is warmed up, min(decay, (1 + n) / (10 + n)) at update n, so that the start is forgotten soon and a short run
is averaged over a share of its length (as in TensorFlow's ExponentialMovingAverage).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Averages(Protocol):
    """What a run asks of its averages, whether it keeps any or not."""

    @property
    def active(self) -> bool:
        """Whether there are averages to store."""
        ...

    def update(self) -> None:
        """Take in the weights after an optimiser step."""
        ...

    def swapped(self) -> AbstractContextManager[None]:
        """Inside, the parameters hold the averages."""
        ...

    def reset(self, *, updates: int = 0) -> None:
        """Begin from what the parameters hold now, as after `updates` updates."""
        ...


class NoAverages:
    """A run without averages: inside `swapped` the parameters hold the weights."""

    active = False

    def update(self) -> None:
        """Nothing to average."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Change nothing."""
        yield

    def reset(self, *, updates: int = 0) -> None:
        """Nothing to begin."""


class Ema:
    """Averages of named tensors, each of the same kind as its tensor: plain, or DTensor with this process's share.

    The tensors are read at every update and written in place by `swapped`; no process needs another for either. They
    must be float32, and the ones that training goes on with: build this after the weights were spread over processes.
    """

    active = True

    @torch.no_grad()
    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], *, decay: float) -> None:
        assert 0.0 < decay < 1.0, decay
        self.decay = decay
        self.updates = 0
        self._parameters = dict(named_parameters)
        assert all(parameter.dtype == torch.float32 for parameter in self._parameters.values())
        self._averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._inside = False

    @torch.no_grad()
    def update(self) -> None:
        """average += (1 - d) (weight - average), d = min(decay, (1 + n) / (10 + n)) at update n = 0, 1, ..."""
        assert not self._inside, "inside `swapped` the parameters are not the weights"
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name].detach(), 1.0 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the parameters hold the averages; afterwards the weights to the bit, whatever happened inside.

        Weights and averages change places, so no third copy is held.
        """
        assert not self._inside, "already swapped"
        self._exchange()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._exchange()

    @torch.no_grad()
    def reset(self, *, updates: int = 0) -> None:
        """Begin from what the parameters hold now, as after `updates` updates: after averages were loaded into them."""
        assert not self._inside
        self.updates = updates
        for name, average in self._averages.items():
            average.copy_(self._parameters[name].detach())

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self._averages.items():
            parameter = self._parameters[name].detach()
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)


def averages(named_parameters: Iterable[tuple[str, Tensor]], *, decay: float | None) -> Averages:
    """Averages of the trainable ones of `named_parameters`; none where `decay` is None."""
    if decay is None:
        return NoAverages()
    return Ema(((name, parameter) for name, parameter in named_parameters if parameter.requires_grad), decay=decay)
