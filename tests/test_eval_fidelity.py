from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from eyas.eval.fidelity import TIE_GAP, accepted_within_answer, check_lossless, check_parity, first_difference
from tests.eval_records import request

PROMPTS = {"p0": [9, 9], "p1": [8]}


def logits_row(values: dict[int, float]) -> NDArray[np.float32]:
    row = np.zeros(64, dtype=np.float32)
    for token, value in values.items():
        row[token] = value
    return row


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ({3: 10.0, 5: 10.0 - TIE_GAP / 2}, "tie"),
        ({3: 10.0, 5: 9.5}, "violation"),
        ({3: 10.0, 5: 10.0 - TIE_GAP / 2, 6: 11.0}, "violation"),
    ],
)
def test_a_difference_is_a_tie_only_between_the_two_best_tokens(row: dict[int, float], outcome: str) -> None:
    asked: list[list[int]] = []

    def logits(token_ids: list[int]) -> NDArray[np.float32]:
        asked.append(token_ids)
        return logits_row(row)

    plain = [request("p0", token_ids=[1, 2, 3, 4]), request("p1", token_ids=[1, 2])]
    drafted = [request("p0", token_ids=[1, 2, 5, 6]), request("p1", token_ids=[1, 2])]
    check = check_lossless(plain, drafted, prompts=PROMPTS, logits=logits)
    assert asked == [[9, 9, 1, 2]]
    assert check["identical"] == 1
    assert check["differences"][0]["outcome"] == outcome
    assert check["passed"] == (outcome == "tie")


def test_an_answer_that_ends_earlier_is_a_violation() -> None:
    plain, drafted = [request("p0", token_ids=[1, 2, 3])], [request("p0", token_ids=[1, 2])]
    check = check_lossless(plain, drafted, prompts=PROMPTS, logits=lambda _: logits_row({}))
    assert check["violations"] == 1


def test_parity_compares_taus() -> None:
    answer = [1, 2, 3, 4, 5, 6, 7, 8]
    drafted = [request("p0", token_ids=answer, accepted=[1, 0, 3]), request("p1", token_ids=[4] * 4, accepted=[2])]
    seen: list[tuple[list[int], int]] = []

    def predict(token_ids: list[int], prompt: int) -> list[int]:
        seen.append((token_ids, prompt))
        return [1, 0, 3] if prompt == 2 else [2]

    parity = check_parity(drafted, prompts=PROMPTS, draft_length=3, predict=predict)
    assert seen == [([9, 9, *answer], 2), ([8, 4, 4, 4, 4], 1)]
    assert parity["passed"]
    assert parity["served"] == parity["offline"]
    worse = check_parity(drafted, prompts=PROMPTS, draft_length=3, predict=lambda *_: [0, 0])
    assert not worse["passed"]
    assert worse["relative_difference"] == pytest.approx(1 / 2.5 - 1)


def test_what_is_verified_behind_the_end_of_an_answer_is_not_compared() -> None:
    """An answer of ten tokens: 1 read, then 3, 3, and 3 that were left of the 4 that the last step had."""
    assert accepted_within_answer(request("p0", token_ids=[1] * 10, accepted=[2, 2, 3])) == [2, 2, 3]
    assert accepted_within_answer(request("p0", token_ids=[1] * 9, accepted=[2, 2, 3])) == [2, 2, 2]
    assert accepted_within_answer(request("p0", token_ids=[1] * 8, accepted=[2, 2, 3])) == [2, 2, 1]
    assert accepted_within_answer(request("p0", token_ids=[1], accepted=[3])) == [0]
