"""L1 to L4 of the ladder on fabricated answers: token identity, distributions of tokens, lengths."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eyas.eval.lossless.greedy import (
    QUANTISED,
    TIE_GAP,
    ask_target,
    classify,
    compare,
    first_difference,
    judge_alone,
    judge_batch,
    match_rate_p,
    tie_gap,
)
from eyas.eval.lossless.lengths import compare_lengths
from eyas.eval.lossless.sampled import compare_sampled, sample_id
from eyas.eval.records import RequestRecord
from tests.eval_ladder import target_that_says
from tests.eval_records import request

# L1 and L2


@pytest.mark.parametrize(
    ("rows", "outcome", "why"),
    [
        ({2: {3: 20.0, 5: 20.0 - TIE_GAP / 2}}, "tie", "equally good"),
        ({2: {3: 20.0, 5: 19.5}}, "violation", "a decision"),
        ({2: {3: 20.0, 5: 20.0 - TIE_GAP / 2, 6: 21.0}}, "violation", "a decision"),
        # The first difference is a tie, but behind it stands a token that the target would not choose.
        ({2: {3: 20.0, 5: 20.0}, 3: {9: 20.0, 6: 10.0}}, "violation", "would not choose"),
    ],
)
def test_a_difference_is_a_tie_only_where_the_target_says_so(
    rows: dict[int, dict[int, float]], outcome: str, why: str
) -> None:
    plain = [request("p0", token_ids=[1, 2, 3, 4]), request("p1", token_ids=[1, 2])]
    drafted = [request("p0", token_ids=[1, 2, 5, 6]), request("p1", token_ids=[1, 2])]
    facts = ask_target(plain, drafted, prompts={"p0": [9, 9], "p1": [8]}, logits=target_that_says(rows))
    check = compare(plain, drafted, facts=json.loads(json.dumps(facts)), dtype="float32", allowed_by_null=0.0)
    assert (check["identical"], check["ties"], check["violations"]) == (1, int(outcome == "tie"), int(outcome != "tie"))
    assert check["differences"][0]["outcome"] == outcome
    assert why in check["differences"][0]["why"]
    assert (check["excluded_prompt_rate"] is None) == (outcome == "violation")


def test_an_answer_that_ends_earlier_is_a_violation() -> None:
    plain, drafted = [request("p0", token_ids=[1, 2, 3])], [request("p0", token_ids=[1, 2])]
    facts = ask_target(plain, drafted, prompts={"p0": [9]}, logits=target_that_says({}))
    assert classify(facts[0], answer=[1, 2], dtype="float32", null_gap=9.0)["outcome"] == "violation"


def test_gaps_that_plain_decoding_has_with_itself_are_allowed() -> None:
    fact = {"prompt_id": "p0", "index": 0, "gaps": [0.3], "best": 20.0, "plain_gap": 0.0, "plain": 3}
    assert classify(fact, answer=[5], dtype="float32", null_gap=0.0)["outcome"] == "violation"
    assert classify(fact, answer=[5], dtype="float32", null_gap=0.3)["outcome"] == "tie"


def identity(*, identical: int, violations: int = 0, untold: int = 0) -> dict[str, Any]:
    return {"requests": 8, "identical": identical, "violations": violations, "untold": untold}


@pytest.mark.parametrize(
    ("found", "dtype", "passed"),
    [
        (identity(identical=8), "float32", True),
        (identity(identical=8), "bfloat16", True),
        (identity(identical=7), "float32", False),  # a tie: allowed in a batch, not here
        (identity(identical=7), "bfloat16", None),
        (identity(identical=7, violations=1), "bfloat16", False),
        (identity(identical=7, untold=1), "float32", None),
    ],
)
def test_one_prompt_at_a_time_nothing_but_identity_passes(
    found: dict[str, Any], dtype: str, passed: bool | None
) -> None:
    outcome, why = judge_alone(found, dtype=dtype)
    assert outcome is passed
    assert (why is None) == (passed is True)


def test_in_a_batch_ties_pass_and_violations_do_not() -> None:
    assert judge_batch(identity(identical=7), fewer=False) == (True, None)
    assert judge_batch(identity(identical=7), fewer=True)[0] is False
    assert judge_batch(identity(identical=7, violations=1), fewer=False)[0] is False
    assert judge_batch(identity(identical=6, untold=1), fewer=False)[0] is None
    assert judge_batch(identity(identical=6, untold=1), fewer=True)[0] is False


def test_a_quantised_targets_differences_are_undecided() -> None:
    plain = [request("p0", token_ids=[1, 2, 3]), request("p1", token_ids=[1, 2, 3])]
    drafted = [request("p0", token_ids=[1, 2, 4]), request("p1", token_ids=[1, 2, 3])]
    check = compare(plain, drafted, facts=None, dtype="bfloat16", allowed_by_null=0.0)
    assert (check["identical"], check["ties"], check["violations"], check["untold"]) == (1, 0, 0, 1)
    assert check["differences"][0]["why"] == QUANTISED
    assert check["excluded_prompt_rate"] is None
    cut = [request("p0", token_ids=[1, 2]), request("p1", token_ids=[1, 2, 3])]
    assert compare(plain, cut, facts=None, dtype="bfloat16", allowed_by_null=0.0)["violations"] == 1


def test_the_allowed_gap_follows_the_precision() -> None:
    """Two units of the last place: bfloat16 has 8 bits, so at 16 to 32 they are 0.125 apart."""
    assert tie_gap("float32", 30.0) == TIE_GAP
    assert tie_gap("bfloat16", 20.0) == 0.25
    assert tie_gap("bfloat16", -40.0) == 0.5
    assert tie_gap("float16", 20.0) == 2 * 2**-6


def test_facts_of_other_records_are_refused() -> None:
    plain, drafted = [request("p0", token_ids=[1, 2])], [request("p0", token_ids=[1, 3])]
    with pytest.raises(ValueError, match=r"delete lossless/logits\.json"):
        compare(plain, drafted, facts=[], dtype="float32", allowed_by_null=0.0)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_match_rate_is_held_against_plain_decodings_own() -> None:
    plain = [request(f"p{index}", token_ids=[1, 2]) for index in range(8)]
    other = [request(f"p{index}", token_ids=[1, 2 if index < 2 else 3]) for index in range(8)]
    assert match_rate_p(plain, other, plain) == pytest.approx(2**-6)
    assert match_rate_p(plain, other, other) == 1
    assert match_rate_p(plain, plain, other) == 1


# L3 and L4


def answers(law: Callable[[np.random.Generator], list[int]], *, seed: int, count: int = 300) -> list[RequestRecord]:
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        for prompt in ("p0", "p1"):
            tokens = law(generator)
            reason = "stop" if tokens[-1] == 2 else "length"
            made.append(request(sample_id(prompt, number), token_ids=tokens, finish_reason=reason))
    return made


def fair(generator: np.random.Generator) -> list[int]:
    return generator.integers(3, 9, size=5).tolist()


def wrong_at(position: int) -> Callable[[np.random.Generator], list[int]]:
    def law(generator: np.random.Generator) -> list[int]:
        tokens = fair(generator)
        if generator.random() < 0.4:
            tokens[position] = 3
        return tokens

    return law


def test_samples_of_one_law_are_not_told_apart() -> None:
    level = compare_sampled(answers(fair, seed=0), answers(fair, seed=1), {"k3": answers(fair, seed=2)}, positions=5)
    assert level["passed"]
    assert level["null"]["passed"]
    tests = level["arms"][0]["tests"]
    assert [test["where"] for test in tests] == [*(f"position {n}" for n in range(1, 6)), "positions 2 and 3"]
    assert tests[0]["samples"] == [1200, 600], "both starts of plain decoding are the reference"
    assert 0.03 < tests[0]["detectable_tv"] < 0.15


@pytest.mark.parametrize("position", range(5))
def test_a_wrong_position_is_found_where_it_is(position: int) -> None:
    arms = {"k3": answers(wrong_at(position), seed=2), "ngram": answers(fair, seed=3)}
    level = compare_sampled(answers(fair, seed=0), answers(fair, seed=1), arms, positions=5)
    assert not level["passed"]
    k3, ngram = level["arms"]
    assert (k3["passed"], ngram["passed"]) == (False, True)
    found = {test["where"] for test in k3["tests"] if test["p_holm"] <= level["level"]}
    pair = {"positions 2 and 3"} if position in (1, 2) else set()
    assert found == {f"position {position + 1}"} | pair


def test_pairs_are_compared_where_each_position_alone_is_right() -> None:
    def coupled(generator: np.random.Generator) -> list[int]:
        tokens = fair(generator)
        return [*tokens[:2], tokens[1], *tokens[3:]]

    level = compare_sampled(answers(fair, seed=0), None, {"k3": answers(coupled, seed=2)}, positions=5)
    assert level["null"] is None
    found = [test["where"] for test in level["arms"][0]["tests"] if test["p_holm"] <= level["level"]]
    assert found == ["positions 2 and 3"]


def test_the_end_of_an_answer_counts_as_a_token() -> None:
    def shorter(generator: np.random.Generator) -> list[int]:
        return fair(generator)[: 3 if generator.random() < 0.3 else 5]

    level = compare_sampled(answers(fair, seed=0), None, {"k3": answers(shorter, seed=2)}, positions=5)
    found = {test["where"] for test in level["arms"][0]["tests"] if test["p_holm"] <= level["level"]}
    assert found == {"position 4", "position 5"}


def test_where_plain_decoding_differs_from_itself_nothing_is_said() -> None:
    odd = answers(wrong_at(2), seed=1)
    level = compare_sampled(answers(fair, seed=0), odd, {"k3": answers(wrong_at(4), seed=2)}, positions=5)
    assert level["null"]["passed"] is False
    assert level["passed"] is None
    assert "differs from itself" in level["why"]
    assert level["arms"][0]["outcome"] == "undecided"


def test_too_few_samples_are_undecided() -> None:
    level = compare_sampled(answers(fair, seed=0, count=8), None, {"k3": answers(fair, seed=2, count=8)}, positions=5)
    assert level["passed"] is None
    few = answers(fair, seed=0, count=2)
    assert compare_lengths(few, None, {"k3": few})["passed"] is None


def half_certain(generator: np.random.Generator) -> list[int]:
    """The first token is certain, the second one of two, and the third one of sixty, too many for few samples."""
    return [7, int(generator.integers(3, 5)), int(generator.integers(3, 63)), 8, 9]


def test_one_weak_position_leaves_the_arm_undecided_and_a_certain_token_does_not() -> None:
    def compared(count: int) -> dict[str, Any]:
        plain, arm = (answers(half_certain, seed=seed, count=count) for seed in (0, 1))
        return compare_sampled(plain, None, {"k3": arm}, positions=5)["arms"][0]

    few, many = compared(60), compared(2000)
    weak = [test for test in few["tests"] if test["outcome"] == "undecided"]
    strong = [test["where"] for test in few["tests"] if test["outcome"] == "no difference detected"]
    assert [test["where"] for test in weak] == ["position 3", "positions 2 and 3"]
    assert strong == ["position 1", "position 2", "position 4", "position 5"]
    assert (few["passed"], few["outcome"]) == (None, "undecided")
    assert few["why"].endswith("at position 3")
    assert many["passed"] is True
    assert many["why"] is None
    assert {test["where"]: test["detectable_tv"] for test in many["tests"]}["position 1"] is not None


def test_a_difference_at_a_strong_position_counts_where_another_is_weak() -> None:
    def other(generator: np.random.Generator) -> list[int]:
        return [7, 3, *half_certain(generator)[2:]]

    plain, arm = answers(half_certain, seed=0, count=60), answers(other, seed=1, count=60)
    (found,) = compare_sampled(plain, None, {"k3": arm}, positions=5)["arms"]
    assert found["passed"] is False
    assert "undecided" in {test["outcome"] for test in found["tests"]}


def test_power_is_said() -> None:
    plain = answers(fair, seed=0, count=50)
    assert compare_sampled(plain, None, {"k3": plain}, positions=5)["power"] == 0.8
    assert compare_lengths(plain, None, {"k3": plain})["power"] == 0.8


def test_many_arms_can_still_fail() -> None:
    """With many tests a p-value must be able to fall below the corrected level."""
    arms = {f"arm{seed}": answers(fair, seed=seed) for seed in range(2, 12)} | {"k3": answers(wrong_at(1), seed=99)}
    level = compare_sampled(answers(fair, seed=0), None, arms, positions=5)
    assert [row["arm"] for row in level["arms"] if row["passed"] is False] == ["k3"]


def long_answer(share_stopped: float) -> Callable[[np.random.Generator], list[int]]:
    def law(generator: np.random.Generator) -> list[int]:
        if generator.random() < share_stopped:
            return [*fair(generator), 2] if generator.random() < 0.5 else [*fair(generator), *fair(generator), 2]
        return [5] * 16

    return law


def test_lengths_and_reasons_of_one_law_are_not_told_apart() -> None:
    plain = answers(long_answer(0.5), seed=0, count=100)
    level = compare_lengths(plain, answers(long_answer(0.5), seed=1, count=100), {"k3": plain})
    assert level["passed"]
    assert level["null"]["passed"]
    assert level["arms"][0]["ks"] == 0
    assert level["arms"][0]["finish_reasons"] == level["ar"]["finish_reasons"]
    assert 0.1 < level["arms"][0]["detectable_ks"] < 0.3


def test_answers_that_stop_too_early_are_found() -> None:
    plain = answers(long_answer(0.5), seed=0, count=100)
    level = compare_lengths(plain, None, {"k3": answers(long_answer(0.9), seed=1, count=100)})
    assert not level["passed"]
    assert max(level["arms"][0]["p_holm"].values()) <= level["level"]
    assert level["arms"][0]["outcome"] == "difference detected"
