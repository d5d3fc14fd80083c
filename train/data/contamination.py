"""Whether a prompt is, or shares a passage with, one that is kept for measuring.

Texts are compared in a normal form: Unicode NFKC, case folded, words without punctuation between them. Scripts that are
written without spaces have a word for each character. A prompt overlaps if its words run together are those of a guarded prompt
("exact"), or if some n words in a row are also n words in a row of one ("ngram"; n = 13 is the custom since GPT-3, arXiv
2005.14165, appendix C). Prompts shorter than n words can only match exactly: a shorter passage is shared by chance.

Memory: 8 bytes for each n-gram and about 100 for each text of the guarded side, nothing for the other.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

Overlap = Literal["exact", "ngram"]

# Thai, kana and Han (also outside the basic plane) are written without spaces.
_UNSPACED = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def words(text: str) -> list[str]:
    """The words of a text in its normal form."""
    if text.isascii():
        return _WORD.findall(text.casefold())
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    # Marks that combine with letters are no word characters to `re`, and would cut words of many scripts into pieces.
    return _WORD.findall("".join(character for character in folded if unicodedata.category(character)[0] != "M"))


class PromptGuard:
    """Finds prompts that overlap one of the guarded prompts."""

    def __init__(self, prompts: Iterable[str], *, ngram: int | None) -> None:
        """Remember the guarded prompts.

        Args:
            ngram: words in a row that count as overlap; None compares whole prompts only.
        """
        self.ngram = ngram
        self._exact: set[int] = set()
        hashes: list[np.ndarray] = []
        for prompt in prompts:
            prompt_words = words(prompt)
            if prompt_words:
                self._exact.add(_joined(prompt_words))
            if ngram is not None:
                hashes.append(_ngram_hashes(prompt_words, ngram))
        self._ngrams = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, dtype=np.uint64)

    def overlap(self, text: str) -> Overlap | None:
        """How a prompt overlaps the guarded ones; None if it does not."""
        text_words = words(text)
        if text_words and _joined(text_words) in self._exact:
            return "exact"
        if self.ngram is None or not len(self._ngrams):
            return None
        hashes = _ngram_hashes(text_words, self.ngram)
        places = np.minimum(np.searchsorted(self._ngrams, hashes), len(self._ngrams) - 1)
        return "ngram" if bool((self._ngrams[places] == hashes).any()) else None


def _joined(text_words: Sequence[str]) -> int:
    return hash("".join(text_words))


def _ngram_hashes(text_words: Sequence[str], n: int) -> np.ndarray:
    """A 64-bit hash of every n words in a row; two different ones agree with a probability of about 2^-64.

    Python's string hash is keyed anew in every process, so these are for use within one.
    """
    count = len(text_words) - n + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    single = np.array([hash(word) & _MASK for word in text_words], dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for offset in range(n):
        total = total * _MULTIPLIER + single[offset : offset + count]
    return total
