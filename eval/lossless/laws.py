"""Exact laws of speculative sampling on a tiny model, in float64: what a right sampler must emit, cell by cell.

The model is a Markov chain: the target's distribution of the token at position i depends on the token before it, and so
does the draft's. For such a model the law of everything a sampler emits is a few matrix products (Leviathan et al. 2023,
arXiv 2211.17192, theorem 3.5 and appendix A.1), against which counts are tested.

Shapes: K drafted tokens, V tokens; position i of K + 1 has a table [V (token before), V (token)].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eyas.eval.lossless.chi_square import Floats, Ints

Drafts = Literal["sampled", "one-hot"]
"""Sampled from the draft's distribution, or its likeliest token, taken as certain: vLLM's default for heads."""

START = 0
"""The token before the first position."""

SHARED = 0.55
"""Share of the target's distribution in the draft's. It makes about half of the chains of three reach the bonus token."""


@dataclass(frozen=True)
class Model:
    """Target and draft as Markov chains. `target` and `draft`: [K + 1, V, V], rows sum to 1, float64."""

    target: Floats
    draft: Floats

    @property
    def draft_length(self) -> int:
        return len(self.target) - 1

    @property
    def vocabulary(self) -> int:
        return self.target.shape[-1]


def make_model(*, vocabulary: int, draft_length: int, seed: int) -> Model:
    """A random model with the awkward cases in it.

    The target gives some tokens no probability (as top-k filtering does), and the draft gives none to others (as a
    reduced draft vocabulary does), so that a sampler cannot be right by never meeting a zero.
    """
    generator = np.random.default_rng(seed)
    shape = (draft_length + 1, vocabulary)
    target = generator.dirichlet(np.full(vocabulary, 0.3), size=shape)
    target[:, :, vocabulary - 1] = 0
    target /= target.sum(axis=-1, keepdims=True)
    draft = SHARED * target + (1 - SHARED) * generator.dirichlet(np.full(vocabulary, 0.7), size=shape)
    draft[:, :, 1] = 0
    draft /= draft.sum(axis=-1, keepdims=True)
    return Model(target, draft)


def one_hot_draft(model: Model) -> Floats:
    """The draft's likeliest token as a distribution of its own, [K + 1, V, V]."""
    certain = np.zeros_like(model.draft)
    np.put_along_axis(certain, model.draft.argmax(axis=-1)[..., None], 1.0, axis=-1)
    return certain


def draft_tables(model: Model, drafts: Drafts) -> Floats:
    """The distributions drafts really come from, [K + 1, V, V]."""
    return model.draft if drafts == "sampled" else one_hot_draft(model)


def emitted_laws(model: Model, drafts: Drafts, *, lengths: Sequence[int]) -> list[Floats]:
    """Law of what is emitted at each position 1 .. K + 1: [V + 1], the last cell being "nothing".

    A position is emitted when every draft before it was accepted, and its token then follows the target.

    Args:
        lengths: drafted tokens of the rows that are mixed, in equal shares.
    """
    per_length = [_emitted_laws(model, drafts, length=length) for length in lengths]
    return [np.mean([laws[position] for laws in per_length], axis=0) for position in range(model.draft_length + 1)]


def _emitted_laws(model: Model, drafts: Drafts, *, length: int) -> list[Floats]:
    accepted = np.minimum(model.target, draft_tables(model, drafts))
    reach = np.zeros(model.vocabulary)
    reach[START] = 1
    laws = []
    for position in range(model.draft_length + 1):
        emitted = reach @ model.target[position]
        laws.append(np.append(emitted, max(0.0, 1 - emitted.sum())))
        reach = reach @ accepted[position] if position < length else np.zeros(model.vocabulary)
    return laws


def pair_law(model: Model) -> Floats:
    """Law of the first two tokens of the text, [V * V], whatever the drafts: that is the claim of losslessness."""
    return (model.target[0][START][:, None] * model.target[1]).reshape(-1)


def pair_counts(first: Ints, second: Ints, *, vocabulary: int) -> list[int]:
    """How often each pair occurred, in the order of `pair_law`."""
    return np.bincount(first * vocabulary + second, minlength=vocabulary**2).tolist()


def position_counts(emitted_NK: Ints, *, vocabulary: int) -> list[list[int]]:
    """Counts at each position in the order of `emitted_laws`. `emitted_NK`: [N, K + 1], -1 where nothing was emitted."""
    filled = np.where(emitted_NK < 0, vocabulary, emitted_NK)
    return [np.bincount(column, minlength=vocabulary + 1).tolist() for column in filled.T]
