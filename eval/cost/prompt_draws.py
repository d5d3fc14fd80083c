"""How far tau and the ratio of throughputs move under other weights of the same prompts.

A head accepts some prompts well and some badly, so a break-even rests on the prompts as it does on the starts. A prompt
gets one random weight for all arms and batch sizes (a Bayesian bootstrap): where a cell has more of the same prompts as
another, their luck is common to both. The turns of a conversation are one prompt. The noise of single answers is in these
draws as in those of the starts, so intervals from both are a little too long rather than too short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from eyas.eval.cost.steps import BySize, all_blocks
from eyas.eval.records import AR, Blocks, CellRecord
from eyas.eval.samples import take_sample

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]
"""Prompt (or conversation) -> [draws] its weights, 1 on average."""


def draw_weights(by_size: BySize, *, count: int, seed: int) -> Weights:
    """Exponential weights of every prompt of one (dataset, temperature)."""
    prompts = sorted(set().union(*(_prompts(by_arm) for by_arm in by_size.values())))
    drawn = np.random.default_rng(seed).standard_exponential((len(prompts), count))
    return dict(zip(prompts, drawn, strict=True))


def common_prompts(by_size: BySize) -> set[str]:
    """Prompts that the cells of all batch sizes have; all prompts where they have none in common.

    A larger batch needs more prompts. Only over common ones is tau's course over the batch size not that of the prompts.
    """
    own = [_prompts(by_arm) for by_arm in by_size.values()]
    return set.intersection(*own) or set().union(*own)


def _prompts(by_arm: Mapping[str, Sequence[Blocks]]) -> set[str]:
    cells = [cell for starts in by_arm.values() for cell in all_blocks(starts)]
    return {request.unit for cell in cells for request in cell.requests}


def tau_factors(cells: Iterable[CellRecord], weights: Weights) -> Floats:
    """[draws] tau of an arm in some cells over the prompts of `weights`, so weighted, over tau of all answers there.

    tau here is of each answer's own chunks: tokens after the first chunk per chunk, whatever the other requests of a step
    were at.
    """
    tokens: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    for cell in cells:
        for request in cell.requests:
            tokens[request.unit] += sum(request.chunk_sizes[1:])
            chunks[request.unit] += len(request.chunk_sizes) - 1
    prompts = [prompt for prompt in weights if chunks[prompt]]
    if not prompts:  # answers that came in one chunk each say nothing about tau
        return np.ones(1)
    return _weighted(tokens, prompts, weights) / _weighted(chunks, prompts, weights) * chunks.total() / tokens.total()


def throughput_factors(by_arm: Mapping[str, Sequence[Blocks]], arm: str, weights: Weights) -> Floats:
    """[draws] throughput of `arm` over that of AR in one cell under the weights, over that ratio as it is."""
    moved = []
    for name in (AR, arm):
        sample = take_sample(by_arm[name], metric="throughput")
        own = np.stack([weights[prompt] for prompt in sample.prompts], axis=1)
        moved.append(sample.weighted(own) - sample.start_means().mean())
    plain, treated = moved
    return np.exp(treated - plain)


def _weighted(sums: Mapping[str, int], prompts: Sequence[str], weights: Weights) -> Floats:
    return np.sum([sums[prompt] * weights[prompt] for prompt in prompts], axis=0)
