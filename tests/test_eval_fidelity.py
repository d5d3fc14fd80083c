from __future__ import annotations

import pytest

from eyas.eval.fidelity import PARITY_TOLERANCE, check_parity
from tests.eval_records import request
from tests.served_steps import served


def test_parity_compares_taus() -> None:
    answer = [1, 2, 3, 4, 5, 6, 7, 8]
    drafted = [request("p0", token_ids=answer, accepted=[1, 0, 3]), request("p1", token_ids=[4] * 4, accepted=[2])]
    parity = check_parity(drafted, offline={"p0": [1, 0, 3], "p1": [2]}, draft_length=3)
    assert parity["passed"]
    assert parity["served"] == parity["offline"]
    assert parity["served"]["tau_step_weighted"] == pytest.approx(1 + 6 / 4)
    worse = check_parity(drafted, offline={"p0": [0, 0], "p1": [0, 0]}, draft_length=3)
    assert not worse["passed"]
    assert worse["relative_difference"] == pytest.approx(1 / 2.5 - 1)


def test_parity_without_steps_is_not_passed() -> None:
    parity = check_parity([request("p0", token_ids=[1], accepted=[])], offline={"p0": []}, draft_length=3)
    assert parity["relative_difference"] is None
    assert not parity["passed"]


@pytest.mark.parametrize(("more", "passed"), [(5, True), (-5, True), (7, False), (-7, False)])
def test_the_tolerance_is_relative_and_two_sided(more: int, passed: bool) -> None:
    """100 drafts, one accepted in each: served tau is 2, and 3 % of it are 6 accepted tokens."""
    drafted = [request("p0", token_ids=[1] * 400, accepted=[1] * 100)]
    offline = [1 + (more > 0) - (more < 0) if index < abs(more) else 1 for index in range(100)]
    parity = check_parity(drafted, offline={"p0": offline}, draft_length=3)
    assert parity["relative_difference"] == pytest.approx(more / 200)
    assert parity["passed"] == passed
    assert parity["tolerance"] == PARITY_TOLERANCE == 0.03


def test_what_is_verified_behind_the_end_of_an_answer_is_not_compared() -> None:
    """An answer of eight tokens: 1 read, then 3, 3, and 1 that was left of the 4 that the last step had: its first draft."""
    cut = served([(3, 2), (3, 2), (3, 3)], prompt_id="p0", max_tokens=8)
    assert cut.per_step_accepted == [2, 2, 3], "the engine counts what it verified"
    parity = check_parity([cut], offline={"p0": [2, 2, 1]}, draft_length=3)
    assert parity["served"] == parity["offline"]
    assert parity["served"]["tau_step_weighted"] == pytest.approx(1 + 5 / 3)
