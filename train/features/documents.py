"""What training reads: documents with the target's states, wherever they come from.

Shapes: N documents, T tokens, X = captured layers times hidden size, H hidden, V vocabulary, K TTT steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from eyas.heads.head import FeatureSource
from eyas.train.features.teacher import Teacher


@dataclass(frozen=True)
class Document:
    """One conversation of a split: T tokens with their features, on the CPU.

    `captured_TX` are the states that an EAGLE-3 head reads. `last_TH` are those after the final norm at every slot, which
    an EAGLE head reads; None where they were not kept. `teacher` has a row per teacher position (heads/slots.py).
    """

    token_ids_T: Tensor
    answer_mask_T: Tensor
    captured_TX: Tensor
    last_TH: Tensor | None
    teacher: Teacher


def states_of(document: Document, *, source: FeatureSource) -> Tensor:
    """The target's states [T, X] of a document that a head reads.

    Raises:
        ValueError: the head reads the last state at every slot, and it was not kept.
    """
    if source == "captured":
        return document.captured_TX
    if document.last_TH is None:
        raise ValueError(
            "an EAGLE head reads the last hidden state at every slot, and these features hold it at answers only; run the "
            "extract stage again with head.kind=eagle"
        )
    return document.last_TH


class Documents(Protocol):
    """The documents of one split: a feature store, or the target at work beside the head."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each document."""
        ...

    def __len__(self) -> int: ...

    def load(self, indices: Sequence[int]) -> list[Document]:
        """Some of the documents, in the order asked for."""
        ...

    def answer_token_counts(self, *, vocab_size: int) -> Tensor:
        """How often each token was written by the target in this split, [V]."""
        ...

    def trained_rows(self, *, num_steps: int) -> Tensor:
        """Rows that training has of each document at each of `num_steps` TTT steps, from masks alone: int64 [N, K]."""
        ...

    def start(self, batches: Sequence[Sequence[int]], *, first: int = 0) -> None:
        """Tell which documents this process will load in which order, and the number of the batch that is loaded first.

        While training, a batch is a pack (train/order.py). A source may work ahead.
        """
        ...

    def close(self) -> None:
        """Let go of files and processes."""
        ...
