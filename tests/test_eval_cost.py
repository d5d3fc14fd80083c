"""The cost model on cells with a known law, and its formulas against values from their papers."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.cost import leviathan, model, oracle
from eyas.eval.cost.measured import measured_groups
from eyas.eval.cost.replay import replay, steps_needed
from eyas.eval.cost.rows import cost_results
from eyas.eval.cost.starts import StartValues
from eyas.eval.cost.steps import pure_decode, step_seconds, tokens_per_step
from eyas.eval.latency import throughput
from eyas.eval.records import AR, ArmFacts, StepRecord
from eyas.heads.files import write_json
from tests.cost_cells import facts, serve, session
from tests.cost_laws import (
    ACCEPTS,
    LENGTHS,
    SEQUENCE,
    SIZES,
    STEP,
    TAUS,
    TOKEN,
    linear_law,
    linear_session,
    roofline_law,
)


def test_steps_with_prompts_and_the_thinning_tail_have_no_part_in_a_step_time() -> None:
    cell = serve("k3", batch_size=4, law=linear_law, draft_length=3, accepts=ACCEPTS["k3"])
    assert any(step.prefills for step in cell.steps)
    assert min(step.running for step in cell.steps) < 4
    assert step_seconds([cell]) == pytest.approx(linear_law("k3", 4))
    tau = tokens_per_step([cell])
    assert tau is not None
    assert tau == pytest.approx(TAUS["k3"], rel=0.05)


def test_a_step_in_which_a_prompt_was_read_in_part_is_not_pure_decoding() -> None:
    cell = serve(AR, batch_size=2, law=linear_law)
    part = StepRecord(9.0, 2, 1, 0)
    assert part not in pure_decode(type(cell)(**{**vars(cell), "steps": [*cell.steps, part]}))


def test_a_cell_that_never_fills_its_batch_has_no_step_time() -> None:
    assert step_seconds([serve(AR, batch_size=8, law=linear_law, requests=3)]) is None


def test_the_linear_form_recovers_its_constants() -> None:
    (fit,) = linear_session()["fit"]
    assert fit["form"] == "linear"
    assert (fit["fitted_batch_sizes"], fit["held_out_batch_sizes"]) == ([1, 4, 16], [2, 8, 32])
    expected = {"step": STEP, "token": TOKEN, "sequence": SEQUENCE, "draft:k3": 0.006, "draft:k1": 0.0025}
    assert fit["constants"] == pytest.approx(expected)
    errors = {row["form"]: row["held_out_error"] for row in fit["forms"]}
    assert errors["linear"] == pytest.approx(0, abs=1e-9)


def test_the_roofline_form_recovers_its_free_tokens_where_a_line_fails() -> None:
    cells = session(roofline_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES)
    (fit,) = cost_results(cells, facts(LENGTHS), [], seed=0)["fit"]
    assert fit["form"] == "roofline"
    assert fit["constants"]["free_tokens"] == 8
    assert fit["constants"]["token"] == pytest.approx(TOKEN)
    errors = {row["form"]: row["held_out_error"] for row in fit["forms"]}
    assert errors["roofline"] == pytest.approx(0, abs=1e-9)
    assert errors["linear"] > 0.01


def test_residuals_mark_the_held_out_sizes_and_are_relative() -> None:
    rows = linear_session()["residuals"]
    assert len(rows) == 3 * len(SIZES)
    assert {row["batch_size"] for row in rows if row["held_out"]} == {2, 8, 32}
    assert all(row["relative_error"] == pytest.approx(0, abs=1e-9) for row in rows)


def test_held_out_sizes_never_enter_fit_or_choice() -> None:
    """A law that is nonsense at the held-out sizes changes nothing at the fitted ones."""
    plain = linear_session()

    def broken(arm: str, running: int) -> float:
        return linear_law(arm, running) * (3.0 if running in (2, 8, 32) else 1.0)

    cells = session(broken, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES)
    other = cost_results(cells, facts(LENGTHS), [], seed=0)
    assert other["fit"][0]["constants"] == pytest.approx(plain["fit"][0]["constants"])
    held = [row for row in other["residuals"] if row["held_out"]]
    assert all(row["relative_error"] == pytest.approx(1 / 3 - 1) for row in held)


def test_predicted_speedups_hold_at_held_out_sizes() -> None:
    """Decode speedups to the percent that tau varies between cells; throughput with its prompts and tail to a few."""
    result = linear_session()
    held = [row for row in result["speedup"] if row["held_out"]]
    assert len(held) == 6
    assert result["errors"]["cells"] == 6
    assert result["errors"]["median_decode_relative_error"] < 0.01
    assert result["errors"]["median_relative_error"] < 0.03
    at_32 = next(row for row in held if (row["batch_size"], row["arm"]) == (32, "k3"))
    exact = TAUS["k3"] * linear_law("ar", 32) / linear_law("k3", 32)
    assert at_32["decode_predicted"] == pytest.approx(exact, rel=0.03)


def test_tau_min_is_the_ratio_of_step_times_and_stands_beside_tau() -> None:
    rows = linear_session()["tau_min"]
    row = next(row for row in rows if (row["batch_size"], row["arm"]) == (8, "k3"))
    assert row["tau_min"] == pytest.approx(linear_law("k3", 8) / linear_law("ar", 8))
    assert row["tau_min_predicted"] == pytest.approx(row["tau_min"])
    assert row["tau"] == pytest.approx(TAUS["k3"], rel=0.05)
    assert row["decode_speedup"] == pytest.approx(row["tau"] / row["tau_min"])


def test_intervals_come_from_starts_and_cover_them() -> None:
    scales = {"ar": (1.0, 1.1), "k3": (0.95, 1.0), "k1": (1.0, 1.0)}
    cells = session(linear_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES, scales=scales)
    result = cost_results(cells, facts(LENGTHS), [], seed=0)
    for row in result["tau_min"]:
        low, high = row["tau_min_interval"]
        assert low < row["tau_min"] < high
    assert result == cost_results(cells, facts(LENGTHS), [], seed=0)


def test_one_start_per_arm_has_no_interval_and_says_so() -> None:
    scales: dict[str, tuple[float, ...]] = {"ar": (1.0,), "k3": (1.0,), "k1": (1.0,)}
    cells = session(linear_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES, scales=scales)
    result = cost_results(cells, facts(LENGTHS), [], seed=0)
    assert all(row["tau_min_interval"] is None for row in result["tau_min"])
    assert all(row["measured"]["interval"] is None for row in result["break_even"])


@pytest.mark.parametrize(
    ("alpha", "length", "tokens"), [(0.8, 5, 3.68928), (0.5, 1, 1.5), (0.0, 4, 1.0), (1.0, 4, 5.0), (0.6, 7, 2.4580096)]
)
def test_expected_tokens_of_leviathan(alpha: float, length: int, tokens: float) -> None:
    assert leviathan.expected_tokens(alpha, length) == pytest.approx(tokens)
    assert leviathan.expected_tokens(alpha, length) == pytest.approx(sum(alpha**index for index in range(length + 1)))


def test_speedup_of_leviathan() -> None:
    """Table 1 of the paper prints 2.53x for alpha 0.6, gamma 7 at c = 0 rounded down from 2.46; the corollary bounds it."""
    assert leviathan.speedup(0.8, 5, 0.0) == pytest.approx(3.68928)
    assert leviathan.speedup(0.8, 5, 0.1) == pytest.approx(3.68928 / 1.5)
    for alpha, ratio in itertools.product((0.3, 0.6, 0.9), (0.05, 0.2)):
        best = max(leviathan.speedup(alpha, length, ratio) for length in range(1, 20))
        assert (best > 1) == (alpha > ratio)
        if alpha > ratio:
            assert best >= (1 + alpha) / (1 + ratio) - 1e-12


def test_alpha_counts_comparisons() -> None:
    """Steps accept 3 of 3, 1 of 3 and 0 of 3: 3 + 2 + 1 comparisons, 4 of them won."""
    assert leviathan.pooled_alpha([[3, 1], [0]], [[3, 3], [3]]) == pytest.approx(4 / 6)
    assert leviathan.pooled_alpha([[], []], [[], []]) is None


def test_leviathan_rows_say_what_went_in() -> None:
    row = next(row for row in linear_session()["leviathan"] if row["arm"] == "k3")
    ratio = (linear_law("k3", 1) / linear_law("ar", 1) - 1) / 3
    assert row["cost_ratio"] == pytest.approx(ratio)
    assert row["alpha"] == pytest.approx(6 / (6 + 4), abs=0.03)
    assert row["speedup"] == pytest.approx(row["expected_tokens"] / (1 + 3 * ratio))


def test_the_oracle_beats_every_fixed_chain_and_is_exact_in_corners() -> None:
    for row in linear_session()["oracle"]:
        assert row["speedup"] >= row["best_fixed_speedup"] * 0.999
        assert row["label"].startswith("simulated")
    times = {0: 10.0, 1: 12.0, 3: 20.0}
    assert oracle.oracle_speedup(times, drafts=0.0, tau=1.0) == 1
    assert oracle.oracle_speedup(times, drafts=3.0, tau=4.0) == 2
    assert oracle.oracle_speedup(times, drafts=2.0, tau=3.0) == pytest.approx(3 * 10 / 16)


def test_other_methods_have_a_line_of_their_own() -> None:
    def law(arm: str, running: int) -> float:
        return 0.031 + 0.002 * running if arm == "ngram" else linear_law(arm, running)

    cells = session(law, lengths={**LENGTHS, "ngram": 3}, accepts={**ACCEPTS, "ngram": [1, 0]}, batch_sizes=SIZES)
    arms = facts(LENGTHS) | {"ngram": ArmFacts("other", 3, {"method": "ngram", "num_speculative_tokens": 3}, False)}
    result = cost_results(cells, arms, [], seed=0)
    constants = result["fit"][0]["constants"]
    assert constants["step:ngram"] == pytest.approx(0.031)
    assert constants["token"] == pytest.approx(TOKEN)
    assert "ngram" not in {row["arm"] for row in result["leviathan"]}


def test_plain_decoding_under_another_name_and_the_schedule_are_no_drafting_arms() -> None:
    cells = session(linear_law, lengths={"k3": 3}, accepts=ACCEPTS, batch_sizes=SIZES)
    for by_arm in cells.values():
        by_arm["control"] = by_arm[AR]
        by_arm["schedule"] = by_arm["k3"]
    config = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    arms = facts({"k3": 3}) | {
        "control": ArmFacts("other", 0, None, False),
        "schedule": ArmFacts("schedule", 3, config, False),
    }
    (measured,) = measured_groups(cells, arms)
    assert measured.arms == ["k3"]


@pytest.mark.parametrize("sizes", [(1,), (1, 4), (4, 16, 64)])
def test_few_batch_sizes(sizes: tuple[int, ...]) -> None:
    """One or two sizes hold nothing out and choose no form; three hold one out."""
    cells = session(linear_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=sizes)
    result = cost_results(cells, facts(LENGTHS), [], seed=0)
    (fit,) = result["fit"]
    assert fit["held_out_batch_sizes"] == ([16] if len(sizes) == 3 else [])
    assert len(result["tau_min"]) == 2 * len(sizes)
    if len(sizes) < 3:
        assert (fit["median_relative_error"], result["errors"]["cells"]) == (None, 0)


def test_records_without_steps_or_with_holes_are_not_an_error() -> None:
    cells = session(linear_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES)
    keys = list(cells)
    del cells[keys[0]]["k1"]  # an arm that died in one cell
    cells[keys[2]]["k3"] = cells[keys[2]]["k3"][:1]
    del cells[keys[5]][AR]
    result = cost_results(cells, facts(LENGTHS), [], seed=0)
    assert {row["batch_size"] for row in result["tau_min"]} == {1, 2, 4, 8, 16}
    assert cost_results({}, facts(LENGTHS), [], seed=0)["fit"] == []
    only = {key: {AR: arms[AR]} for key, arms in cells.items() if AR in arms}
    assert cost_results(only, facts(LENGTHS), [], seed=0)["tau_min"] == []


def test_the_section_is_json(tmp_path) -> None:
    write_json(tmp_path / "cost.json", linear_session())


def test_datasets_and_temperatures_have_models_of_their_own() -> None:
    cells = session(linear_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES)
    cells |= session(roofline_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES, temperature=1.0)
    cells |= session(linear_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=(8,), dataset="humaneval")
    fits = cost_results(cells, facts(LENGTHS), [], seed=0)["fit"]
    places = [(fit["dataset"], fit["temperature"], fit["form"]) for fit in fits]
    assert places[:2] == [("heldout", 0.0, "linear"), ("heldout", 1.0, "roofline")]
    assert places[2][0] == "humaneval"


def test_tau_of_the_acceptance_section_stands_beside_ours() -> None:
    cells = session(linear_law, lengths={"k3": 3}, accepts=ACCEPTS, batch_sizes=(1, 4))
    row = {"dataset": "heldout", "temperature": 0.0, "batch_size": 4, "arm": "k3"}
    row |= {"tau": 2.2, "tau_interval": [2.1, 2.3], "tau_all_steps_common": 2.1}
    rows = cost_results(cells, facts({"k3": 3}), [row], seed=0)["tau_min"]
    assert [(each["tau_drafted"], each["tau_common"]) for each in rows] == [(None, None), (2.2, 2.1)]


def test_replay_reproduces_the_loop_that_the_law_made() -> None:
    cell = serve(AR, batch_size=4, law=linear_law, requests=9)
    seconds = replay(
        steps_needed([request.n_out for request in cell.requests], tau=1.0),
        batch_size=4,
        step_seconds=lambda running: linear_law(AR, running),
        prefill_seconds=0.004,
    )
    assert seconds == pytest.approx(cell.makespan)
    assert sum(request.n_out for request in cell.requests) / seconds == pytest.approx(throughput(cell))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.floats(1, 6))
def test_all_steps_together_take_what_tau_says(lengths: list[int], tau: float) -> None:
    needed = steps_needed(lengths, tau=tau)
    assert min(needed) >= 0
    assert abs(sum(needed) - sum(length - 1 for length in lengths) / tau) <= 0.5 + 1e-6


def test_draws_resample_whole_starts_of_all_arms() -> None:
    """Deviations of +-0.1 in one arm show in the draws of every arm; a start's cells move together."""
    logs = {"ar": np.array([[0.1, 0.1], [-0.1, -0.1]]), "k3": np.array([[1.0, 2.0], [1.0, 2.0]])}
    values = StartValues((1, 4), logs)
    drawn = values.draws(500, seed=0)
    assert drawn is not None
    moved = np.log(drawn["k3"]) - [1.0, 2.0]
    assert np.allclose(moved[:, 0], moved[:, 1])
    assert np.abs(moved).max() == pytest.approx(0.1 * math.sqrt(2))
    assert values.spread() == pytest.approx(0.1)
    assert StartValues((1, 4), {arm: rows[:1] for arm, rows in logs.items()}).draws(5, seed=0) is None


def test_interval_of_a_ratio_covers_the_truth_with_three_starts() -> None:
    """Six arms of three starts each; the ratio of two of them is covered about as often as it says."""
    generator = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        values = StartValues((1,), {f"a{arm}": 0.05 * generator.standard_normal((3, 1)) for arm in range(6)})
        drawn = values.draws(400, seed=trial)
        assert drawn is not None
        low, high = np.percentile(drawn["a0"] / drawn["a1"], [2.5, 97.5])
        covered += low <= 1 <= high
    assert 180 <= covered <= 198


def test_the_statistics_import_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, eyas.eval.cost.rows, eyas.eval.cost.schedule, eyas.eval.cost.ceiling_rows;"
        "print({'torch', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_points_of_a_form_that_extrapolates_below_zero_stay_positive() -> None:
    points = [model.Point(AR, 0, 8, 1.0), model.Point(AR, 0, 16, 9.0)]
    for form in model.FORMS:
        assert (model.fit(points, form=form).seconds(AR, [1.0, 4.0]) > 0).all()
