"""Held-out tau: what the served acceptance will be, computed from features without an engine.

Drafts are made from every slot that a server could draft from and the greedy answer is walked as the server walks it
(heads/drafting.py). A miss ends a chain, and a target token outside the draft vocabulary is a miss. The estimate is
exact for greedy answers; on sampled ones it is the acceptance of argmax drafts at those answers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from eyas.heads.drafting import ChainStatistics, chain_statistics, draft_from_slots, simulate_chains
from eyas.heads.head import DraftHead
from eyas.heads.slots import contiguous_runs, serving_slots
from eyas.train.features.documents import Document, states_of


def heldout_statistics(
    head: DraftHead,
    documents: Iterable[Document],
    *,
    embedding_VH: Tensor | None,
    target_readout_DH: Tensor | None,
    num_tokens: int,
    device: torch.device,
    autocast: torch.dtype | None,
) -> ChainStatistics:
    """Chain acceptance over `documents`; arguments as of `heldout_hits`."""
    return statistics_of(
        heldout_hits(
            head,
            documents,
            embedding_VH=embedding_VH,
            target_readout_DH=target_readout_DH,
            num_tokens=num_tokens,
            device=device,
            autocast=autocast,
        )
    )


def heldout_hits(
    head: DraftHead,
    documents: Iterable[Document],
    *,
    embedding_VH: Tensor | None,
    target_readout_DH: Tensor | None,
    num_tokens: int,
    device: torch.device,
    autocast: torch.dtype | None,
) -> Tensor:
    """Counts of chains with `num_tokens` drafted tokens over `documents`, which add up over shares of a split.

    Args:
        head: with whole weights, on `device`.
        embedding_VH: the target's embedding, on any device; not read by a head with its own.
        target_readout_DH: the target's readout rows of the draft vocabulary on `device`; not read by a head with its own.
        autocast: dtype of matrix products, or None for float32 throughout.

    Returns:
        int64 [1 + K] on the CPU: draft steps, and those whose first 1, ..., K drafted tokens were all accepted.
    """
    accepted: list[int] = []
    with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        for document in documents:
            accepted += _document_chains(
                head,
                document,
                embedding_VH=embedding_VH,
                target_readout_DH=target_readout_DH,
                num_tokens=num_tokens,
                device=device,
            )
    statistics = chain_statistics(accepted, num_tokens=num_tokens)
    return torch.tensor([statistics.num_drafts, *statistics.hits])


def statistics_of(hits_K: Tensor) -> ChainStatistics:
    """Chain acceptance of the counts that `heldout_hits` gives, added up or not."""
    num_drafts, *hits = (int(count) for count in hits_K.tolist())
    return ChainStatistics(num_drafts=num_drafts, hits=tuple(hits))


def _document_chains(
    head: DraftHead,
    document: Document,
    *,
    embedding_VH: Tensor | None,
    target_readout_DH: Tensor | None,
    num_tokens: int,
    device: torch.device,
) -> list[int]:
    slots_S = serving_slots(document.answer_mask_T, num_steps=1)[0]
    if slots_S.numel() == 0:
        return []
    draft_SK = draft_from_slots(
        head,
        embedding_VH=embedding_VH,
        target_readout_DH=target_readout_DH,
        token_ids_T=document.token_ids_T.to(device),
        states_TX=states_of(document, source=head.feature_source).to(device, torch.float32),
        slots_S=slots_S,
        num_tokens=num_tokens,
    ).cpu()
    accepted: list[int] = []
    begin = 0
    for run_S in contiguous_runs(slots_S):
        end = begin + run_S.shape[0]
        # The answer ends two tokens after its last slot; what follows is the next prompt, which nobody drafts.
        truth_T = document.token_ids_T[: int(run_S[-1]) + 3]
        accepted += simulate_chains(draft_SK[begin:end], truth_T=truth_T, slots_S=run_S)
        begin = end
    return accepted
