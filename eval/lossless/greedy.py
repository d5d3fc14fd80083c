"""L1 and L2: is every greedy token the one that plain decoding gives?

In exact arithmetic it is. In floating point a verification of k + 1 positions sums in another order than a decode of one,
so where the two best tokens are all but equal either may win. Such a *tie* is told from a *violation* by the target
itself: in a float32 forward (Hugging Face) of the drafted answer, every token of it must be within `tie_gap` of
the best one, and so must the token that plain decoding chose where the two answers part. Behind that place the texts
differ and only this forward can still tell right from wrong, so it judges the whole answer and not the first difference.

The null: plain decoding against itself, at another batch size (other batches, other sums). A gap at which
plain decoding disagrees with itself is no violation either.

The forward is not the engine's on purpose: an engine that is wrong about its logits would call its own errors ties. Of a
quantised target it has other weights than the engine, so there a difference is neither tie nor violation but *undecided*.
L2 allows no ties: in float32 at batch size 1 answers must be identical. In a shorter dtype that cannot be asked, and a
difference leaves L2 undecided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.lossless.binomial import excluded_rate, mcnemar_one_sided
from eyas.eval.records import RequestRecord

TIE_GAP = 1e-3
"""Largest gap of two logits that counts as a tie in float32.

Logits of language models are of magnitude 10 to 40; float32 resolves 2e-6 there, and the different summation orders of
two engines add up over tens of layers: SmolLM2-135M (30 layers, logits up to 38) gave 6e-5 between a forward of the whole
sequence and one token by token. A gap above 1e-3 is therefore a decision of the model, not rounding."""

MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}
EXACT_DTYPE = "float32"
"""In which L2 requires identity."""

ROUNDINGS = 2
"""Engines round logits to their dtype; two logits that far apart in units of the last place may change places."""

AnswerLogits = Callable[[list[int], int], NDArray[np.float32]]
"""(token ids of prompt and answer, number of prompt tokens) -> logits [answer tokens, V] that each answer token came from."""


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first differing token, or where the shorter one ends; None when equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def tie_gap(dtype: str, logit: float) -> float:
    """Largest gap at a best logit of this size that counts as a tie in this dtype."""
    last_place = 2.0 ** (math.floor(math.log2(max(abs(logit), 1.0))) - MANTISSA_BITS.get(dtype, 7))
    return max(TIE_GAP, ROUNDINGS * last_place)


QUANTISED = "the target is quantised, so that no float32 forward of it tells a tie from a decision"


def ask_target(
    plain: Sequence[RequestRecord],
    other: Sequence[RequestRecord],
    *,
    prompts: dict[str, list[int]],
    logits: AnswerLogits,
) -> list[dict[str, Any]]:
    """What the target itself says about each differing answer of `other`: the raw facts from which ties are told.

    Args:
        prompts: prompt id -> its token ids. logits: the target's, in float32.
    """
    answers = {request.prompt_id: request.token_ids for request in other}
    facts = []
    for request in plain:
        answer = answers[request.prompt_id]
        index = first_difference(request.token_ids, answer)
        if index is None:
            continue
        prompt = prompts[request.prompt_id]
        rows = logits([*prompt, *answer], len(prompt))
        best = rows.max(axis=1)
        gaps = best - rows[np.arange(len(answer)), answer]
        fact: dict[str, Any] = {"prompt_id": request.prompt_id, "index": index, "gaps": gaps.tolist()}
        if index < min(len(answer), len(request.token_ids)):
            plain_gap = float(best[index] - rows[index][request.token_ids[index]])
            fact |= {"best": float(best[index]), "plain_gap": plain_gap, "plain": request.token_ids[index]}
        facts.append(fact)
    return facts


def classify(fact: dict[str, Any], *, answer: Sequence[int], dtype: str, null_gap: float) -> dict[str, Any]:
    """Tie or violation, from one of `ask_target`'s facts. `null_gap`: at which plain decoding differs from itself."""
    index = fact["index"]
    shown = {"prompt_id": fact["prompt_id"], "index": index}
    if "plain_gap" not in fact:
        return {**shown, "outcome": "violation", "why": "one answer ends earlier", "gap": None}
    allowed = max(tie_gap(dtype, fact["best"]), null_gap)
    gap = max(fact["plain_gap"], fact["gaps"][index])
    later = max(fact["gaps"])
    shown |= {"gap": gap, "largest_gap": later, "ar": fact["plain"], "head": answer[index]}
    if gap > allowed:
        return {**shown, "outcome": "violation", "why": "a decision of the target"}
    if later > allowed:
        return {**shown, "outcome": "violation", "why": "a token that the target would not choose"}
    return {**shown, "outcome": "tie", "why": "all but equally good tokens"}


def null_gap(facts: Sequence[dict[str, Any]]) -> float:
    """Largest gap at which plain decoding disagrees with itself; 0 where it never does."""
    gaps = [max(fact["plain_gap"], fact["gaps"][fact["index"]]) for fact in facts if "plain_gap" in fact]
    return max(gaps, default=0.0)


def untold(request: RequestRecord, *, answer: Sequence[int], index: int) -> dict[str, Any]:
    """A difference of a quantised target's answers, which no forward can judge. That one ends earlier needs no judge."""
    shown = {"prompt_id": request.prompt_id, "index": index, "gap": None}
    if index == min(len(answer), len(request.token_ids)):
        return {**shown, "outcome": "violation", "why": "one answer ends earlier"}
    return {**shown, "outcome": "undecided", "why": QUANTISED}


def compare(
    plain: Sequence[RequestRecord],
    other: Sequence[RequestRecord],
    *,
    facts: Sequence[dict[str, Any]] | None,
    dtype: str,
    allowed_by_null: float,
) -> dict[str, Any]:
    """Token identity of two arms' answers. `facts`: of `ask_target`; None where the target is quantised and was not asked.

    Raises:
        ValueError: the stored facts are not about these records.
    """
    known = None if facts is None else {(fact["prompt_id"], fact["index"]): fact for fact in facts}
    answers = {request.prompt_id: request.token_ids for request in other}
    differences = []
    for request in plain:
        answer = answers[request.prompt_id]
        index = first_difference(request.token_ids, answer)
        if index is None:
            continue
        if known is None:
            differences.append(untold(request, answer=answer, index=index))
            continue
        fact = known.get((request.prompt_id, index))
        if fact is None:
            raise ValueError(
                f"the answers to prompt {request.prompt_id} differ at token {index}, and logits.json does not know of it; "
                "it belongs to other records, so delete lossless/logits.json and score again"
            )
        differences.append(classify(fact, answer=answer, dtype=dtype, null_gap=allowed_by_null))
    return {"requests": len(plain), **_counts(differences, answers=len(plain), tokens=sum(r.n_out for r in other))}


def _counts(differences: Sequence[dict[str, Any]], *, answers: int, tokens: int) -> dict[str, Any]:
    """How many of each outcome, and which rate of violations is excluded where none was seen and all could be told."""
    outcomes = Counter(difference["outcome"] for difference in differences)
    excluded = not outcomes["violation"] and not outcomes["undecided"]
    return {
        "tokens": tokens,
        "identical": answers - len(differences),
        "ties": outcomes["tie"],
        "violations": outcomes["violation"],
        "untold": outcomes["undecided"],
        "differences": list(differences),
        "excluded_prompt_rate": excluded_rate(answers) if excluded else None,
        "excluded_token_rate": excluded_rate(tokens) if excluded else None,
    }


def judge_batch(row: dict[str, Any], *, fewer: bool) -> tuple[bool | None, str | None]:
    """L1: (passed, why not). `fewer`: the arm repeats plain decoding less often than plain decoding repeats itself."""
    if row["violations"]:
        return False, f"{row['violations']} violations"
    if fewer:
        return False, "identical less often than plain decoding is with itself"
    if row["untold"]:
        return None, QUANTISED
    return True, None


def judge_alone(row: dict[str, Any], *, dtype: str) -> tuple[bool | None, str | None]:
    """L2: (passed, why not). Nothing but identity passes; in a dtype in which it cannot be asked, ties are undecided."""
    differ = row["requests"] - row["identical"]
    if not differ:
        return True, None
    if row["violations"]:
        return False, f"{row['violations']} violations"
    if row["untold"]:
        return None, QUANTISED
    if dtype == EXACT_DTYPE:
        return False, f"{differ} answers are not identical, which {dtype} at batch size 1 requires, ties or not"
    return None, (
        f"{differ} answers are not identical, only by ties, and {dtype} does not let identity be required; "
        f"score.lossless.dtype={EXACT_DTYPE} does"
    )


def match_rate_p(
    plain: Sequence[RequestRecord], other: Sequence[RequestRecord], null: Sequence[RequestRecord]
) -> float:
    """One-sided p-value of "the other arm repeats plain decoding less often than plain decoding repeats itself"."""
    answers = {request.prompt_id: request.token_ids for request in plain}
    other_fails = {request.prompt_id: request.token_ids != answers[request.prompt_id] for request in other}
    null_fails = {request.prompt_id: request.token_ids != answers[request.prompt_id] for request in null}
    only_other = sum(other_fails[name] and not null_fails[name] for name in answers)
    only_null = sum(null_fails[name] and not other_fails[name] for name in answers)
    return mcnemar_one_sided(only_other, only_null)
