"""The slow, obviously right sampler in float64, and the wrong ones that a test must catch.

Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1): accept a drafted token x with probability min(1, p(x) / q(x)); at the
first rejection draw from max(p - q, 0), normalised; when all are accepted draw one more from p.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from eyas.eval.lossless.chi_square import Floats, Ints
from eyas.eval.lossless.laws import START, Drafts, Model, draft_tables

Rule = Literal["right", "always-accept", "residual-p", "stale-q", "bonus-from-q"]

WRONG_RULES: dict[Rule, str] = {
    "always-accept": "every drafted token is accepted",
    "residual-p": "a rejected position is drawn again from p instead of max(p - q, 0)",
    "stale-q": "acceptance and residual use the draft's distribution of the position before",
    "bonus-from-q": "the bonus token is drawn from the draft's distribution",
}


def draw(probabilities_NV: Floats, generator: np.random.Generator) -> Ints:
    """One token of each row [N] by inverting the distribution function. A row's total may be below 1 by rounding."""
    cumulative = np.cumsum(probabilities_NV, axis=1)
    points = generator.random(len(cumulative))[:, None] * cumulative[:, -1:]
    return (cumulative <= points).sum(axis=1).clip(max=probabilities_NV.shape[1] - 1)


def draw_drafts(model: Model, drafts: Drafts, *, rows: int, generator: np.random.Generator) -> Ints:
    """Chains of drafted tokens [N, K]."""
    tables = draft_tables(model, drafts)
    before = np.full(rows, START)
    chains = np.empty((rows, model.draft_length), dtype=np.int64)
    for position in range(model.draft_length):
        before = draw(tables[position][before], generator)
        chains[:, position] = before
    return chains


def verify(model: Model, drafts: Drafts, chains_NK: Ints, *, rule: Rule, generator: np.random.Generator) -> Ints:
    """What the sampler emits for each chain: [N, K + 1], -1 behind the last emitted token."""
    rows, length = chains_NK.shape
    tables = draft_tables(model, drafts)
    emitted = np.full((rows, length + 1), -1, dtype=np.int64)
    alive = np.ones(rows, dtype=bool)
    before, before_that = np.full(rows, START), np.full(rows, START)
    for position in range(length):
        p, q = model.target[position][before], tables[position][before]
        if rule == "stale-q" and position:
            q = tables[position - 1][before_that]
        drafted = chains_NK[:, position]
        taken = generator.random(rows) * _at(q, drafted) < _at(p, drafted)
        if rule == "always-accept":
            taken[:] = True
        again = draw(p if rule == "residual-p" else _residual(p, q), generator)
        emitted[alive, position] = np.where(taken, drafted, again)[alive]
        alive &= taken
        before, before_that = drafted, before
    last = tables[length][before] if rule == "bonus-from-q" else model.target[length][before]
    emitted[alive, length] = draw(last, generator)[alive]
    return emitted


def _at(table_NV: Floats, tokens_N: Ints) -> Floats:
    return np.take_along_axis(table_NV, tokens_N[:, None], axis=1)[:, 0]


def _residual(p: Floats, q: Floats) -> Floats:
    """max(p - q, 0); where nothing is left (p = q) no token was rejected, and p only fills the row."""
    left = np.maximum(p - q, 0)
    return np.where(left.sum(axis=1, keepdims=True) > 0, left, p)


def second_tokens(model: Model, emitted_NK: Ints, *, generator: np.random.Generator) -> Ints:
    """The second token of each text [N]: the emitted one, or one that plain decoding draws after the first."""
    return np.where(emitted_NK[:, 1] < 0, draw(model.target[1][emitted_NK[:, 0]], generator), emitted_NK[:, 1])
