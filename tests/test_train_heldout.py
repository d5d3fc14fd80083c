"""Held-out acceptance: shares of a split add up, and counts are those of walking the answers by hand."""

from __future__ import annotations

import pytest
import torch

from eyas.heads.drafting import chain_statistics, draft_one_chain, leading_hits
from eyas.heads.head import DraftHead
from eyas.heads.slots import teacher_positions
from eyas.train.features.documents import Document, states_of
from eyas.train.features.teacher import HiddenTeacher
from eyas.train.heldout import heldout_hits, heldout_statistics, statistics_of
from tests.tiny import VARIANTS, head_config, random_head

V, H = 100, 32
EMBEDDING, READOUT = torch.randn(2, V, H, generator=torch.Generator().manual_seed(0)).unbind()
CPU = torch.device("cpu")


def _document(*spans: tuple[int, int], seed: int) -> Document:
    generator = torch.Generator().manual_seed(seed)
    mask_T = torch.zeros(24, dtype=torch.bool)
    for begin, end in spans:
        mask_T[begin:end] = True
    captured, last = torch.randn(24, 3 * H, generator=generator), torch.randn(24, H, generator=generator)
    # Few tokens, so that random drafts are right now and then.
    token_ids = torch.randint(0, 3, (24,), generator=generator)
    return Document(token_ids, mask_T, captured, last, HiddenTeacher(last[teacher_positions(mask_T)]))


def _hits(head: DraftHead, documents: list[Document]) -> torch.Tensor:
    return heldout_hits(
        head,
        documents,
        embedding_VH=None if head.embed_tokens is not None else EMBEDDING,
        target_readout_DH=READOUT if head.config.kind == "eagle" else None,
        num_tokens=3,
        device=CPU,
        autocast=None,
    )


def _head(variant: str) -> DraftHead:
    head = random_head(head_config(**VARIANTS[variant]))
    if head.config.kind == "eagle3":
        head.draft_to_target_D = torch.arange(head.config.draft_vocab_size)
        with torch.no_grad():
            head.lm_head.weight[3:] = 0.0  # drafts are mostly of the tokens that there are
    return head


@pytest.mark.parametrize("variant", ["eagle3", "embedding", "eagle"])
def test_shares_of_a_split_add_up(variant: str) -> None:
    head = _head(variant)
    documents = [_document((3, 12), (15, 24), seed=0), _document(seed=1), _document((5, 20), seed=2)]
    whole = _hits(head, documents)
    assert whole.dtype == torch.int64
    assert whole.shape == (4,)
    assert torch.equal(whole, _hits(head, documents[:1]) + _hits(head, documents[1:]))
    assert torch.equal(_hits(head, []), torch.zeros(4, dtype=torch.int64))
    statistics = statistics_of(whole.double())
    assert (statistics.num_drafts, *statistics.hits) == tuple(whole.tolist())


def test_counts_are_those_of_a_walk_with_a_cache_filled_by_hand() -> None:
    head = _head("eagle3")
    document = _document((3, 12), (15, 24), seed=0)
    accepted: list[int] = []
    for begin, end in ((3, 12), (15, 24)):
        slot = begin - 1
        while slot + 2 < end:
            draft = draft_one_chain(
                head,
                embedding_VH=EMBEDDING,
                target_readout_DH=None,
                token_ids_T=document.token_ids_T,
                states_TX=states_of(document, source="captured"),
                slot=slot,
                num_tokens=3,
            )
            accepted.append(leading_hits(draft, document.token_ids_T[slot + 2 : end].tolist()))
            slot += accepted[-1] + 1
    assert sum(accepted) > 0
    expected = chain_statistics(accepted, num_tokens=3)
    assert (
        heldout_statistics(
            head,
            [document],
            embedding_VH=EMBEDDING,
            target_readout_DH=None,
            num_tokens=3,
            device=CPU,
            autocast=None,
        )
        == expected
    )
