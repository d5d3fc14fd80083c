"""How documents fill batches, batches are dealt out to processes, and a process's share becomes packs.

Pure functions of lengths and costs in whole numbers, so every process of a run finds the same answer.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

LOOKAHEAD = 1024
"""Documents among which one is looked for that fills what is left of a batch."""

_PLACE_BITS = 40


def fill_batches(lengths: Sequence[int], *, budget: int, lookahead: int = LOOKAHEAD) -> list[list[int]]:
    """Group documents, given in the order of training by their lengths, into batches of at most `budget` tokens.

    A batch takes the document that waits longest as long as it fits, so none waits for long and a batch is a sample of
    the documents; then, of the next `lookahead`, the longest that fits, until none does. A document longer than the
    budget is a batch of its own.

    Returns:
        Places in `lengths`, each in one batch.
    """
    waiting: list[int] = []  # length and place in one number, ascending
    taken = bytearray(len(lengths))
    batches: list[list[int]] = []
    oldest = arrived = 0
    while oldest < len(lengths):
        for place in range(arrived, min(len(lengths), arrived + lookahead - len(waiting))):
            key = lengths[place] << _PLACE_BITS | place
            waiting.insert(bisect_left(waiting, key), key)
            arrived = place + 1
        batch: list[int] = []
        room = max(budget, lengths[oldest])
        while oldest < arrived:
            if lengths[oldest] <= room:
                at = bisect_left(waiting, lengths[oldest] << _PLACE_BITS | oldest)
            else:
                at = bisect_right(waiting, (room + 1) << _PLACE_BITS) - 1
                if at < 0:
                    break
                # Of the same length, the one that waits longest.
                at = bisect_left(waiting, waiting[at] >> _PLACE_BITS << _PLACE_BITS)
            place = waiting.pop(at) & (1 << _PLACE_BITS) - 1
            taken[place] = 1
            batch.append(place)
            room -= lengths[place]
            while oldest < arrived and taken[oldest]:
                oldest += 1
        batches.append(batch)
    return batches


def deal(documents: Sequence[int], *, costs: Sequence[int], parts: int) -> list[list[int]]:
    """Documents in `parts` shares of nearly equal cost: the costliest first, each to the share that has least.

    That is the longest-processing-time rule: the largest share costs at most 4/3 of the best possible (Graham, 1969).

    Args:
        costs: of every document of the split, by its index.
    """
    if parts == 1:
        return [list(documents)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    least = [(0, part) for part in range(parts)]
    for document in sorted(documents, key=lambda index: (-costs[index], index)):
        cost, part = least[0]
        shares[part].append(document)
        heapq.heapreplace(least, (cost + costs[document], part))
    return shares


def first_fit(documents: Sequence[int], *, lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Documents in few packs of at most `limit` tokens, the longest first; a longer document is a pack of its own."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    for document in sorted(documents, key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        for number, room in enumerate(rooms):
            if length <= room:
                packs[number].append(document)
                rooms[number] -= length
                break
        else:
            packs.append([document])
            rooms.append(limit - length)
    return packs


def spread(
    documents: Sequence[int], *, lengths: Sequence[int], costs: Sequence[int], limit: int, count: int
) -> list[list[int]]:
    """Documents in `count` packs within `limit`, alike in cost where that fits, else as `first_fit` has them.

    `count` is at least what `first_fit` needs. Fewer packs come back where there are fewer documents or none were split.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    tokens, spent = [0] * count, [0] * count
    for document in sorted(documents, key=lambda index: (-costs[index], index)):
        length = lengths[document]
        fitting = [number for number in range(count) if not packs[number] or tokens[number] + length <= limit]
        if not fitting:
            return first_fit(documents, lengths=lengths, limit=limit)
        number = min(fitting, key=spent.__getitem__)
        packs[number].append(document)
        tokens[number] += length
        spent[number] += costs[document]
    return [pack for pack in packs if pack]
