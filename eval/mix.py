"""A mix: one dataset drawn from all the others, so that a batch holds long and short prompts of several kinds at once.

A server meets such a batch, and drafting may fare worse in it than in any set alone: the rows of a batch that accept much
wait for those that accept little.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from eyas.eval.workload import LEFT_OUT, Request, Source, Workload, of_first_units, units

MIX = "mix"


def mix_workload(sets: Mapping[str, Sequence[Request]], *, limit: int, seed: int) -> Workload:
    """Independent prompts of every set in equal numbers as far as they go, `limit` in all, in an order drawn by `seed`.

    Any number of the first ones holds the sets in equal shares too. Ids carry their set's name, so that two sets may use
    the same ids.
    """
    draw = random.Random(seed)
    queues = []
    for name, requests in sets.items():
        by_unit = {unit: [each for each in requests if each.unit == unit] for unit in units(requests)}
        order = list(by_unit)
        draw.shuffle(order)
        queues.append([[_renamed(each, name) for each in by_unit[unit]] for unit in order])
    mixed: list[Request] = []
    for turn in zip_longest(*queues, fillvalue=[]):
        drawn = list(turn)
        draw.shuffle(drawn)
        mixed += [request for unit in drawn for request in unit]
    source = Source(f"drawn from {', '.join(sets)} with seed {seed}", None, None)
    return Workload(MIX, of_first_units(mixed, limit), dict.fromkeys(LEFT_OUT, 0), "all", source)


def _renamed(request: Request, name: str) -> Request:
    conversation = None if request.conversation is None else f"{name}/{request.conversation}"
    return replace(request, dataset=MIX, prompt_id=f"{name}/{request.prompt_id}", conversation=conversation)
