"""The ladder L1 to L4 on fabricated answers, its files, and its plan; then all of it on a real engine."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.launch import Launcher
from eyas.eval.lossless import run as run_module
from eyas.eval.lossless.cases import Case, Counts, reference_cases, run_reference
from eyas.eval.lossless.greedy import TIE_GAP, ask_target, classify, compare, first_difference, match_rate_p, tie_gap
from eyas.eval.lossless.ladder import arms_to_check, lossless_outcome, plan_lossless
from eyas.eval.lossless.laws import make_model
from eyas.eval.lossless.lengths import compare_lengths
from eyas.eval.lossless.results import LEVELS, LOGITS, SAMPLER, STARTS, lossless_results
from eyas.eval.lossless.run import run_lossless
from eyas.eval.lossless.sampled import compare_sampled, sample_id
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import PLACES, RequestRecord
from eyas.eval.workload import Request
from eyas.heads.files import read_json, write_json
from eyas.heads.formats.write import write_head
from eyas.heads.serving import engine_environment, speculative_config
from tests import tiny
from tests.eval_records import request

VOCABULARY = 64


def head(length: int) -> Arm:
    return Arm(f"k{length}", "head", speculative_config(Path("head"), method="eagle3", num_speculative_tokens=length))


NGRAM = Arm("ngram", "other", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
ARMS = [PLAIN, head(3), head(1), NGRAM]


def base_plan(target_dir: str = "target") -> StartPlan:
    return StartPlan(
        target_dir=target_dir,
        trust_remote_code=False,
        dtype="bfloat16",
        max_model_len=128,
        seed=0,
        enforce_eager=True,
        stop_token_ids=[2],
        warmup=[5, 6, 7],
        cells=[],
        session="s",
    )


def prompts(count: int = 6) -> list[Request]:
    generator = random.Random(0)
    return [
        Request("heldout", f"p{index}", [generator.randrange(3, VOCABULARY) for _ in range(12 - index)])
        for index in range(count)
    ]


SETTINGS: dict[str, Any] = {"requests": 4, "max_tokens": 8, "dtype": "float32", "samples": 40}


# Plan


def test_the_longest_chain_stands_for_the_shorter_ones() -> None:
    schedule = Arm(
        "schedule",
        "schedule",
        {**head(3).speculative_config, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]},  # type: ignore[dict-item]
    )
    made_up = Arm("fake", "other", {"method": "ngram", "rejection_sample_method": "synthetic"})
    control = Arm("again", "other", None)
    assert arms_to_check([*ARMS, schedule, made_up, control]) == {
        "k3": ["k3", "k1"],
        "ngram": ["ngram"],
        "schedule": ["schedule"],
    }


def test_starts_differ_in_arm_seeds_and_the_nulls_batch_only() -> None:
    plain, null, k3, ngram = plan_lossless(base_plan(), arms=ARMS, prompts=prompts(), **SETTINGS)
    assert [start.arm for start in (plain, null, k3, ngram)] == ["ar", "ar", "k3", "ngram"]
    assert [start.start for start in (plain, null, k3, ngram)] == [0, 1, 2, 3]
    assert {start.dtype for start in (plain, null, k3, ngram)} == {"float32"}
    assert [(cell.dataset, cell.batch_size, cell.temperature, cell.max_tokens) for cell in plain.cells] == [
        ("L1", 4, 0.0, 8),
        ("L2", 1, 0.0, 8),
        ("L3", 4, 1.0, 6),  # ngram drafts 4: one token from the prompt, four drafted, one bonus
        ("L4", 4, 1.0, 8),
    ]
    assert [(cell.dataset, cell.batch_size) for cell in null.cells] == [("L1", 2), ("L3", 4), ("L4", 4)]
    assert [cell.requests for cell in k3.cells] == [cell.requests for cell in plain.cells]
    seeds: set[int] = set()
    for start in (plain, null, k3, ngram):
        for cell in start.cells[-2:]:
            used = {cell.seed + index for index in range(len(cell.requests))}
            assert not used & seeds
            seeds |= used
    sampled = plain.cells[2].requests
    assert len(sampled) == 40
    assert {r.prompt_id.partition("#")[0] for r in sampled} == {"p2", "p3"}, "the two shortest of the first four"
    assert len({r.prompt_id for r in sampled}) == 40


# L1 and L2


def row(values: dict[int, float]) -> NDArray[np.float32]:
    made = np.zeros(VOCABULARY, dtype=np.float32)
    for token, value in values.items():
        made[token] = value
    return made


def target_that_says(rows: dict[int, dict[int, float]]) -> Callable[[list[int], int], NDArray[np.float32]]:
    """Logits 20 for each token of the answer, except where `rows` says otherwise."""

    def logits(token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.float32]:
        answer = token_ids[num_prompt_tokens:]
        return np.stack([row(rows.get(index, {token: 20.0})) for index, token in enumerate(answer)])

    return logits


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


# The whole ladder


class FakeLauncher:
    """Writes the records of a start from a rule; starts of arms named in `failing` fail."""

    def __init__(self, rule: Callable[[StartPlan, CellPlan, int], list[int]], failing: tuple[str, ...] = ()) -> None:
        self.rule, self.failing, self.ran = rule, failing, []

    def run(self, plan: StartPlan, stem: Path) -> bool:
        self.ran.append(stem.name)
        if plan.arm in self.failing:
            return False
        lines = []
        for number, cell in enumerate(plan.cells):
            for index, asked in enumerate(cell.requests):
                steps = [1, 0, 2] if plan.arm != "ar" else None
                made = request(asked.prompt_id, token_ids=self.rule(plan, cell, index), accepted=steps)
                lines.append({"kind": "request", "cell": number, **vars(made)})
            summary = {"dataset": cell.dataset, "batch_size": cell.batch_size, "temperature": cell.temperature}
            summary |= {"max_tokens": cell.max_tokens, "block": 0, "makespan": 1.0, "mean_running": 1.0}
            lines.append({"kind": "cell", "cell": number, **summary, "counters": {}, "steps": [], "harness_seconds": 0})
        description = {name: vars(plan)[name] for name in (*PLACES, "session", "speculative_config")}
        description |= {"engine": {"speculative_config": plan.speculative_config}, "mends": ["a mend"]}
        write_json(stem.with_suffix(".json"), description)
        stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return True


def right_rule(_: StartPlan, cell: CellPlan, index: int) -> list[int]:
    """Greedy: the prompt's number again and again. Sampled: drawn by the request's seed."""
    if cell.temperature == 0:
        return [3 + index] * cell.max_tokens
    generator = np.random.default_rng(cell.seed + index)
    return generator.integers(3, 6, size=cell.max_tokens).tolist()


def fake_counts(*, rounds: int, wrong: bool = False) -> dict[str, Any]:
    model = make_model(vocabulary=10, draft_length=3, seed=7)
    counted = [run_reference(model, case, rounds=rounds, seed=seed) for seed, case in enumerate(reference_cases())]
    greedy = Counts(Case("greedy", "vllm", "one-hot", greedy="all"), 9, [], [], greedy_rows=9, greedy_wrong=0)
    if wrong:
        bad = next(each for each in counted if each.case.rule == "always-accept")
        counted.append(replace(bad, case=replace(bad.case, rule="right")))
    return {
        "rounds": rounds,
        "exercised": {},
        "mends": [],
        "as_installed": [],
        "model": {"target": model.target.tolist(), "draft": model.draft.tolist()},
        "cases": [each.to_json() for each in [*counted, greedy]],
    }


@pytest.fixture(autouse=True)
def fake_processes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No process for L0 and no target, unless the test is about real ones."""
    if request.node.get_closest_marker("engine"):
        return

    def run_sampler(directory: Path, **settings: Any) -> None:
        write_json(directory / SAMPLER, fake_counts(rounds=settings["rounds"]))

    monkeypatch.setattr(run_module, "run_sampler", run_sampler)
    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: target_that_says({}))


def run_fake(directory: Path, launcher: Any, **changes: Any) -> dict[str, Any]:
    settings = (
        SETTINGS | {"arms": ARMS, "prompts": prompts(), "predict": lambda *_: [1, 0, 2], "rounds": 5000} | changes
    )
    run_lossless(directory, plan=base_plan(), launcher=launcher, **settings)
    return lossless_results(directory)


def test_a_lossless_head_passes_every_level(tmp_path: Path) -> None:
    launcher = FakeLauncher(right_rule)
    results = run_fake(tmp_path, launcher)
    lossless = results["lossless"]
    assert launcher.ran == ["000-ar", "001-ar", "002-k3", "003-ngram"]
    assert (lossless["status"], lossless["passed"]) == ("done", True)
    assert [lossless[level]["passed"] for level in LEVELS] == [True] * 5
    assert [arm["arm"] for arm in lossless["L1"]["arms"]] == ["k3", "ngram"]
    assert lossless["L1"]["null"]["identical"] == 4
    assert lossless["L2"]["null"] is None
    assert all(arm["exact"] for arm in lossless["L2"]["arms"])
    assert lossless["mends"] == ["a mend"]
    assert results["parity"]["passed"]
    assert results["parity"]["arm"] == "k3"
    for name in ("k3", "k1", "ngram"):
        assert lossless_outcome(lossless, arm=name, temperature=0.0) is True
        assert lossless_outcome(lossless, arm=name, temperature=1.0) is True
    assert lossless_outcome(lossless, arm="schedule", temperature=1.0) is None
    assert read_json(tmp_path / LOGITS)["L1"] == {"null": [], "k3": [], "ngram": []}
    write_json(tmp_path / "results.json", results)  # holds neither NaN nor infinity


def test_a_wrong_arm_costs_its_own_cells_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(plan: StartPlan, cell: CellPlan, index: int) -> list[int]:
        tokens = right_rule(plan, cell, index)
        wrong = plan.arm == "ngram" and cell.dataset == "L1" and index == 1
        return [*tokens[:5], 60, *tokens[6:]] if wrong else tokens

    def logits(token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.float32]:
        return np.stack([row({4: 20.0}) for _ in token_ids[num_prompt_tokens:]])

    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: logits)
    lossless = run_fake(tmp_path, FakeLauncher(rule))["lossless"]
    assert lossless["passed"] is False
    (finding,) = lossless["L1"]["arms"][1]["differences"]
    assert (finding["prompt_id"], finding["index"], finding["outcome"]) == ("p1", 5, "violation")
    assert lossless_outcome(lossless, arm="k1", temperature=0.0) is True
    assert lossless_outcome(lossless, arm="ngram", temperature=0.0) is False
    assert lossless_outcome(lossless, arm="ngram", temperature=1.0) is False


def test_a_wrong_sampler_fails_sampled_cells_and_not_greedy_ones(tmp_path: Path) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))
    write_json(tmp_path / SAMPLER, fake_counts(rounds=5000, wrong=True))
    lossless = lossless_results(tmp_path)["lossless"]
    assert lossless["L0"]["passed"] is False
    assert lossless_outcome(lossless, arm="k3", temperature=0.0) is True
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is False


def test_what_did_not_run_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    lossless = run_fake(tmp_path, FakeLauncher(right_rule, failing=("ngram",)))["lossless"]
    assert (lossless["status"], lossless["passed"]) == ("partial", None)
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is True
    assert lossless_outcome(lossless, arm="ngram", temperature=0.0) is None
    without_plain = run_fake(tmp_path / "b", FakeLauncher(right_rule, failing=("ar",)))
    assert without_plain["lossless"]["L1"]["why"] == "the start of plain decoding did not finish"
    assert without_plain["lossless"]["passed"] is None
    write_json(tmp_path / SAMPLER, {"why": "the sampler's process failed: exit code 1; see sampler.log"})
    assert "exit code 1" in lossless_results(tmp_path)["lossless"]["L0"]["why"]
    nothing = lossless_results(tmp_path / "nowhere")
    assert nothing["lossless"]["status"] == "not run"
    assert nothing["parity"] is None
    assert lossless_outcome(nothing["lossless"], arm="k3", temperature=0.0) is None
    assert lossless_outcome(None, arm="k3", temperature=0.0) is None


def test_where_another_sampler_served_the_levels_of_the_engine_decide(tmp_path: Path) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))
    write_json(tmp_path / SAMPLER, fake_counts(rounds=5000, wrong=True))
    for path in (tmp_path / STARTS).glob("*-k3.json"):
        description = read_json(path)
        write_json(path, description | {"engine": description["engine"] | {"model_runner_v2": True}})
    lossless = lossless_results(tmp_path)["lossless"]
    assert lossless["L0"]["passed"] is False
    assert lossless["L0"]["applies"] is False
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is True


def test_without_samples_greedy_cells_are_judged_alone(tmp_path: Path) -> None:
    lossless = run_fake(tmp_path, FakeLauncher(right_rule), samples=0)["lossless"]
    assert (lossless["status"], lossless["passed"]) == ("done", True)
    assert "samples 0" in lossless["L3"]["why"]
    assert lossless["L4"]["passed"] is None
    assert lossless_outcome(lossless, arm="k3", temperature=0.0) is True
    assert lossless_outcome(lossless, arm="k3", temperature=1.0) is None


def test_a_continued_session_keeps_what_was_asked_and_forgets_other_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_fake(tmp_path, FakeLauncher(right_rule))

    def asked_again(*_: Any, **__: Any) -> Any:
        raise AssertionError("the answers have not changed")

    monkeypatch.setattr(run_module, "answer_logits", asked_again)
    again = run_fake(tmp_path, FakeLauncher(right_rule), predict=asked_again)
    assert again["parity"]["passed"]
    monkeypatch.setattr(run_module, "answer_logits", lambda *_, **__: target_that_says({}))
    fewer = run_fake(tmp_path, FakeLauncher(right_rule), arms=ARMS[:2])
    assert [row["arm"] for row in fewer["lossless"]["arms"]] == ["k3"]
    assert not list((tmp_path / STARTS).glob("*ngram*"))


# A real engine


UNMENDED = """
import sys
import eyas.eval.lossless.mend as mend
mend.mend_cpu_sampler = lambda: []
from eyas.eval.engine import main
sys.argv[0] = "engine"
main()
"""


def write_random_head(directory: Path) -> Path:
    """A head that fits the tiny target and drafts at random."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = tiny.head_config(**sizes, vocab_size=tiny.VOCAB_SIZE, draft_vocab_size=128, capture_layers=(2, 3, 4))
    write_head(directory, tiny.random_head(config), dtype=torch.float32)
    return directory


@pytest.mark.engine
def test_the_ladder_on_a_real_engine(tmp_path: Path, tiny_target: Path) -> None:
    """A random head on a random target: its drafts are bad, and nothing of that may show in any answer."""
    config = speculative_config(write_random_head(tmp_path / "head"), method="eagle3", num_speculative_tokens=2)
    generator = random.Random(0)
    asked = [
        Request("heldout", f"p{index}", [generator.randrange(3, tiny.VOCAB_SIZE) for _ in range(6 + index)])
        for index in range(4)
    ]
    directory = tmp_path / "lossless"
    launcher = Launcher(engine_environment(threads=1, kv_cache_gib=1), 300, lambda _: None)

    def run(launcher: Launcher) -> dict[str, Any]:
        run_lossless(
            directory,
            plan=base_plan(str(tiny_target)),
            arms=[PLAIN, Arm("k2", "head", config)],
            prompts=asked,
            requests=4,
            max_tokens=12,
            dtype="float32",
            samples=400,
            launcher=launcher,
            predict=None,
            rounds=5000,
        )
        failures = [path.read_text() for path in directory.rglob("*.failed.json")]
        assert not failures, failures
        return lossless_results(directory)["lossless"]

    lossless = run(launcher)
    assert lossless["passed"] is True, {level: lossless[level] for level in LEVELS if not lossless[level]["passed"]}
    assert lossless["L1"]["arms"][0]["requests"] == 4
    assert lossless["L3"]["samples"] == 400
    first = lossless["L3"]["arms"][0]["tests"][0]
    assert first["samples"] == [800, 400]
    assert first["degrees"] > 0
    if not lossless["mends"]:
        return
    # The fault that was mended is a wrong sampler inside a real engine: L3 must see it in the answers, and L1 must not.
    for path in (directory / STARTS).glob("002-k2.*"):
        path.unlink()
    broken = run(replace(launcher, command=(sys.executable, "-c", UNMENDED)))
    assert broken["mends"] == []
    assert broken["L3"]["null"]["passed"]
    assert broken["L3"]["passed"] is False
    assert lossless_outcome(broken, arm="k2", temperature=1.0) is False
    assert lossless_outcome(broken, arm="k2", temperature=0.0) is True
