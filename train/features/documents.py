"""What training reads: documents with the target's states, wherever they come from.

Shapes: T tokens, X = captured layers times hidden size, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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

    def start(self, batches: Sequence[Sequence[int]], *, first: int = 0) -> None:
        """Tell which documents will be read in which order, and the number of the batch that is read first.

        A source may work ahead.
        """
        ...

    def close(self) -> None:
        """Let go of files and processes."""
        ...
