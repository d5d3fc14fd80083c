"""Which documents each step of a run trains on, and which process computes which of them.

A step trains a global batch: documents of up to `batch_tokens` tokens over all processes together. The global batches are
a function of the data, the seed and the settings and never of the number of processes, so a run may go on with another
number of them. A global batch is dealt out to the processes by cost, and each share is cut into packs, which are computed
one after another. All processes run the same number of packs in a step: one that lacks documents computes a filler, the
cheapest document of the split, whose result does not count.

Every epoch trains each document once. Documents without a trained row teach nothing and are left out. An epoch's
batches differ from the last one's in number too, so a step's place is looked up and never computed.

Shapes: N documents of the split, K TTT steps, S optimiser steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eyas.train.packing import deal, fill_batches, first_fit, spread

TOKENS_PER_ROW = 5
"""How many tokens cost as much as one trained row. A token that is not trained passes fc and the keys and values of the
first step; a trained row also the query, the output projection, the MLP and the readout of its step. By the matrices of
a head for an 8B target (hidden 4096, MLP 14336, draft vocabulary 32000) that is 67 to 370 million multiplications, for
one of 135M (576, 1536, 8192) 1.4 to 8.4."""

IDLE_WORTH_SAYING = 0.2
SAMPLED_STEPS = 1000
"""Steps that statistics look at, evenly spread over the run."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """Attributes:
    batch_tokens: of one optimiser step, over all processes.
    pack_tokens: of one forward of one process; None puts its whole share into one.
    """

    batch_tokens: int
    pack_tokens: int | None
    epochs: int
    seed: int


@dataclass(frozen=True)
class Pack:
    """Documents that one process computes together. A filler (`counted` false) has weight 0 and is in no sum."""

    documents: tuple[int, ...]
    counted: bool = True


@dataclass(frozen=True, kw_only=True)
class OrderStatistics:
    """Means over steps.

    Attributes:
        documents_per_step: of a global batch.
        fill: tokens of a global batch as a share of batch_tokens. There is no padding beside it.
        packs_per_step: of each process.
        filler_share: packs that do not count, of all packs of all processes.
        idle_share: of the processes' time, spent in waiting for the one with most work; by cost, not measured.
    """

    documents_per_step: float
    fill: float
    packs_per_step: float
    filler_share: float
    idle_share: float


class RunOrder:
    """The order of a run; its length is the number of optimiser steps.

    Attributes:
        untrained: documents that are left out, since they have no trained row.
    """

    def __init__(self, lengths: Sequence[int], rows_NK: Tensor, *, settings: OrderSettings) -> None:
        """
        Args:
            lengths: tokens of each document. rows_NK: trained rows of each document and TTT step.

        Raises:
            ValueError: no document has a trained row.
        """
        self.settings = settings
        self._rows_NK: Integers = rows_NK.numpy().astype(np.int64, copy=False)
        lengths_N = np.asarray(lengths, dtype=np.int64)
        assert lengths_N.shape[0] == self._rows_NK.shape[0]
        trained: Integers = np.flatnonzero(self._rows_NK[:, 0])
        self.untrained = len(lengths_N) - len(trained)
        if len(trained) == 0:
            raise ValueError(
                f"none of the {len(lengths_N)} training documents has an answer of two tokens or more, so there is nothing "
                "to train on; look at the conversations (roles, data.max_length) and run the prepare stage again"
            )
        self._lengths: list[int] = lengths_N.tolist()
        self._costs: list[int] = (lengths_N + TOKENS_PER_ROW * self._rows_NK.sum(1)).tolist()
        # One for the whole run: a process computes or reads it once, and has it at hand from then on.
        self._filler = Pack((min(trained.tolist(), key=self._costs.__getitem__),), counted=False)
        self._epochs = [self._epoch(epoch, trained) for epoch in range(settings.epochs)]
        self._firsts = [0, *accumulate(len(ends_S) for _, ends_S in self._epochs)]
        """First step of each epoch, and the number of steps."""
        self._counts: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._firsts[-1]

    def documents(self, step: int) -> tuple[int, ...]:
        """The global batch of a step."""
        return tuple(self._documents(step).tolist())

    def rows(self, step: int) -> list[int]:
        """Trained rows of a global batch at each TTT step."""
        return self._rows_NK[self._documents(step)].sum(0).tolist()

    def tokens(self, step: int) -> int:
        """Tokens of a global batch."""
        return sum(self._lengths[index] for index in self.documents(step))

    def epoch(self, step: int) -> float:
        """Epochs that are done before a step, or, with the number of steps, after the last one."""
        epoch = bisect_right(self._firsts, step) - 1
        if epoch == self.settings.epochs:
            return float(epoch)
        return epoch + (step - self._firsts[epoch]) / (self._firsts[epoch + 1] - self._firsts[epoch])

    def packs(self, step: int, *, rank: int, world_size: int) -> list[Pack]:
        """What one process computes in a step, in order: equally many packs in each process, fillers last."""
        documents = self.documents(step)
        shares, count = self._split(documents, world_size=world_size)
        packs = [Pack(tuple(pack)) for pack in self._share_packs(shares[rank], count=count)]
        return packs + [self._filler] * (count - len(packs))

    def all_packs(self, *, rank: int, world_size: int) -> list[list[int]]:
        """Documents of each pack of one process in the whole run, fillers included."""
        packs: list[list[int]] = []
        counts: list[int] = []
        for step in range(len(self)):
            mine = self.packs(step, rank=rank, world_size=world_size)
            packs.extend(list(pack.documents) for pack in mine)
            counts.append(len(mine))
        self._counts[world_size] = counts
        return packs

    def packs_before(self, step: int, *, rank: int, world_size: int) -> int:
        """How many packs one process has computed when a step begins."""
        if self.settings.pack_tokens is None:
            return step
        if world_size not in self._counts:
            self.all_packs(rank=rank, world_size=world_size)
        return sum(self._counts[world_size][:step])

    def statistics(self, *, world_size: int) -> OrderStatistics:
        """What batches and packs are like, from some of the steps."""
        steps = np.unique(np.linspace(0, len(self) - 1, SAMPLED_STEPS).astype(np.int64)).tolist()
        budget = self.settings.batch_tokens
        documents = packs = fillers = mean = most = 0
        fill = 0.0
        for step in steps:
            batch = self.documents(step)
            shares, count = self._split(batch, world_size=world_size)
            costs = [sum(self._costs[index] for index in share) for share in shares]
            documents += len(batch)
            fill += min(self.tokens(step), budget) / budget
            packs += count
            fillers += sum(count - len(self._share_packs(share, count=count)) for share in shares)
            mean += sum(costs)
            most += max(costs) * world_size
        return OrderStatistics(
            documents_per_step=documents / len(steps),
            fill=fill / len(steps),
            packs_per_step=packs / len(steps),
            filler_share=fillers / (packs * world_size),
            idle_share=1 - mean / most,
        )

    def warning(self, found: OrderStatistics, *, world_size: int) -> str | None:
        """A line for the user when global batches are too small for the processes, by their statistics, else None."""
        if found.idle_share < IDLE_WORTH_SAYING:
            return None
        return (
            f"a step of train.batch_tokens={self.settings.batch_tokens} has {found.documents_per_step:.1f} conversations on "
            f"average for {world_size} processes, which will wait about {found.idle_share:.0%} of their time for each "
            "other; raise train.batch_tokens or use fewer processes"
        )

    def _epoch(self, epoch: int, trained: Integers) -> tuple[Integers, Integers]:
        """Documents of an epoch in order, and where each batch ends."""
        # Raw bits: numpy promises that they stay the same, and does not for its own shuffling.
        bits = np.random.PCG64(np.random.SeedSequence([self.settings.seed, epoch])).random_raw(len(trained))
        order: Integers = trained[np.argsort(bits, kind="stable")]
        lengths = [self._lengths[index] for index in order.tolist()]
        batches = fill_batches(lengths, budget=self.settings.batch_tokens)
        places = np.concatenate([np.array(batch, dtype=np.int64) for batch in batches])
        return order[places], np.cumsum([len(batch) for batch in batches], dtype=np.int64)

    def _documents(self, step: int) -> Integers:
        if not 0 <= step < len(self):
            raise IndexError(step)
        epoch = bisect_right(self._firsts, step) - 1
        documents, ends_S = self._epochs[epoch]
        place = step - self._firsts[epoch]
        return documents[(ends_S[place - 1] if place else 0) : ends_S[place]]

    def _split(self, documents: Sequence[int], *, world_size: int) -> tuple[list[list[int]], int]:
        """A global batch dealt out to the processes, and how many packs each of them runs."""
        shares = deal(documents, costs=self._costs, parts=world_size)
        return shares, max(1, *(self._packs_needed(share) for share in shares))

    def _packs_needed(self, share: Sequence[int]) -> int:
        limit = self.settings.pack_tokens
        if limit is None or sum(self._lengths[index] for index in share) <= limit:
            return min(1, len(share))
        return len(first_fit(share, lengths=self._lengths, limit=limit))

    def _share_packs(self, share: Sequence[int], *, count: int) -> list[list[int]]:
        limit = self.settings.pack_tokens
        if limit is None or count == 1:
            return [list(share)] if share else []
        return spread(share, lengths=self._lengths, costs=self._costs, limit=limit, count=count)
