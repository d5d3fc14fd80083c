"""A feature store that fills while a head trains: what the target computes in the first epoch is read in later ones.

A document is computed by the process that meets it first in the run, and a shard is one window of that process
(online.py), written before the window's first pack is trained on. So training never goes beyond what the cache holds:
after a kill, windows that are there are read and the others computed in the groups of the undisturbed run.

In several processes, a document that another one met at an earlier step is there too, since no process begins a step
before all have finished the one before. A process that loads packs ahead of their use is only sure of steps that lie as
far back, so documents of the last few steps are computed again, and a filler in each process: a handful in an epoch. Such
a document is in the cache twice, and the last bits of the two may differ where they were computed among others.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from eyas.train.data.tokens import Tokens
from eyas.train.features.documents import Document
from eyas.train.features.encoding import EncodedDocument, bytes_per_token, decode
from eyas.train.features.identity import StoreIdentity, open_index
from eyas.train.features.online import StateSource, owned, plan_windows
from eyas.train.features.shards import as_lengths
from eyas.train.features.store import FeatureStore
from eyas.train.order import RunOrder

CACHE_NAME = "cache"
SPARE = 1.05
"""Of the disk: shards have headers, and checkpoints are written beside them."""


def first_meetings(order: RunOrder, *, rank: int, world_size: int, ahead: int) -> list[list[int]]:
    """Of every pack of one process in a run, the documents that it has to compute.

    Those are the documents that nobody met before, in an earlier pack of this process or in a step of another one that
    is over for sure when the pack is loaded. A document that another one met just before is computed twice.

    Args:
        ahead: packs that are loaded ahead of their use, the same in every process.
    """
    met: set[int] = set()
    mine: list[list[int]] = []
    for step in range(len(order)):
        if step - ahead > 0:
            met.update(order.documents(step - ahead - 1))
        for pack in order.packs(step, rank=rank, world_size=world_size):
            mine.append([index for index in pack.documents if index not in met])
            met.update(pack.documents)
    return mine


def open_cache(cache: Path, identity: StoreIdentity, *, tokens: Tokens) -> None:
    """Make the store ready for the training documents, or check that the one there is of these states and this run.

    Raises:
        ValueError: another store is there, or the disk is too small for what it lacks.
    """
    open_index(cache, identity, documents={"train": len(tokens)})
    store = FeatureStore(cache, split="train")
    missing = sum(int(tokens.lengths[index]) for index in store.missing())
    store.close()
    answers = int(tokens.answer_token_counts(vocab_size=identity.vocab_size).sum())
    size = bytes_per_token(
        identity.form,
        hidden_size=identity.hidden_size,
        num_layers=len(identity.capture_layers),
        answer_share=answers / max(int(tokens.lengths.sum()), 1),
    )
    free = shutil.disk_usage(cache).free
    if free < missing * size * SPARE:
        raise ValueError(
            f"features.cache=first-epoch needs {missing * size / 1e9:.1f} GB and {cache} has {free / 1e9:.1f} GB free; set "
            "features.cache=none or features.storage=fp8, or set run_dir to another disk"
        )


def remove_cache(cache: Path) -> None:
    """Drop what the first epoch left on disk."""
    shutil.rmtree(cache, ignore_errors=True)


class CachedDocuments:
    """The training documents of one process (implements `Documents`)."""

    def __init__(
        self,
        cache: Path,
        *,
        tokens: Tokens,
        source: StateSource,
        first_met: Sequence[Sequence[int]],
        window_tokens: int,
    ) -> None:
        """
        Args:
            cache: directory of the store, with its index. source: writes there what it computes.
            first_met: of every pack of the run, the documents to compute for it (`first_meetings`).
        """
        self.lengths: Sequence[int] = as_lengths(tokens.lengths)
        self._tokens, self._source, self._first_met, self._window_tokens = tokens, source, first_met, window_tokens
        self._store = FeatureStore(cache, split="train")
        self._missing: set[int] = set()
        self._computed: set[int] = set()
        self._announced: Iterator[tuple[int, Sequence[int]]] = iter(())
        self._coming: Iterator[list[EncodedDocument]] = iter(())

    def __len__(self) -> int:
        return len(self.lengths)

    def start(self, batches: Sequence[Sequence[int]], *, first: int = 0) -> None:
        """The order of the run, and the number of the batch that is loaded first."""
        assert len(batches) == len(self._first_met), "the cache was planned for another run"
        self._look()
        planned = plan_windows(self._first_met, lengths=self.lengths, window_tokens=self._window_tokens, first=first)
        windows = [window for window in planned if not self._missing.isdisjoint(window.documents)]
        # Windows that were trained on and are gone: made again, with an empty batch to wait for.
        lost = [replace(window, batches=[[]]) for window in windows if not window.batches]
        for _ in self._source.stream("train", lost):
            pass
        coming = [window for window in windows if window.batches]
        self._computed = {window.first + place for window in coming for place in range(len(window.batches))}
        self._announced = iter(list(enumerate(batches))[first:])
        self._coming = self._source.stream("train", coming)

    def load(self, indices: Sequence[int]) -> list[Document]:
        """Documents of the next announced batch, computed or read."""
        step, announced = next(self._announced, (-1, ()))
        assert list(announced) == list(indices), "batches are loaded as they were announced"
        documents: dict[int, Document] = {}
        if step in self._computed:
            computed = [decode(owned(document)) for document in next(self._coming)]
            documents = dict(zip(self._first_met[step], computed, strict=True))
        stored = [index for index in indices if index not in documents]
        if not self._missing.isdisjoint(stored):
            self._look()
        documents |= zip(stored, self._store.load(stored), strict=True)
        return [documents[index] for index in indices]

    def _look(self) -> None:
        """See what the store holds by now, from every process."""
        self._store.refresh()
        self._missing = set(self._store.missing())

    def answer_token_counts(self, *, vocab_size: int) -> Tensor:
        """How often each token was written by the target in this split, [V]."""
        return self._tokens.answer_token_counts(vocab_size=vocab_size)

    def trained_rows(self, *, num_steps: int) -> Tensor:
        """Rows that training has of each document at each of `num_steps` TTT steps, [N, K]."""
        return self._tokens.trained_rows(num_steps=num_steps)

    def close(self) -> None:
        """End what computes, and let go of the store."""
        self._source.close()
        self._store.close()
