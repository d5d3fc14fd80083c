"""Near-duplicate prompts: Jaccard similarity of character shingles, found by MinHash and banded hashing.

A prompt is the user's turns, lower-cased and with spacing made single, as the set of its 8-character pieces. Two prompts
under different instructions (system turns, tools) are different prompts however alike they are, because their pieces are
hashed together with the instructions.

A row of a signature is the smallest hash of the pieces under one of many hash functions; two prompts of similarity s agree in
a row with probability s, and in a band of r rows with s^r. Prompts that agree in any band are candidates (Leskovec, Rajaraman,
Ullman, Mining of Massive Datasets, chapter 3), and candidates are compared exactly, re-read from the file. So nothing is
dropped that is not similar; of pairs exactly at the threshold at most `MAX_MISSED` are overlooked, and of closer ones far
fewer (`Bands.missed`).

A conversation is dropped iff an earlier one that was kept is similar to it. Memory: 4 bytes a band, in a mapped file, and 13
bytes more for each conversation.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from eyas.train.data.conversations import Conversation, read_at

SHINGLE_CHARACTERS = 8
NUM_BANDS = 20
MAX_ROWS = 20
MAX_MISSED = 0.01
MIN_THRESHOLD = 0.5
"""Below it bands must be so short that unrelated prompts become candidates of each other by the million."""
CACHED_PROMPTS = 20_000
_BLOCK = 4096
_NONE = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Bands:
    """How signatures are cut for a threshold."""

    threshold: float
    rows: int
    number: int = NUM_BANDS

    def missed(self, similarity: float) -> float:
        """Probability that two prompts of this similarity are not compared."""
        return (1 - similarity**self.rows) ** self.number


def bands_for(threshold: float) -> Bands:
    """The longest bands that overlook at most `MAX_MISSED` of the pairs exactly at the threshold.

    Raises:
        ValueError: the threshold is not between `MIN_THRESHOLD` and 1.
    """
    if not MIN_THRESHOLD <= threshold <= 1:
        raise ValueError(
            f"data.near_duplicates is {threshold}, and must be between {MIN_THRESHOLD} and 1; 0.8 is a usual value, null "
            "drops equal prompts only"
        )
    fitting = [rows for rows in range(1, MAX_ROWS + 1) if Bands(threshold, rows).missed(threshold) <= MAX_MISSED]
    return Bands(threshold, rows=max(fitting))


def exact_key(conversation: Conversation) -> int:
    """60-bit key of what is asked: equal for conversations whose user turns and instructions differ only in case and spacing."""
    text = "\x1f".join([_instructions(conversation), *map(_plain, _user_turns(conversation))])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 4


def shingles(conversation: Conversation) -> np.ndarray:
    """Hashes of the distinct pieces of a prompt, ascending: uint64 [n], n >= 1."""
    text = "\n".join(map(_plain, _user_turns(conversation)))
    codes = np.frombuffer(text.ljust(SHINGLE_CHARACTERS).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    count = len(codes) - SHINGLE_CHARACTERS + 1
    instructions = _instructions(conversation)
    key = int.from_bytes(hashlib.blake2b(instructions.encode(), digest_size=8).digest()) if instructions else 0
    total = np.full(count, key, dtype=np.uint64)
    for offset in range(SHINGLE_CHARACTERS):
        total = total * np.uint64(0x9E3779B97F4A7C15) + codes[offset : offset + count]
    return np.unique(_scramble(total))


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Jaccard similarity of two sets of `shingles`."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def band_hashes(pieces: np.ndarray, *, bands: Bands, seed: int) -> np.ndarray:
    """The bands of a prompt's signature, each hashed to 32 bits: uint32 [bands]."""
    factors, terms = _hash_functions(bands.rows * bands.number, seed)
    signature = np.full(bands.rows * bands.number, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(pieces), _BLOCK):
        hashed = pieces[start : start + _BLOCK, None] * factors + terms
        np.minimum(signature, (hashed >> np.uint64(32)).min(axis=0), out=signature)
    total = np.arange(bands.number, dtype=np.uint64)
    for row in signature.reshape(bands.number, bands.rows).T:
        total = _scramble(total * np.uint64(0x9E3779B97F4A7C15) + row)
    return (total >> np.uint64(33)).astype(np.uint32)  # 31 bits, so that none is `_NONE`


def near_duplicate_mask(path: Path, *, offsets: Sequence[int], bands: Bands, scratch: Path, seed: int) -> np.ndarray:
    """Which conversations of a plain file are near-duplicates of an earlier one that is not: bool [n].

    Args:
        offsets: where each conversation begins.
        scratch: file for the bands, overwritten.
        seed: of the hash functions.
    """
    number = len(offsets)
    dropped = np.zeros(number, dtype=bool)
    if number < 2:
        return dropped
    table = np.memmap(scratch, dtype=np.uint32, mode="w+", shape=(bands.number, number))
    sizes = np.zeros(number, dtype=np.uint32)
    with path.open("rb") as stream:
        for index in tqdm(range(number), desc="signatures", disable=None):
            pieces = shingles(read_at(stream, offsets[index]))
            sizes[index] = len(pieces)
            table[:, index] = band_hashes(pieces, bands=bands, seed=seed)
        for band in table:
            _link(band)

        @functools.lru_cache(maxsize=CACHED_PROMPTS)
        def pieces_of(index: int) -> np.ndarray:
            return shingles(read_at(stream, offsets[index]))

        candidates = np.flatnonzero((table != _NONE).any(axis=0))
        for index in tqdm(candidates.tolist(), desc="near-duplicates", disable=None):
            dropped[index] = _is_near(
                index, table=table, dropped=dropped, sizes=sizes, threshold=bands.threshold, pieces_of=pieces_of
            )
    return dropped


def _link(band: np.ndarray) -> None:
    """Replace each conversation's hash by the number of the one before it with the same hash; `_NONE` if there is none."""
    order = np.argsort(band, kind="stable")
    same = band[order][1:] == band[order][:-1]
    band[:] = _NONE
    band[order[1:][same]] = order[:-1][same]


def _is_near(
    index: int,
    *,
    table: np.ndarray,
    dropped: np.ndarray,
    sizes: np.ndarray,
    threshold: float,
    pieces_of: Callable[[int], np.ndarray],
) -> bool:
    """Compare a conversation with the kept ones before it that share a band with it."""
    compared: set[int] = set()
    for band in table:
        other = band[index]
        while other != _NONE and dropped[other]:
            other = band[other]
        band[index] = other  # later walks need not pass the dropped ones again
        while other != _NONE:
            if not dropped[other] and int(other) not in compared:
                compared.add(int(other))
                smaller, larger = sorted((int(sizes[index]), int(sizes[other])))
                # Sets of very different size cannot be similar.
                if smaller >= threshold * larger and similarity(pieces_of(index), pieces_of(int(other))) >= threshold:
                    return True
            other = band[other]
    return False


def _user_turns(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == "user"]


def _instructions(conversation: Conversation) -> str:
    texts = [_plain(m["content"]) for m in conversation.messages if m["role"] in ("system", "developer")]
    if conversation.tools is not None:
        texts.append(json.dumps(conversation.tools, sort_keys=True, ensure_ascii=False))
    return "\x1f".join(texts)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _scramble(values: np.ndarray) -> np.ndarray:
    """Spread every bit over all 64 (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@functools.lru_cache(maxsize=4)
def _hash_functions(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Multipliers and terms of multiply-shift hashing: the upper half of (odd * x + b) modulo 2^64 is close to universal."""
    generator = np.random.default_rng(seed)
    factors, terms = generator.integers(0, 1 << 64, size=(2, number), dtype=np.uint64, endpoint=False)
    return factors | np.uint64(1), terms
