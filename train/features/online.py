"""Online mode: the target runs beside the head, and a document's states are computed when training comes to it.

A training batch is small and a forward of the target wants to be large. So the documents of many coming batches, a
window, are computed together, sorted by length, and handed over batch by batch. Windows are cut from the order of the
whole run, wherever reading begins: a resumed run computes in the groups of the undisturbed one and gets the same bits.

What is computed passes through the encoder of the feature store, in memory, so a head is fed what it would read from a
store of the same form. In memory are the states of one window at a time, `WINDOW_FORWARDS` * batch_tokens tokens of
them (or one batch, where that is larger), with the target's own process up to three (target_process.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyas.heads.target import DTYPES, HiddenStateCapture, load_target_model, load_target_pieces
from eyas.train.data.tokens import Split, Tokens
from eyas.train.features.documents import Document
from eyas.train.features.encoding import DocumentEncoder, EncodedDocument, decode
from eyas.train.features.extract import length_batches, padded
from eyas.train.features.identity import StoreIdentity
from eyas.train.features.shards import ShardWriter, as_lengths

WINDOW_FORWARDS = 8
"""Forwards of one window: enough that sorting leaves little padding, few enough that a window fits into memory."""


@dataclass(frozen=True)
class Window:
    """Batches whose documents the target reads together.

    Attributes:
        number: its place in the run.
        first: number of the first batch in `batches`.
        documents: what is computed, each document once.
        batches: what is handed over, in order: the batches of the window from where the run begins.
    """

    number: int
    first: int
    documents: list[int]
    batches: list[list[int]]


def plan_windows(
    batches: Sequence[Sequence[int]], *, lengths: Sequence[int], window_tokens: int, first: int
) -> list[Window]:
    """The order of a run cut into windows of at most `window_tokens` tokens (one batch, where that is larger).

    Args:
        batches: document indices of every batch of the run. first: number of the batch that is read first; earlier ones
            are in their window's documents and not handed over.
    """
    windows: list[Window] = []
    begin = 0
    while begin < len(batches):
        end, filled = begin, 0
        while end < len(batches):
            filled += sum(lengths[index] for index in batches[end])
            if end > begin and filled > window_tokens:
                break
            end += 1
        documents = list(dict.fromkeys(itertools.chain.from_iterable(batches[begin:end])))
        kept = min(max(begin, first), end)
        windows.append(Window(len(windows), kept, documents, [list(batch) for batch in batches[kept:end]]))
        begin = end
    return windows


def owned(document: EncodedDocument) -> EncodedDocument:
    """The document in tensors that a backward pass may keep: those of the target's forward belong to inference mode."""
    tensors = {name: t.clone() if t.is_inference() else t for name, t in document.tensors.items()}
    return EncodedDocument(tensors)


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """What is needed to run the target, in this process or in its own.

    Attributes:
        identity: what the states are: layers, type of the forward, stored form.
        batch_tokens: tokens of one forward, padding included.
        device: such as "cpu" or "cuda:1". threads: CPU threads of a process of its own; None leaves torch's choice.
        cache: a feature store that takes what is computed for training. shard_prefix: of the names of its shards.
    """

    target_dir: Path
    tokens_dir: Path
    identity: StoreIdentity
    batch_tokens: int
    device: str
    threads: int | None
    trust_remote_code: bool
    cache: Path | None = None
    shard_prefix: str = ""


class StateSource(Protocol):
    """Computes states of documents: the target in this process, or in its own."""

    def stream(self, split: Split, windows: Sequence[Window]) -> Iterator[list[EncodedDocument]]:
        """The documents of every batch of `windows`, in order. A new stream ends the one before."""
        ...

    def close(self) -> None:
        """Let go of the target."""
        ...


class TargetStates:
    """The target on one device."""

    def __init__(self, settings: TargetSettings) -> None:
        self.settings, identity = settings, settings.identity
        self._device, dtype = torch.device(settings.device), DTYPES[identity.dtype]
        model = load_target_model(settings.target_dir, dtype=dtype, trust_remote_code=settings.trust_remote_code)
        self._capture = HiddenStateCapture(model.to(self._device), capture_layers=identity.capture_layers)
        readout_VH = None
        if identity.form.teacher == "top-k":
            readout_VH = load_target_pieces(settings.target_dir).readout_VH.to(self._device)
        self._encoder = DocumentEncoder(identity.form, num_layers=len(identity.capture_layers), readout_VH=readout_VH)
        self._tokens: dict[Split, Tokens] = {}

    def stream(self, split: Split, windows: Sequence[Window]) -> Iterator[list[EncodedDocument]]:
        """As `StateSource`: a window is computed when its first batch is asked for."""
        for window in windows:
            yield from self.window(split, window)

    def window(self, split: Split, window: Window) -> list[list[EncodedDocument]]:
        """Compute a window, keep what belongs into the cache, and return its batches."""
        documents = self.compute(split, window.documents)
        if self.settings.cache is not None and split == "train":
            writer = ShardWriter(self.settings.cache, identity=self.settings.identity, split=split)
            writer.write(f"{self.settings.shard_prefix}{window.number:06d}", list(documents.items()))
        return [[documents[index] for index in batch] for batch in window.batches]

    def compute(self, split: Split, indices: Sequence[int]) -> dict[int, EncodedDocument]:
        """Documents of a split by their index, computed in groups of similar length."""
        if split not in self._tokens:
            self._tokens[split] = Tokens(self.settings.tokens_dir, split=split)
        tokens = self._tokens[split]
        rows = [tokens[index] for index in indices]
        documents: dict[int, EncodedDocument] = {}
        lengths = [token_ids_T.shape[0] for token_ids_T, _ in rows]
        for group in length_batches(lengths, batch_tokens=self.settings.batch_tokens):
            token_ids_BT = padded([rows[row][0] for row in group])
            captured_BTX, last_BTH = self._capture(token_ids_BT.to(self._device))
            for place, row in enumerate(group):
                token_ids_T, answer_mask_T = rows[row]
                documents[indices[row]] = self._encoder.encode(
                    token_ids_T,
                    answer_mask_T=answer_mask_T,
                    captured_TX=captured_BTX[place, : lengths[row]],
                    last_TH=last_BTH[place, : lengths[row]],
                    name=tokens.ids(indices[row]),
                )
        return documents

    def close(self) -> None:
        """Nothing to end: the target goes with this object."""


class OnlineDocuments:
    """The documents of one split, computed in the order that `start` announces (implements `Documents`)."""

    def __init__(self, tokens: Tokens, *, split: Split, source: StateSource, window_tokens: int):
        self.lengths: Sequence[int] = as_lengths(tokens.lengths)
        self._tokens, self._source, self._window_tokens = tokens, source, window_tokens
        self._split: Split = split
        self._announced: Iterator[Sequence[int]] = iter(())
        self._coming: Iterator[list[EncodedDocument]] = iter(())

    def __len__(self) -> int:
        return len(self.lengths)

    def start(self, batches: Sequence[Sequence[int]], *, first: int = 0) -> None:
        """The order of the run, and the number of the batch that is loaded first."""
        windows = plan_windows(batches, lengths=self.lengths, window_tokens=self._window_tokens, first=first)
        self._announced = iter(batches[first:])
        self._coming = self._source.stream(self._split, [window for window in windows if window.batches])

    def load(self, indices: Sequence[int]) -> list[Document]:
        """Documents of the next announced batch."""
        announced = next(self._announced, None)
        assert announced is not None and list(announced) == list(indices), "batches are loaded as they were announced"
        return [decode(owned(document)) for document in next(self._coming)]

    def answer_token_counts(self, *, vocab_size: int) -> Tensor:
        """How often each token was written by the target in this split, [V]."""
        return self._tokens.answer_token_counts(vocab_size=vocab_size)

    def trained_rows(self, *, num_steps: int) -> Tensor:
        """Rows that training has of each document at each of `num_steps` TTT steps, [N, K]."""
        return self._tokens.trained_rows(num_steps=num_steps)

    def close(self) -> None:
        """End what computes."""
        self._source.close()
