"""L0, what is tested: the cases, and the raw counts each leaves. `sampler.json` holds them; nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from eyas.eval.lossless.chi_square import Floats, Ints
from eyas.eval.lossless.laws import START, Drafts, Model, draft_tables, pair_counts, position_counts
from eyas.eval.lossless.reference import WRONG_RULES, Rule, draw_drafts, second_tokens, verify

VOCABULARY = 10
DRAFT_LENGTH = 3
MODEL_SEED = 7
ROUNDS = 50_000
"""Verification steps per case. Their smallest shift of one cell that is found at 1e-6 is about 2 %; they take seconds."""

RAGGED = (3, 1, 0, 2)
"""Chain lengths of neighbouring rows in a batch whose requests draft differently much."""

Sampler = Literal["vllm", "reference"]


@dataclass(frozen=True)
class Case:
    """One way to run a sampler.

    Attributes:
        sampler: vLLM's, or ours in float64.
        rule: "right", or how it is made wrong; a wrong one must be found out.
        drafts: sampled from the draft's distribution, or its likeliest token (vLLM's default for heads).
        temperature: at which vLLM gets logits that mean the model's distribution.
        seeded: every row has a generator of its own, as requests with a seed have.
        lengths: drafted tokens of neighbouring rows.
        greedy: none, every second row of a batch, or all rows decode greedily. Those are checked token by token.
    """

    name: str
    sampler: Sampler
    drafts: Drafts
    rule: Rule = "right"
    temperature: float = 1.0
    seeded: bool = False
    lengths: Sequence[int] = (DRAFT_LENGTH,)
    greedy: Literal["none", "half", "all"] = "none"


@dataclass(frozen=True)
class Counts:
    """What came out of a case: how often each token stood at each position (the last cell: nothing), and each first pair.

    `greedy_rows` and `greedy_wrong`: rows decoded greedily, and those that differ from the target's own argmax.
    """

    case: Case
    rounds: int
    positions: list[list[int]]
    pairs: list[int]
    greedy_rows: int = 0
    greedy_wrong: int = 0
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"case": asdict(self.case) | {"lengths": list(self.case.lengths)}}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Counts:
        return Counts(**{**raw, "case": Case(**raw["case"])})


def vllm_cases() -> list[Case]:
    """The code paths of vLLM's sampler that scoring uses, and one that must fail: vLLM given another position's q."""
    kinds: tuple[Drafts, ...] = ("one-hot", "sampled")
    cases = [Case(f"{drafts} drafts, temperature 1", "vllm", drafts) for drafts in kinds]
    cases += [Case(f"{drafts} drafts, temperature 0.7", "vllm", drafts, temperature=0.7) for drafts in kinds]
    cases += [Case(f"{drafts} drafts, a seed per request", "vllm", drafts, seeded=True) for drafts in kinds]
    cases += [Case(f"{drafts} drafts, ragged batch", "vllm", drafts, lengths=RAGGED) for drafts in kinds]
    return [
        *cases,
        Case("one-hot drafts, half the rows greedy", "vllm", "one-hot", greedy="half"),
        Case("all rows greedy", "vllm", "one-hot", greedy="all"),
        Case("control: vLLM given a stale q", "vllm", "sampled", rule="stale-q"),
    ]


def installed_cases() -> list[Case]:
    """What is run before anything is mended, to tell what the installed vLLM does."""
    kinds: tuple[Drafts, ...] = ("one-hot", "sampled")
    return [Case(f"as installed: {drafts} drafts, temperature 1", "vllm", drafts) for drafts in kinds]


def reference_cases() -> list[Case]:
    """Our sampler, and each wrong rule, which the same tests must find."""
    kinds: tuple[Drafts, ...] = ("one-hot", "sampled")
    right = [Case(f"reference, {drafts} drafts", "reference", drafts) for drafts in kinds]
    wrong = [
        Case(f"control: {rule}, {drafts} drafts", "reference", drafts, rule=rule)
        for drafts in kinds
        for rule in WRONG_RULES
        if not (rule == "stale-q" and drafts == "one-hot")  # a certain draft of another token has no ratio p / q
    ]
    return right + wrong


def count(model: Model, case: Case, emitted_NK: Ints, *, generator: np.random.Generator) -> Counts:
    """Counts of what the sampled (not greedy) rows of `case` emitted."""
    second = second_tokens(model, emitted_NK, generator=generator)
    return Counts(
        case,
        len(emitted_NK),
        position_counts(emitted_NK, vocabulary=model.vocabulary),
        pair_counts(emitted_NK[:, 0], second, vocabulary=model.vocabulary),
    )


def run_reference(model: Model, case: Case, *, rounds: int, seed: int) -> Counts:
    """Counts of `rounds` verification steps of our own sampler under the case's rule."""
    generator = np.random.default_rng(seed)
    chains = draw_drafts(model, case.drafts, rows=rounds, generator=generator)
    return count(
        model, case, verify(model, case.drafts, chains, rule=case.rule, generator=generator), generator=generator
    )


def greedy_emitted(model: Model, chains_NK: Ints) -> Ints:
    """What greedy verification emits: the target's argmax at each position, as far as the drafts agree with it."""
    rows, length = chains_NK.shape
    emitted = np.full((rows, length + 1), -1, dtype=np.int64)
    alive = np.ones(rows, dtype=bool)
    before = np.full(rows, START)
    for position in range(length + 1):
        best = model.target[position][before].argmax(axis=1)
        emitted[alive, position] = best[alive]
        if position < length:
            alive &= chains_NK[:, position] == best
            before = chains_NK[:, position]
    return emitted


@dataclass(frozen=True)
class Rows:
    """The inputs of N verification steps, flat over rows as engines hold them.

    Attributes:
        lengths_N: drafted tokens of each row.
        drafted: the drafted tokens of all rows, one after the other.
        logits: log-probabilities of the target at every drafted token and, behind each row's, at its bonus token.
        draft_probabilities: the draft's distribution at every drafted token.
        is_bonus: which rows of `logits` belong to bonus tokens.
    """

    lengths_N: Ints
    drafted: Ints
    logits: Floats
    draft_probabilities: Floats
    is_bonus: np.ndarray = field(repr=False)


def flatten(model: Model, case: Case, chains_NK: Ints) -> Rows:
    """Lay chains out for an engine's sampler. With rule "stale-q" the draft's distributions are those of the position before."""
    rows, length = chains_NK.shape
    lengths = np.resize(np.array(case.lengths, dtype=np.int64), rows)
    before = np.concatenate([np.full((rows, 1), START), chains_NK], axis=1)
    positions = np.broadcast_to(np.arange(length + 1), before.shape)
    scored, drafted = positions <= lengths[:, None], positions < lengths[:, None]
    with np.errstate(divide="ignore"):
        logits = np.log(model.target[positions[scored], before[scored]])
    back = 1 if case.rule == "stale-q" else 0
    earlier = np.maximum(positions - back, 0)
    contexts = np.take_along_axis(before, earlier, axis=1)
    q = draft_tables(model, case.drafts)[earlier[drafted], contexts[drafted]]
    tokens = chains_NK[drafted[:, :length]]
    return Rows(lengths, tokens, logits, q, (positions == lengths[:, None])[scored])
