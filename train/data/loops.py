"""Loops: text that says the same again and again, which small targets fall into.

A head learns nothing from such an answer, and it makes acceptance look better than it is.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_NGRAM = 8


def repeated_ngram_share(token_ids: Sequence[int], *, n: int = LOOP_NGRAM) -> float:
    """Share of the n-grams of `token_ids` that occurred before; 0 for texts shorter than two n-grams."""
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 0.0 if len(ngrams) < n else 1.0 - len(set(ngrams)) / len(ngrams)
