"""L0: exact laws against enumeration, the right sampler passes, every wrong one is found, and vLLM's own is run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.lossless import cases, sampler_verdict
from eyas.eval.lossless.cases import Case, Counts, flatten, greedy_emitted, reference_cases, run_reference
from eyas.eval.lossless.laws import START, Drafts, Model, draft_tables, emitted_laws, make_model, pair_law
from eyas.eval.lossless.reference import WRONG_RULES, draw, verify
from eyas.eval.lossless.sampler_verdict import judge_sampler
from eyas.eval.lossless.words import DETECTED, NOT_DETECTED
from eyas.heads.serving import engine_environment

MODEL = make_model(vocabulary=cases.VOCABULARY, draft_length=cases.DRAFT_LENGTH, seed=cases.MODEL_SEED)
ROUNDS = 20_000


def enumerated_laws(model: Model, drafts: Drafts) -> list[np.ndarray]:
    """Law of each position by walking every chain of drafts and every place of the first rejection, as in the paper."""
    tables, length, vocabulary = draft_tables(model, drafts), model.draft_length, model.vocabulary
    laws = [np.zeros(vocabulary + 1) for _ in range(length + 1)]
    for chain in itertools.product(range(vocabulary), repeat=length):
        before = [START, *chain]
        drawn = np.prod([tables[i][before[i]][chain[i]] for i in range(length)])
        reached = drawn
        for position in range(length + 1):
            p = model.target[position][before[position]]
            laws[position][vocabulary] += drawn - reached
            if position == length:
                laws[position][:vocabulary] += reached * p
                break
            q, token = tables[position][before[position]], chain[position]
            taken = min(1.0, p[token] / q[token]) if q[token] else 0.0
            residual = np.maximum(p - q, 0)
            laws[position][token] += reached * taken
            if taken < 1:
                laws[position][:vocabulary] += reached * (1 - taken) * residual / residual.sum()
            reached *= taken
    return laws


@pytest.mark.parametrize("drafts", ["sampled", "one-hot"])
def test_laws_are_those_of_enumeration(drafts: Drafts) -> None:
    model = make_model(vocabulary=4, draft_length=3, seed=3)
    for law, enumerated in zip(emitted_laws(model, drafts, lengths=[3]), enumerated_laws(model, drafts), strict=True):
        np.testing.assert_allclose(law, enumerated, atol=1e-12)
        assert law.sum() == pytest.approx(1)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 1000))
def test_first_tokens_follow_the_target_whatever_the_draft(vocabulary: int, length: int, seed: int) -> None:
    model = make_model(vocabulary=max(3, vocabulary), draft_length=length, seed=seed)
    for drafts in ("sampled", "one-hot"):
        first = emitted_laws(model, drafts, lengths=[length])[0]
        np.testing.assert_allclose(first[:-1], model.target[0][START], atol=1e-12)
    assert pair_law(model).sum() == pytest.approx(1)


def test_shorter_chains_end_earlier() -> None:
    laws = emitted_laws(MODEL, "sampled", lengths=[0])
    assert laws[1][-1] == 1
    mixed = emitted_laws(MODEL, "sampled", lengths=[0, 3])
    full = emitted_laws(MODEL, "sampled", lengths=[3])
    np.testing.assert_allclose(mixed[2][:-1], full[2][:-1] / 2)


def test_drawing_never_gives_an_impossible_token() -> None:
    generator = np.random.default_rng(0)
    rows = np.tile([0.0, 0.5, 0.0, 0.5, 0.0], (20_000, 1))
    assert set(draw(rows, generator).tolist()) == {1, 3}


def raw_counts(counted: list[Counts]) -> dict[str, Any]:
    """A sampler.json; every case of the reference stands in for vLLM's too."""
    greedy = Counts(Case("greedy", "vllm", "one-hot", greedy="all"), 10, [], [], greedy_rows=10, greedy_wrong=0)
    return {
        "rounds": ROUNDS,
        "exercised": {},
        "mends": [],
        "model": {"target": MODEL.target.tolist(), "draft": MODEL.draft.tolist()},
        "as_installed": [],
        "cases": json.loads(json.dumps([each.to_json() for each in [*counted, greedy]])),
    }


@pytest.fixture(scope="module")
def counted() -> list[Counts]:
    return [run_reference(MODEL, case, rounds=ROUNDS, seed=seed) for seed, case in enumerate(reference_cases())]


def test_the_right_sampler_passes_and_every_wrong_one_is_found(counted: list[Counts]) -> None:
    level = judge_sampler(raw_counts(counted))
    assert level["passed"]
    assert level["controls"] == level["controls_found"] == 7
    assert {row["rule"] for row in level["cases"] if row["must_fail"]} == set(WRONG_RULES)
    for row in level["cases"]:
        assert row["outcome"] == (DETECTED if row["must_fail"] else NOT_DETECTED), row
        assert not row["must_fail"] or row["smallest_p"] < level["threshold"]
    right = next(row for row in level["cases"] if row["rule"] == "right" and row["tests"])
    assert [test["where"] for test in right["tests"]] == [*(f"position {n}" for n in range(1, 5)), "first two tokens"]
    assert all(test["tv"] < 3 * test["noise_floor"] + 0.01 for test in right["tests"])


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_sampler_in_the_right_ones_place_fails(counted: list[Counts], rule: str) -> None:
    """The same counts under another label: a fault that is not announced."""
    wrong = next(each for each in counted if each.case.rule == rule and each.case.drafts == "sampled")
    unannounced = Counts(Case("served", "vllm", "sampled"), wrong.rounds, wrong.positions, wrong.pairs)
    level = judge_sampler(raw_counts([*counted, unannounced]))
    assert not level["passed"]
    assert not level["sampled_passed"]
    assert level["greedy_passed"]


def test_a_control_that_passes_fails_the_level(counted: list[Counts]) -> None:
    right = counted[0]
    blind = Counts(Case("control", "reference", "one-hot", rule="residual-p"), ROUNDS, right.positions, right.pairs)
    level = judge_sampler(raw_counts([*counted, blind]))
    assert not level["passed"]
    assert level["controls_found"] == 7


def test_wrong_greedy_rows_and_errors_fail(counted: list[Counts]) -> None:
    greedy = Case("all rows greedy", "vllm", "one-hot", greedy="all")
    level = judge_sampler(raw_counts([*counted, Counts(greedy, 10, [], [], greedy_rows=10, greedy_wrong=1)]))
    assert not level["greedy_passed"]
    level = judge_sampler(raw_counts([*counted, Counts(Case("x", "vllm", "one-hot"), 10, [], [], error="boom")]))
    assert not level["sampled_passed"]
    assert "error" in {row["outcome"] for row in level["cases"]}


def test_false_alarms_are_rarer_than_stated() -> None:
    """At a level of a half, about half of the sessions may cry wolf and not many more; at 1e-6, none of these."""
    case, alarms = Case("right", "reference", "sampled"), 0
    for seed in range(60):
        raw = raw_counts([run_reference(MODEL, case, rounds=2000, seed=seed)])
        (row, _) = judge_sampler(raw)["cases"]
        alarms += row["smallest_p"] < 0.5 / 5
        assert row["as_expected"]
    assert alarms < 0.65 * 60


def test_rows_are_laid_out_as_engines_hold_them() -> None:
    chains = np.array([[3, 4, 5], [6, 7, 8]])
    rows = flatten(MODEL, Case("x", "vllm", "sampled", lengths=(3, 1)), chains)
    assert rows.lengths_N.tolist() == [3, 1]
    assert rows.drafted.tolist() == [3, 4, 5, 6]
    assert rows.is_bonus.tolist() == [False, False, False, True, False, True]
    contexts = [(0, START), (1, 3), (2, 4), (3, 5), (0, START), (1, 6)]
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(rows.logits, np.log([MODEL.target[i][before] for i, before in contexts]))
    drafted = [(0, START), (1, 3), (2, 4), (0, START)]
    np.testing.assert_array_equal(rows.draft_probabilities, [MODEL.draft[i][before] for i, before in drafted])
    stale = flatten(MODEL, Case("x", "vllm", "sampled", rule="stale-q"), chains)
    np.testing.assert_array_equal(stale.draft_probabilities[2], MODEL.draft[1][3])


def test_greedy_verification_follows_the_argmax() -> None:
    target = np.zeros((3, 3, 3))
    target[0, :, 1] = target[1, :, 2] = target[2, :, 0] = 1
    model = Model(target, target)
    emitted = greedy_emitted(model, np.array([[1, 2], [1, 0], [2, 2]]))
    assert emitted.tolist() == [[1, 2, 0], [1, 2, -1], [1, -1, -1]]
    again = verify(model, "sampled", np.array([[1, 2]]), rule="right", generator=np.random.default_rng(0))
    assert again.tolist() == [[1, 2, 0]]


@pytest.mark.engine
def test_the_installed_sampler_with_its_mends_passes(tmp_path: Path) -> None:
    """Real vLLM, its own code path on this machine. The test tells a fault of vLLM as much as one of ours."""
    out, environment = tmp_path / "sampler.json", engine_environment(threads=1, kv_cache_gib=1)
    command = [sys.executable, "-m", "eyas.eval.lossless.sampler", "20000", str(out), "a session"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    raw = json.loads(out.read_text())
    assert raw["session"] == "a session"
    level = judge_sampler(raw)
    failed = [row for row in level["cases"] if not row["as_expected"]]
    assert level["passed"], failed
    assert level["exercised"]["class"] == "vllm.v1.sample.rejection_sampler.RejectionSampler"
    assert len(level["exercised"]["kernels"]) == 4
    # Whether the installed build needs the mend is told by its answers, not by what the mend says.
    assert level["as_installed"]["passed"] == (raw["mends"] == [])
    assert sampler_verdict.LEVEL == 1e-6
