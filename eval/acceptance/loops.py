"""Answers that repeat themselves. A loop is easy to draft, so it lifts acceptance; it is counted, flagged, never hidden."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.eval.records import RequestRecord

LOOP_NGRAM = 8
LOOP_SHARE = 0.3
"""An answer is flagged as looping when more than this share of its 8-grams repeats an earlier one."""


def repeated_ngram_share(token_ids: Sequence[int], *, length: int = LOOP_NGRAM) -> float:
    """Share of the n-grams of `token_ids` that occurred before in it; 0 when it is shorter than one n-gram."""
    ngrams = [tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def is_loop(request: RequestRecord) -> bool:
    return repeated_ngram_share(request.token_ids) > LOOP_SHARE
