"""The first pass of collect: sources stream into one scratch file, checked, filtered, without equal prompts, mixed.

What stays in memory of a conversation is where it stands, where it is from, its split, and three hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from eyas.train.data.conversations import (
    Conversation,
    encode_record,
    first_user_turn,
    prompt_hash,
    to_record,
)
from eyas.train.data.dedupe import exact_key
from eyas.train.data.filters import Filters
from eyas.train.data.mix import check_weights, mix
from eyas.train.data.sources import SourceReader


@dataclass
class Gathered:
    """One entry for each conversation of the scratch file, in order."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    sources: array[int] = field(default_factory=lambda: array("L"))
    heldout: array[int] = field(default_factory=lambda: array("B"))
    prompts: array[int] = field(default_factory=lambda: array("Q"))
    """`prompt_hash` of the first user turn, by which the held-out side is limited."""
    ids: array[int] = field(default_factory=lambda: array("Q"))
    """`id_hash` of the id."""

    def __len__(self) -> int:
        return len(self.offsets)

    def add(self, conversation: Conversation, *, source: int, offset: int) -> None:
        """Take note of a conversation that begins at `offset`."""
        self.offsets.append(offset)
        self.sources.append(source)
        self.heldout.append(conversation.split == "heldout")
        self.prompts.append(prompt_hash(first_user_turn(conversation.messages)))
        self.ids.append(id_hash(conversation.id))


class UniqueIds:
    """Gives ids that occurred before a suffix, "ID~2", "ID~3", ..., and leaves all others as they are."""

    def __init__(self, hashes: Sequence[int]) -> None:
        """`hashes`: `id_hash` of every id there is; only the repeated ones are ever held as text."""
        self._all, counts = np.unique(np.array(hashes, dtype=np.uint64), return_counts=True)
        self._repeated = self._all[counts > 1]
        self._given: dict[str, int] = {}

    def unique(self, identity: str) -> str:
        """The id under which to write a conversation that came with this one."""
        if not _contains(self._repeated, id_hash(identity)):
            return identity
        if identity not in self._given:
            self._given[identity] = 1
            return identity
        while True:
            self._given[identity] += 1
            candidate = f"{identity}~{self._given[identity]}"
            if not _contains(self._all, id_hash(candidate)):
                return candidate


def gather(
    path: Path,
    readers: Sequence[SourceReader],
    *,
    filters: Filters,
    when_exhausted: Literal["stop", "continue"],
    max_conversations: int | None,
    heldout_share: float,
) -> Gathered:
    """Write the conversations of all sources to the scratch file `path`, in the order of the mix.

    Raises:
        ValueError: weights or filters that cannot be, or a bad row where those stop the run.
    """
    filters.check()
    seen: set[int] = set()
    streams = [_wanted(reader, filters=filters, seen=seen, heldout_share=heldout_share) for reader in readers]
    weights = check_weights([reader.source.weight for reader in readers])
    mixed = mix(streams, weights=weights, when_exhausted=when_exhausted, limit=max_conversations)
    gathered, offset = Gathered(), 0
    with path.open("wb") as stream:
        for source, conversation in tqdm(mixed, desc="collect", unit=" conversations", disable=None):
            line = encode_record(to_record(conversation))
            stream.write(line)
            gathered.add(conversation, source=source, offset=offset)
            offset += len(line)
    for reader in readers:
        reader.close()
    return gathered


def id_hash(identity: str) -> int:
    """A stable 64-bit number for an id."""
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest())


def _wanted(reader: SourceReader, *, filters: Filters, seen: set[int], heldout_share: float) -> Iterator[Conversation]:
    """Conversations of a source that pass the filters and that no source has given before, up to the source's limit."""
    taken = 0
    limit = reader.source.limit
    for conversation in reader.conversations(heldout_share=heldout_share):
        reason = filters.reason_against(conversation)
        if reason is None:
            key = exact_key(conversation)
            reason = "duplicate" if key in seen else None
            seen.add(key)
        if reason is not None:
            reader.tally.dropped[reason] += 1
            continue
        taken += 1
        yield conversation
        if taken == limit:
            return


def _contains(ascending: np.ndarray, value: int) -> bool:
    wanted = np.uint64(value)
    place = int(np.searchsorted(ascending, wanted))
    return place < len(ascending) and bool(ascending[place] == wanted)
