"""Held-out evaluations while training: each process drafts on its share of the conversations, and the counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.heads.drafting import ChainStatistics
from eyas.heads.head import DraftHead
from eyas.train.features.documents import Document
from eyas.train.heldout import heldout_hits, statistics_of
from eyas.train.parallel.engine import TrainingEngine


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation needs besides the head.

    Attributes:
        documents: this process's share of the held-out conversations.
        embedding_VH: the target's embedding, on the CPU. target_readout_DH: its readout rows of the draft vocabulary, on
            the device, for heads without a readout of their own.
        chain_length: drafted tokens k.
    """

    documents: Sequence[Document]
    embedding_VH: Tensor
    target_readout_DH: Tensor | None
    chain_length: int
    autocast: torch.dtype | None

    def statistics(self, head: DraftHead, *, engine: TrainingEngine) -> ChainStatistics:
        """Chain acceptance over the shares of all processes; every process calls it with the same weights."""
        hits_K = heldout_hits(
            head,
            self.documents,
            embedding_VH=self.embedding_VH,
            target_readout_DH=self.target_readout_DH,
            num_tokens=self.chain_length,
            device=engine.device,
            autocast=self.autocast,
        )
        return statistics_of(engine.sum(hits_K.to(engine.device)))
