"""Fabricated records with noise of known size, for the tests of the statistics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eyas.eval.records import AR, ArmFacts, Blocks, CellKey, CellRecord, Cells, Kind
from tests.eval_records import cell, head_config


def noisy_cell(
    rate: float,
    generator: np.random.Generator,
    *,
    requests: int = 16,
    answer_sd: float = 0.05,
    batch_size: int = 1,
    dataset: str = "heldout",
    block: int = 0,
) -> CellRecord:
    """A block run one request at a time, in which the duration of every answer has noise of its own."""
    clock = 0.0
    served = []
    plain = cell(rate, requests=requests, dataset=dataset, block=block)
    for each in plain.requests:
        stretch = float(np.exp(answer_sd * generator.standard_normal()))
        seconds, first = (each.t_finish - each.t_submit) * stretch, (each.t_first - each.t_submit) * stretch
        served.append(replace(each, t_submit=clock, t_first=clock + first, t_finish=clock + seconds))
        clock += seconds
    return replace(plain, requests=served, makespan=clock, batch_size=batch_size)


def noisy_starts(
    rate: float,
    generator: np.random.Generator,
    *,
    starts: int,
    start_sd: float = 0.03,
    blocks: int = 1,
    requests: int = 16,
    batch_size: int = 1,
) -> list[Blocks]:
    """Starts of one arm in one cell; each has one effect on all its blocks."""
    effects = np.exp(start_sd * generator.standard_normal(starts))
    return [
        [
            noisy_cell(rate * float(effect), generator, block=block, requests=requests, batch_size=batch_size)
            for block in range(blocks)
        ]
        for effect in effects
    ]


def noisy_session(
    ratios: dict[str, float], *, seed: int, cells: int = 6, starts: int = 4, start_sd: float = 0.03, requests: int = 16
) -> Cells:
    """Cells of growing batch size; `ratios` are the true throughputs of the arms over AR's."""
    generator = np.random.default_rng(seed)
    session: Cells = {}
    for index in range(cells):
        size = index + 1
        session[CellKey("heldout", 0.0, size)] = {
            arm: noisy_starts(
                40 * size * ratio, generator, starts=starts, start_sd=start_sd, requests=requests, batch_size=size
            )
            for arm, ratio in {AR: 1.0, **ratios}.items()
        }
    return session


def facts(*arms: str, kind: Kind = "head", synthetic: bool = False) -> dict[str, ArmFacts]:
    """AR and arms of one kind."""
    own = {arm: ArmFacts(kind, 3, head_config(3), synthetic) for arm in arms}
    return {AR: ArmFacts("ar", 0, None, False), **own}
