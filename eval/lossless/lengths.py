"""L4: are answers as long, and do they end for the same reasons?

Sampled answers to the same prompts, several to each, paired. Lengths are compared by Kolmogorov and Smirnov's statistic
and by the mean difference, both with p-values from swapping the two arms within pairs; reasons by McNemar's exact test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.eval.holm import holm
from eyas.eval.lossless.binomial import mcnemar_two_sided
from eyas.eval.lossless.chi_square import POWER
from eyas.eval.lossless.kolmogorov import (
    detectable_distance,
    ks_p_value,
    ks_statistic,
    paired_permutation_p,
    paired_shift_p,
)
from eyas.eval.lossless.words import NULL_FAILED, combined, judgement, permutations_for
from eyas.eval.records import RequestRecord

LEVEL = 0.01
"""Family-wise over all arms and all three tests."""

TOO_FEW = "too few answers: most differences would have been missed"

TESTS = ("p_lengths", "p_mean", "p_reasons")

PERMUTATIONS = 4000
SEED = 20260103

WEAKEST = 0.9
"""An arm whose test would not find distribution functions this far apart is undecided: too few answers to say anything."""


def compare_lengths(
    plain: Sequence[RequestRecord],
    null: Sequence[RequestRecord] | None,
    arms: Mapping[str, Sequence[RequestRecord]],
) -> dict[str, Any]:
    """Every arm's answers against plain decoding's, and plain decoding against itself."""
    level = LEVEL / (len(TESTS) * max(1, len(arms)))
    null_row = None if null is None else _null_row(plain, null)
    compared = {arm: _compare(plain, answers, level=level) for arm, answers in arms.items()}
    adjusted = iter(holm([p for row in compared.values() for p in _p_values(row)]))
    null_failed = null_row is not None and null_row["passed"] is False
    rows = [
        _judged(arm, row, p_holm=[next(adjusted) for _ in TESTS], decidable=not null_failed)
        for arm, row in compared.items()
    ]
    return {
        "status": "done",
        **({"why": NULL_FAILED} if null_failed else {}),
        "level": LEVEL,
        "power": POWER,
        "samples": len(plain),
        "ar": _summary(plain),
        "null": null_row,
        "arms": rows,
        "passed": combined([row["passed"] for row in rows]),
    }


def _null_row(plain: Sequence[RequestRecord], null: Sequence[RequestRecord]) -> dict[str, Any]:
    row = _compare(plain, null, level=LEVEL / len(TESTS))
    return _judged("ar", row, p_holm=holm(_p_values(row)), decidable=True)


def _p_values(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in TESTS]


def _judged(arm: str, row: dict[str, Any], *, p_holm: list[float], decidable: bool) -> dict[str, Any]:
    weak = TOO_FEW if row["detectable_ks"] >= WEAKEST else None
    found = judgement(differs=min(p_holm) <= LEVEL, weak=weak, decidable=decidable)
    return {"arm": arm, **row, "p_holm": dict(zip(TESTS, p_holm, strict=True)), **found}


def _compare(plain: Sequence[RequestRecord], other: Sequence[RequestRecord], *, level: float) -> dict[str, Any]:
    """Both starts answer the same requests in the same order, so answers pair up by id."""
    answers = {request.prompt_id: request for request in other}
    pairs = [(request, answers[request.prompt_id]) for request in plain]
    left, right = [a.n_out for a, _ in pairs], [b.n_out for _, b in pairs]
    cut = [(a.finish_reason == "length", b.finish_reason == "length") for a, b in pairs]
    statistic = ks_statistic(left, right)
    permutations = permutations_for(level, at_least=PERMUTATIONS)
    return {
        "samples": len(pairs),
        **_summary([b for _, b in pairs]),
        "ks": statistic,
        "ks_p_unpaired": ks_p_value(statistic, len(left), len(right)),
        "p_lengths": paired_permutation_p(left, right, seed=SEED, permutations=permutations),
        "p_mean": paired_shift_p(left, right, seed=SEED, permutations=permutations),
        "p_reasons": mcnemar_two_sided(sum(b and not a for a, b in cut), sum(a and not b for a, b in cut)),
        "detectable_ks": detectable_distance(len(left), len(right), level=level),
    }


def _summary(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "mean_tokens": sum(request.n_out for request in requests) / len(requests),
        "finish_reasons": dict(sorted(Counter(request.finish_reason for request in requests).items())),
    }
