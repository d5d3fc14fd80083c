from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from eyas.eval.power import (
    POWER,
    Noise,
    measured_noise,
    plan_starts,
    power_rows,
    resolved_ratio,
    smallest_detectable_ratio,
    starts_needed,
)
from eyas.eval.records import AR, AR_TWIN, CellRecord
from eyas.eval.samples import take_sample
from eyas.eval.simulation import WEIGHT_SPREAD, Design, make_cell, simulate
from tests.eval_noise import noisy_session
from tests.eval_records import cell

NOISE = Noise(start_sd=0.03, block_sd=0.08, prompt_sd=0.1, prompts=25)


def test_many_starts_reach_the_normal_formula() -> None:
    """1.960 for the test and 0.842 for a power of 0.8; the null band asks for a little more than the interval."""
    error = math.sqrt(2 / 400 * (0.03**2 + 0.08**2 / 4) + 0.1**2 / 4000)
    ratio = smallest_detectable_ratio(start_sd=0.03, block_sd=0.08, starts=400, blocks=4, prompt_sd=0.1, prompts=4000)
    assert math.log(ratio) == pytest.approx((1.95996 + 0.84162) * error, rel=0.03)


def test_no_scatter_leaves_the_prompts() -> None:
    ratio = smallest_detectable_ratio(start_sd=0.0, block_sd=0.0, starts=3, prompt_sd=0.1, prompts=1000)
    assert math.log(ratio) == pytest.approx((1.96 + 0.84) * 0.1 / math.sqrt(1000), rel=0.03)


def test_more_of_anything_resolves_smaller_differences_and_more_tests_larger_ones() -> None:
    base = smallest_detectable_ratio(start_sd=0.05, block_sd=0.08, starts=3)
    assert smallest_detectable_ratio(start_sd=0.05, block_sd=0.08, starts=4) < base
    assert smallest_detectable_ratio(start_sd=0.05, block_sd=0.08, starts=3, blocks=4) < base
    assert smallest_detectable_ratio(start_sd=0.05, block_sd=0.08, starts=3, arms=6) < base
    assert smallest_detectable_ratio(start_sd=0.05, block_sd=0.08, starts=3, tests=20) > base


def test_one_start_resolves_nothing_and_says_so() -> None:
    with pytest.raises(ValueError, match="plan 2 or more"):
        smallest_detectable_ratio(start_sd=0.05, block_sd=0.08, starts=1)


@pytest.mark.parametrize(("starts", "start_sd", "prompt_sd"), [(3, 0.04, 0.02), (6, 0.02, 0.1)])
def test_the_resolved_ratio_is_found_as_often_as_promised(starts: int, start_sd: float, prompt_sd: float) -> None:
    noise = Noise(start_sd=start_sd, block_sd=0.0, prompt_sd=prompt_sd, prompts=40)
    ratio = resolved_ratio(noise, starts=starts, blocks=1, arms=2)
    design = Design(
        arms=2,
        starts=starts,
        prompts=40,
        start_sd=start_sd,
        block_sd=0.0,
        prompt_sd=prompt_sd / WEIGHT_SPREAD,
        answer_sd=0.0,
        log_ratio=-math.log(ratio),
    )
    result = simulate(design, sessions=500, seed=3)
    assert result.slower == pytest.approx(POWER, abs=0.05)
    assert result.faster == 0


def test_the_resolved_ratio_of_pairs_is_found_as_often_as_promised() -> None:
    """Side by side: AR, its twin and one arm, each pair one draw of the ratio."""
    noise = Noise(start_sd=0.04, block_sd=0.0, prompt_sd=0.05, prompts=40)
    ratio = resolved_ratio(noise, starts=4, blocks=1, arms=3, paired=True)
    design = Design(
        arms=3,
        starts=4,
        prompts=40,
        start_sd=0.04,
        block_sd=0.0,
        prompt_sd=0.05 / WEIGHT_SPREAD,
        answer_sd=0.0,
        log_ratio=-math.log(ratio),
        paired=True,
    )
    result = simulate(design, sessions=600, seed=3)
    assert result.tests == 600
    assert result.slower == pytest.approx(POWER, abs=0.05)
    assert result.faster == 0


def test_made_up_pairs_have_the_stated_coverage() -> None:
    design = Design(arms=4, starts=3, prompts=16, start_sd=0.05, block_sd=0.0, prompt_sd=0.1, paired=True)
    result = simulate(design, sessions=500, seed=5)
    assert result.tests == 1000
    assert result.coverage == pytest.approx(0.95, abs=0.02)
    assert result.alarms <= 0.07


def test_starts_that_fit_into_a_budget() -> None:
    plan = plan_starts(seconds_per_start=100, budget_seconds=3600, arms=4, noise=NOISE)
    assert (plan.starts, plan.seconds) == (9, 3600)
    assert plan.detectable_ratio == pytest.approx(resolved_ratio(NOISE, starts=9, blocks=1, arms=4))
    assert plan_starts(seconds_per_start=100, budget_seconds=799, arms=4).detectable_ratio is None
    assert plan_starts(seconds_per_start=100, budget_seconds=10, arms=4).starts == 0
    pairs = plan_starts(seconds_per_start=100, budget_seconds=3600, arms=4, noise=NOISE, paired=True)
    assert (pairs.starts, pairs.seconds) == (12, 3600), "three pairs a round"
    assert pairs.detectable_ratio == pytest.approx(resolved_ratio(NOISE, starts=12, blocks=1, arms=4, paired=True))


def test_starts_needed_is_the_first_that_resolves() -> None:
    needed = starts_needed(1.1, noise=NOISE, blocks=1, arms=3, tests=1)
    assert starts_needed(1.0001, noise=NOISE, blocks=1, arms=3, tests=1) is None
    assert needed is not None
    assert resolved_ratio(NOISE, starts=needed, blocks=1, arms=3) <= 1.1
    assert resolved_ratio(NOISE, starts=needed - 1, blocks=1, arms=3) > 1.1


def test_more_tests_need_more_starts() -> None:
    alone = starts_needed(1.2, noise=NOISE, blocks=1, arms=3, tests=1)
    among = starts_needed(1.2, noise=NOISE, blocks=1, arms=3, tests=60)
    assert alone is not None and among is not None
    assert among > alone
    assert resolved_ratio(NOISE, starts=among, blocks=1, arms=3, tests=60) <= 1.2


def test_noise_is_measured_as_it_was_made() -> None:
    design = Design(
        arms=4, starts=60, blocks=6, prompts=400, start_sd=0.05, block_sd=0.08, prompt_sd=0.2, answer_sd=0.1
    )
    noise = measured_noise(make_cell(design, generator=np.random.default_rng(1)))
    assert noise is not None
    assert noise.start_sd == pytest.approx(0.05, rel=0.15)
    assert noise.block_sd == pytest.approx(0.08, rel=0.1)
    assert noise.prompt_sd == pytest.approx(0.2 * WEIGHT_SPREAD, rel=0.15)


def test_noise_needs_two_starts_and_plain_decoding() -> None:
    one = take_sample([[cell(40.0)]], metric="throughput")
    two = take_sample([[cell(40.0)], [cell(42.0)]], metric="throughput")
    assert measured_noise({AR: one, "k3": one}) is None
    assert measured_noise({"k3": two}) is None
    assert measured_noise({AR: two, "k3": one}) is not None
    lonely = take_sample([[cell(40.0, requests=1)], [cell(42.0, requests=1)]], metric="throughput")
    assert measured_noise({AR: lonely, "k3": lonely}) is None, "one prompt shows no scatter of prompts"


def test_noise_of_pairs_is_that_of_their_ratios() -> None:
    """Starts that scatter by 30 % alike in both engines of a pair leave a ratio that scatters by what is put on it."""
    design = Design(arms=4, starts=60, prompts=200, start_sd=0.05, block_sd=0.0, prompt_sd=0.2, paired=True)
    generator = np.random.default_rng(1)
    samples = make_cell(design, generator=generator)
    shared = 0.3 * generator.standard_normal(180)
    samples[AR] = replace(samples[AR], offset=samples[AR].offset + shared)
    for number, name in enumerate(design.names[1:]):
        own = shared[60 * number : 60 * (number + 1)]
        samples[name] = replace(samples[name], offset=samples[name].offset + own)
    noise = measured_noise(samples, partners=design.partners)
    assert noise is not None
    assert noise.start_sd == pytest.approx(0.05, rel=0.15)
    assert noise.prompt_sd == pytest.approx(0.2 * WEIGHT_SPREAD, rel=0.15)
    alone = measured_noise(samples)
    assert alone is not None and alone.start_sd > 0.2
    del samples[AR_TWIN]
    assert measured_noise(samples, partners=design.partners) is None


def test_power_rows_of_a_session() -> None:
    rows = power_rows(noisy_session({"k3": 1.2, "k1": 1.1}, seed=1, cells=3), tests=8)
    assert [row["batch_size"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["starts"], row["blocks"], row["arms"], row["tests"], row["prompts"]) == (4, 1, 3, 8, 16)
        assert row["start_sd"] == pytest.approx(0.03, abs=0.02)
        assert row["block_sd"] is None
        assert 1 < row["smallest_detectable_ratio"] < row["smallest_detectable_ratio_after_holm"] < 1.3
        assert list(row["starts_needed"]) == ["1.03", "1.05", "1.1", "1.2"]
        needed = [starts or 99 for starts in row["starts_needed"].values()]
        assert needed == sorted(needed, reverse=True)
        for ratio, starts in row["starts_needed"].items():
            resolves = float(ratio) >= row["smallest_detectable_ratio_after_holm"]
            assert resolves == (starts is not None and starts <= 4), "the session's own starts are enough, or not"


def test_power_rows_side_by_side_count_pairs() -> None:
    cells = noisy_session({AR_TWIN: 1.0, "k3": 1.2}, seed=1, cells=2)
    pairs = {arm: [(start, start) for start in range(4)] for arm in (AR_TWIN, "k3")}
    row, _ = power_rows(cells, tests=2, partners=pairs)
    assert (row["starts"], row["arms"], row["block_sd"]) == (4, 3, None)
    group = next(iter(cells.values()))
    logs = {arm: np.log([cell_rate(blocks) for blocks in starts]) for arm, starts in group.items()}
    spread = [np.var(logs[arm] - logs[AR], ddof=1) for arm in pairs]
    assert row["start_sd"] == pytest.approx(math.sqrt(np.mean(spread)), rel=1e-6)
    assert power_rows(cells, tests=2, partners={"k3": pairs["k3"]}) == [], "no band without the twin"


def cell_rate(blocks: list[CellRecord]) -> float:
    (block,) = blocks
    return sum(request.n_out for request in block.requests) / block.makespan


def test_a_session_of_one_start_has_noise_of_no_cell() -> None:
    assert power_rows(noisy_session({"k3": 1.2}, seed=1, cells=1, starts=1), tests=1) == []
