"""Which slots a chain attends to, as few blocks of queries and keys: the plan of the CPU's attention.

The query of slot t sees the slots from `lo(t)` to t, where lo is the first slot of its document or, with a window, of
its reach; lo never falls from one query to the next. A *run* is queries of consecutive slots of one document. Queries
are handled in groups: a run; a piece of one, where a window moves along it; or short runs and documents together, so
that many short answers do not cost a call each. The keys of a group that all its queries see are one full block, those
among the queries themselves one causal or masked block, and those that a window hides from later queries one masked
block. No mask is larger than a tile times two tiles, so memory is linear in the number of slots.

Shapes: S queries, L keys of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 256
"""Slots that a group with a mask spans, unless it has few queries."""

HIDDEN = -1e30
"""Added to a score that is not seen. It is finite, since a query may see nothing of a block."""


@dataclass(frozen=True)
class Block:
    """Keys of the slots [begin, end). `causal`: queries and keys are the same slots; `mask_SL` is added to scores."""

    begin: int
    end: int
    causal: bool = False
    mask_SL: Tensor | None = None


@dataclass(frozen=True)
class Group:
    """Queries [begin, end), by their number, and the blocks of keys that they see."""

    begin: int
    end: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class _Run:
    begin: int
    end: int
    first_slot: int
    end_slot: int
    document: int  # its first slot


def plan_groups(slots_S: Tensor, *, starts_S: Tensor, reach: int | None, tile: int = TILE) -> list[Group]:
    """Groups that cover all queries in order.

    Args:
        slots_S: ascending slots of the queries; starts_S: the first slot of each one's document. On the CPU.
        reach: slots that a query sees, its own included; None is all of its document before it.
    """
    if reach is not None and reach < 1:
        return []
    low_S = starts_S if reach is None else torch.maximum(starts_S, slots_S - reach + 1)
    runs = _runs(slots_S, starts_S)
    if reach is not None:
        runs = [piece for run in runs for piece in _cut(run, tile)]
    groups: list[Group] = []
    for begin, end in _gathered(runs, tile):
        blocks = _blocks(slots_S[begin:end], low_S[begin:end])
        groups.append(Group(begin, end, tuple(blocks)))
    return groups


def _runs(slots_S: Tensor, starts_S: Tensor) -> list[_Run]:
    if slots_S.numel() == 0:
        return []
    breaks_S = (slots_S[1:] - slots_S[:-1] != 1) | (starts_S[1:] != starts_S[:-1])
    bounds = [0, *(breaks_S.nonzero().squeeze(1) + 1).tolist(), slots_S.shape[0]]
    firsts, documents = slots_S[bounds[:-1]].tolist(), starts_S[bounds[:-1]].tolist()
    return [
        _Run(begin, end, first, first + end - begin, document)
        for begin, end, first, document in zip(bounds[:-1], bounds[1:], firsts, documents, strict=True)
    ]


def _cut(run: _Run, tile: int) -> list[_Run]:
    """A run in pieces of at most `tile` queries."""
    pieces = range(run.begin, run.end, tile)
    shift = run.first_slot - run.begin
    ends = [min(begin + tile, run.end) for begin in pieces]
    return [_Run(begin, end, begin + shift, end + shift, run.document) for begin, end in zip(pieces, ends, strict=True)]


def _gathered(runs: list[_Run], tile: int) -> list[tuple[int, int]]:
    """First and last + 1 query of each group: runs are taken together while they span at most a tile.

    Runs of several documents go together only where the first of these documents lies within the tile as a whole. Few
    queries of one document may span more, as long as their mask is no larger than half a tile's.
    """
    bounds: list[tuple[int, int]] = []
    base, document, whole = 0, -1, False
    for run in runs:
        span, same = run.end_slot - base, run.document == document
        if bounds and (
            (span <= tile and (whole or same)) or (same and (run.end - bounds[-1][0]) * span <= tile * tile // 2)
        ):
            bounds[-1] = (bounds[-1][0], run.end)
            continue
        bounds.append((run.begin, run.end))
        document = run.document
        whole = run.end_slot - document <= tile
        base = document if whole else run.first_slot
    return bounds


def _blocks(slots_S: Tensor, low_S: Tensor) -> list[Block]:
    """Blocks of one group: keys hidden from later queries, keys that all see, and those of the queries themselves."""
    first, end = int(slots_S[0]), int(slots_S[-1]) + 1
    lowest, highest = int(low_S[0]), int(low_S[-1])
    consecutive = end - first == slots_S.shape[0]
    if highest > first or (highest == first and not (consecutive and lowest == first)):
        return [Block(lowest, end, mask_SL=_mask(slots_S, low_S, lowest, end))]
    blocks: list[Block] = []
    if consecutive:
        blocks.append(Block(first, end, causal=True))
    else:
        blocks.append(Block(first, end, mask_SL=_mask(slots_S, low_S, first, end)))
    if highest < first:
        blocks.append(Block(highest, first))
    if lowest < highest:
        blocks.append(Block(lowest, highest, mask_SL=_mask(slots_S, low_S, lowest, highest)))
    return blocks


def _mask(slots_S: Tensor, low_S: Tensor, begin: int, end: int) -> Tensor:
    keys_L = torch.arange(begin, end)
    hidden_SL = (keys_L > slots_S[:, None]) | (keys_L < low_S[:, None])
    return torch.zeros(hidden_SL.shape).masked_fill_(hidden_SL, HIDDEN)
