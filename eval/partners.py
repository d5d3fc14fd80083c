"""Which AR start ran beside which start of another arm, where two engines are measured side by side."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.eval.records import AR, StartRecord
from eyas.eval.stats import Partners


def partners_of(starts: Sequence[StartRecord]) -> Partners | None:
    """Arm -> its pairs of starts, as (index among the AR starts, index among the arm's own); None for protocol "starts".

    A start whose partner left no record is in no pair: alone it says nothing about a ratio.
    """
    if not any(start.protocol == "side-by-side" for start in starts):
        return None
    plain = {
        (start.phase, start.round, start.beside): index
        for index, start in enumerate(each for each in starts if each.arm == AR)
    }
    partners: dict[str, list[tuple[int, int]]] = {}
    own: dict[str, int] = {}
    for start in starts:
        if start.arm == AR:
            continue
        index = own.get(start.arm, 0)
        own[start.arm] = index + 1
        place = (start.phase, start.round, start.arm)
        if place in plain:
            partners.setdefault(start.arm, []).append((plain[place], index))
    return partners
