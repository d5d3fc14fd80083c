"""L3: at temperature > 0, do answers of both arms come from one distribution?

The same few prompts are answered many times by each arm, every answer with a seed of its own. Tokens are compared
position by position: the first comes from reading the prompt, the next k from verification, accepted or drawn again, and the one
behind them is the bonus token, each from other code. "The first two verified tokens" are compared as pairs as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from eyas.eval.holm import holm
from eyas.eval.lossless.chi_square import POWER
from eyas.eval.lossless.two_sample import TwoSample, stratum, two_sample
from eyas.eval.lossless.words import DETECTED, NOT_DETECTED, NULL_FAILED, UNDECIDED, combined, judgement
from eyas.eval.records import RequestRecord

LEVEL = 0.01
"""Family-wise over all arms and positions, by permutation p-values and Holm."""

SEPARATOR = "#"
END = -1
"""What stands at positions behind the end of an answer."""

SEED = 20260102

WEAKEST = 0.5
"""A test that would not find a total-variation distance of this size is too weak. One weak position leaves its arm undecided:
positions come from different code, so a strong one says nothing about a weak one. Pairs of tokens are rare more often than
tokens, so the test of pairs may find a difference and is not needed for passing."""

TOO_WEAK = "too few samples: a difference would have been missed at {places}"
PAIR = "positions 2 and 3"


def sample_id(prompt_id: str, number: int) -> str:
    """Id of the `number`-th answer to a prompt."""
    return f"{prompt_id}{SEPARATOR}{number}"


def prompt_of(request: RequestRecord) -> str:
    return request.prompt_id.rpartition(SEPARATOR)[0]


def compare_sampled(
    plain: Sequence[RequestRecord],
    null: Sequence[RequestRecord] | None,
    arms: Mapping[str, Sequence[RequestRecord]],
    *,
    positions: int,
) -> dict[str, Any]:
    """Every arm against plain decoding, and plain decoding against itself.

    Args:
        plain: answers of plain decoding. null: of another start of it, which also joins the arms' reference; None without.
        arms: arm -> its answers. positions: tokens compared, from the first.
    """
    reference = [*plain, *(null or [])]
    tests = 1 + positions
    level = LEVEL / (tests * max(1, len(arms)))
    null_row = None if null is None else _null_row(_tests(plain, null, positions=positions, level=LEVEL / tests))
    outcomes = {arm: _tests(reference, answers, positions=positions, level=level) for arm, answers in arms.items()}
    adjusted = iter(holm([test["p_value"] for rows in outcomes.values() for test in rows]))
    null_failed = null_row is not None and null_row["passed"] is False
    rows = [
        _arm_row(arm, [test | {"p_holm": next(adjusted)} for test in tested], decidable=not null_failed)
        for arm, tested in outcomes.items()
    ]
    return {
        "status": "done",
        **({"why": NULL_FAILED} if null_failed else {}),
        "level": LEVEL,
        "power": POWER,
        "weakest": WEAKEST,
        "positions": positions,
        "prompts": len({prompt_of(request) for request in plain}),
        "samples": len(plain),
        "null": null_row,
        "arms": rows,
        "passed": combined([row["passed"] for row in rows]),
    }


def _null_row(tests: list[dict[str, Any]]) -> dict[str, Any]:
    adjusted = holm([test["p_value"] for test in tests])
    return _arm_row("ar", [test | {"p_holm": p} for test, p in zip(tests, adjusted, strict=True)], decidable=True)


def _arm_row(arm: str, tests: list[dict[str, Any]], *, decidable: bool) -> dict[str, Any]:
    differs = any(test["p_holm"] <= LEVEL for test in tests)
    shown = [test | {"outcome": _outcome(test)} for test in tests]
    return {"arm": arm, "tests": shown, **judgement(differs=differs, weak=_weakness(tests), decidable=decidable)}


def _weakness(tests: Sequence[dict[str, Any]]) -> str | None:
    """Why these tests would have missed a difference, if they would."""
    weak = [test["where"] for test in tests if _is_weak(test) and test["where"] != PAIR]
    return TOO_WEAK.format(places=", ".join(weak)) if weak else None


def _is_weak(test: dict[str, Any]) -> bool:
    return test["detectable_tv"] is None or test["detectable_tv"] >= WEAKEST


def _outcome(test: dict[str, Any]) -> str:
    if test["p_holm"] <= LEVEL:
        return DETECTED
    return UNDECIDED if _is_weak(test) else NOT_DETECTED


def _tests(
    left: Sequence[RequestRecord], right: Sequence[RequestRecord], *, positions: int, level: float
) -> list[dict[str, Any]]:
    places: list[tuple[str, slice]] = [(f"position {each + 1}", slice(each, each + 1)) for each in range(positions)]
    places.append((PAIR, slice(1, 3)))
    return [
        {"where": name, **_plain(_test(left, right, place, seed=SEED + number, level=level))}
        for number, (name, place) in enumerate(places)
    ]


def _test(
    left: Sequence[RequestRecord], right: Sequence[RequestRecord], place: slice, *, seed: int, level: float
) -> TwoSample:
    tokens = _by_prompt(left, place), _by_prompt(right, place)
    assert tokens[0].keys() == tokens[1].keys(), "both arms answer the same prompts"
    strata = [stratum(tokens[0][prompt], tokens[1][prompt]) for prompt in tokens[0]]
    return two_sample(strata, level=level, seed=seed)


def _by_prompt(requests: Sequence[RequestRecord], place: slice) -> dict[str, list[Hashable]]:
    grouped: dict[str, list[Hashable]] = {}
    for request in requests:
        padded = [*request.token_ids, *[END] * place.stop]
        grouped.setdefault(prompt_of(request), []).append(tuple(padded[place]))
    return grouped


def _plain(outcome: TwoSample) -> dict[str, Any]:
    return {
        "samples": list(outcome.samples),
        "statistic": outcome.chi_square.statistic,
        "degrees": outcome.chi_square.degrees,
        "chi_square_p": outcome.chi_square.p_value,
        "p_value": outcome.permutation_p,
        "tv": outcome.tv,
        "detectable_tv": outcome.detectable_tv,
        "rare_share": outcome.rare_share,
    }
