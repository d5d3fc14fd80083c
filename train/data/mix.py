"""Several streams become one in given shares, without chance: the next item comes from the stream that is most behind.

A stream is behind by what it has given so far divided by its weight; the first of equals goes first. So the shares are
within one item of exact at every point, and a run that is repeated mixes the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

T = TypeVar("T")


def check_weights(weights: Sequence[float | None]) -> list[float] | None:
    """The weights to mix by; None means one stream after another.

    Raises:
        ValueError: some streams have a weight and some have none, or a weight is no positive number.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) != len(weights):
        raise ValueError(
            "data.sources: some have a weight and some have none; give each one, or none to take all of every source"
        )
    if not all(weight > 0 and math.isfinite(weight) for weight in given):
        raise ValueError("data.sources: a weight must be a number above 0; remove a source that shall not be read")
    return given


def mix(
    streams: Sequence[Iterator[T]],
    *,
    weights: Sequence[float] | None,
    when_exhausted: Literal["stop", "continue"],
    limit: int | None = None,
) -> Iterator[tuple[int, T]]:
    """Items with the number of the stream each is from.

    Args:
        weights: shares in any unit; None takes the streams one after another, each to its end.
        when_exhausted: what happens when the next item's stream has none left: "stop" ends the mix, so that the shares
            hold; "continue" goes on with the others in their shares.
        limit: items at most.
    """
    taken = [0] * len(streams)
    open_streams = list(range(len(streams)))
    while open_streams and (limit is None or sum(taken) < limit):
        if weights is None:
            chosen = open_streams[0]
        else:
            chosen = min(open_streams, key=lambda index: (taken[index] / weights[index], index))
        try:
            item = next(streams[chosen])
        except StopIteration:
            if weights is not None and when_exhausted == "stop":
                return
            open_streams.remove(chosen)
            continue
        taken[chosen] += 1
        yield chosen, item
