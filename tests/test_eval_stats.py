from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.distributions import rate_interval, student_quantile, student_tail
from eyas.eval.holm import holm
from eyas.eval.null import leave_one_out, null_band, null_band_of_pairs, null_rows
from eyas.eval.partners import partners_of
from eyas.eval.records import AR, AR_TWIN, CellKey, StartRecord
from eyas.eval.samples import METRICS, Sample, take_sample
from eyas.eval.simulation import Design, simulate
from eyas.eval.stats import bootstrap_ratio, compare, geometric_mean, moved, pool_of, pool_residuals, start_residuals
from tests.eval_noise import noisy_cell, noisy_session, noisy_starts
from tests.eval_records import cell, request


def arm(*rates: float, requests: int = 4) -> list[list]:
    """Starts with one block each."""
    return [[cell(rate, requests=requests)] for rate in rates]


@pytest.mark.parametrize(
    ("tail", "degrees", "known"),
    [
        (0.05, 1, 12.7062),
        (0.05, 2, 4.30265),
        (0.05, 4, 2.77645),
        (0.1, 10, 1.81246),
        (0.001, 30, 3.64596),
        (0.05, 1e9, 1.959964),
    ],
)
def test_student_quantiles_of_printed_tables(tail: float, degrees: float, known: float) -> None:
    assert student_quantile(tail, degrees) == pytest.approx(known, rel=2e-6)
    assert student_tail(known, degrees) == pytest.approx(tail, rel=1e-5)
    assert student_tail(-known, degrees) == student_tail(known, degrees)


def test_student_quantiles_are_the_inverse_of_the_tail_from_cauchy_to_normal() -> None:
    for degrees in (1, 1.3, 2, 3.7, 12, 90, 4000, 9e6):
        for tail in (1.0, 0.9, 0.05, 0.05 / 120, 1e-7):
            assert student_tail(student_quantile(tail, degrees), degrees) == pytest.approx(tail, rel=1e-8)


def test_student_with_one_degree_is_cauchy_and_with_two_has_a_closed_form() -> None:
    for t in (0.01, 0.7, 3.0, 250.0):
        assert student_tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-10)
        assert student_tail(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-7)
    assert student_tail(math.inf, 3) == 0


def test_exact_intervals_of_rates() -> None:
    assert rate_interval(0, 40, level=0.95) == pytest.approx((0, 1 - 0.025 ** (1 / 40)))
    assert rate_interval(40, 40, level=0.95) == pytest.approx((0.025 ** (1 / 40), 1))
    assert rate_interval(8, 20, level=0.95) == pytest.approx((0.191190, 0.639457), abs=1e-6)


def test_holm_multiplies_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_keeps_the_order_and_lies_between_the_p_value_and_bonferroni(values: list[float]) -> None:
    adjusted = holm(values)
    for value, result in zip(values, adjusted, strict=True):
        assert value <= result <= min(1.0, len(values) * value) or result == pytest.approx(max(adjusted))
    for (a, x), (b, y) in zip(
        zip(values, adjusted, strict=True), zip(values[1:], adjusted[1:], strict=True), strict=False
    ):
        assert (a - b) * (x - y) >= 0


def test_metrics_are_ratios_of_sums() -> None:
    served = [
        request("a", submit=0, first=0.5, finish=2.5, token_ids=list(range(21))),
        request("b", submit=1, first=1.5, finish=4.5, token_ids=list(range(11))),
        request("c", submit=4, first=5, finish=5, token_ids=[1]),
    ]
    block = replace(cell(40.0), requests=served, makespan=5.0)
    values = {metric: math.exp(take_sample([[block]], metric=metric).log_values()[0]) for metric in METRICS}
    assert values["throughput"] == pytest.approx(33 / 5.0)
    assert values["tpot"] == pytest.approx((2.0 / 20 + 3.0 / 10) / 2)
    assert values["e2e"] == pytest.approx((2.5 + 3.5 + 1) / 3)
    assert values["ttft"] == pytest.approx((0.5 + 0.5 + 1) / 3)


def test_turns_of_one_conversation_are_one_prompt() -> None:
    served = [request(f"p{index}", conversation=None if index == 0 else "talk") for index in range(4)]
    sample = take_sample([[replace(cell(40.0), requests=served)]], metric="e2e")
    assert sample.prompts == ("p0", "talk")
    assert sample.denominator.tolist() == [[1, 3]]


def test_tpot_of_one_token_answers_does_not_exist() -> None:
    served = [request(f"p{index}", token_ids=[1]) for index in range(3)]
    assert not take_sample([[replace(cell(40.0), requests=served)]], metric="tpot").measurable


def test_other_prompts_in_another_start_are_refused() -> None:
    with pytest.raises(AssertionError, match="same prompts"):
        take_sample([[cell(40.0, requests=4)], [cell(40.0, requests=5)]], metric="e2e")


def test_ratio_of_constant_cells_is_exact() -> None:
    interval = bootstrap_ratio(arm(40, 40), arm(50, 50), seed=1)
    assert (interval.ratio, interval.low, interval.high) == pytest.approx((1.25, 1.25, 1.25))
    assert interval.p_value < 1e-9
    assert bootstrap_ratio(arm(40, 40), arm(40, 40), seed=1).p_value == 1


def test_the_interval_is_student_t_over_pooled_starts() -> None:
    baseline, treated = [40.0, 44.0, 42.0], [50.0, 51.0, 56.0]
    interval = bootstrap_ratio(arm(*baseline), arm(*treated), seed=1, draws=200_000)
    logs = np.log([baseline, treated])
    pooled = logs.var(axis=1, ddof=1).mean()
    half = 2.776445 * math.sqrt(pooled * 2 / 3)
    ratio = geometric_mean(treated) / geometric_mean(baseline)
    assert interval.degrees_of_freedom == pytest.approx(4, rel=1e-6)
    assert (interval.ratio, interval.low, interval.high) == pytest.approx(
        (ratio, ratio * math.exp(-half), ratio * math.exp(half)), rel=2e-3
    )


def test_a_percentile_bootstrap_over_three_starts_would_be_far_narrower() -> None:
    logs = np.log([[40.0, 44.0, 42.0], [50.0, 51.0, 56.0]])
    generator = np.random.default_rng(0)
    drawn = [generator.choice(each, size=(20_000, 3)).mean(axis=1) for each in logs]
    percentiles = np.percentile(drawn[1] - drawn[0], [2.5, 97.5])
    interval = bootstrap_ratio(arm(40, 44, 42), arm(50, 51, 56), seed=1)
    assert math.log(interval.high / interval.low) > 1.6 * (percentiles[1] - percentiles[0])


def test_other_arms_add_degrees_of_freedom() -> None:
    cells = {cell(1.0).key: {AR: arm(40, 41, 42), "k3": arm(50, 51, 52), "k1": arm(45, 46, 47), "one": arm(40)}}
    residuals = start_residuals(cells)
    pool = residuals.by_cell[cell(1.0).key]
    assert pool.degrees == 6
    spread = [np.var(np.log(rates), ddof=1) for rates in ([40, 41, 42], [50, 51, 52], [45, 46, 47])]
    assert pool.sd == pytest.approx(math.sqrt(np.mean(spread)))
    key = cell(1.0).key
    alone = bootstrap_ratio(cells[key][AR], cells[key]["k3"], seed=1)
    together = bootstrap_ratio(cells[key][AR], cells[key]["k3"], residuals=residuals, seed=1)
    assert (alone.degrees_of_freedom, together.degrees_of_freedom) == pytest.approx((4, 6))


def test_blocks_of_a_start_are_averaged_and_not_counted_as_starts() -> None:
    starts = [[cell(40.0), cell(48.0, block=1)], [cell(44.0), cell(44.0, block=1)]]
    sample = take_sample(starts, metric="throughput")
    assert np.exp(sample.start_means()) == pytest.approx([geometric_mean([40, 48]), 44])
    assert pool_of({AR: sample}).degrees == 1


def test_one_start_per_arm_gives_an_indicative_interval_from_blocks() -> None:
    blocks = [[cell(rate, block=index) for index, rate in enumerate((40.0, 42.0, 44.0))]]
    interval = bootstrap_ratio(blocks, blocks, seed=1)
    assert interval.indicative
    assert interval.low < 1 < interval.high
    assert not bootstrap_ratio(arm(40, 42), arm(40, 42), seed=1).indicative


def test_taking_the_noise_of_answers_away_leaves_its_uncertainty() -> None:
    """Prompts that scatter no more than answers do: their share of the variance is near 0, yet not known to be 0."""
    generator = np.random.default_rng(2)
    names, rows, tokens = tuple(f"p{index}" for index in range(9)), np.arange(3), np.full((3, 9), 50.0)
    arms = [
        Sample(names, rows, tokens, tokens * np.exp(0.1 * generator.standard_normal((3, 9))), np.zeros(3))
        for _ in range(2)
    ]
    influence = arms[1].influence().mean(axis=0) - arms[0].influence().mean(axis=0)
    drawn = float(np.sum(influence**2))
    pool = pool_residuals([each.start_means() for each in arms])
    starts = pool.sd**2 * 2 / 3
    interval = compare(*arms, pool=pool, seed=1, draws=50_000)
    total = interval.standard_error**2
    assert total < starts + drawn, "answers are in both, and are subtracted once"
    expected = total**2 / (starts**2 / 4 + (drawn * 9 / 8) ** 2 / 8)
    assert interval.degrees_of_freedom == pytest.approx(expected, rel=0.1)
    known_exactly = total**2 / (starts**2 / 4 + (total - starts) ** 2 / 8)
    assert interval.degrees_of_freedom < 0.9 * known_exactly


def test_one_prompt_gives_an_indicative_interval() -> None:
    """One prompt shows no scatter of prompts, so an interval that took it for none would be far too narrow."""
    assert bootstrap_ratio(arm(40, 41, 42, requests=1), arm(50, 51, 52, requests=1), seed=1).indicative
    assert not bootstrap_ratio(arm(40, 41, 42, requests=2), arm(50, 51, 52, requests=2), seed=1).indicative


def test_pairs_of_starts_cancel_what_both_arms_share() -> None:
    baseline, treated = arm(40, 50, 45), arm(44, 55, 49.5)
    alone = bootstrap_ratio(baseline, treated, seed=1)
    together = bootstrap_ratio(baseline, treated, paired=True, seed=1)
    assert together.ratio == pytest.approx(alone.ratio) == pytest.approx(1.1)
    assert alone.low < 1 < alone.high
    assert together.low == pytest.approx(1.1)
    noisy = bootstrap_ratio(baseline, arm(44, 54, 50), paired=True, seed=1)
    assert noisy.degrees_of_freedom == pytest.approx(2)


def start(name: str, number: int, round_: int, beside: str | None) -> StartRecord:
    kind = "ar" if name == AR else "head"
    protocol = "starts" if beside is None else "side-by-side"
    return StartRecord(name, kind, number, round_, protocol, "grid", beside, 0, {}, [])


def test_partners_are_found_by_round_and_a_start_without_one_is_left_out() -> None:
    starts = [
        start(AR, 0, 0, "k3"),
        start("k3", 1, 0, AR),
        start("k1", 3, 0, AR),  # its AR partner left no record
        start("k1", 4, 1, AR),
        start(AR, 5, 1, "k1"),
        start("k3", 6, 1, AR),
        start(AR, 7, 1, "k3"),
    ]
    assert partners_of(starts) == {"k3": [(0, 0), (2, 1)], "k1": [(1, 1)]}
    assert partners_of([start(AR, 0, 0, None), start("k3", 1, 0, None)]) is None


def test_prompts_are_resampled_in_both_arms_together() -> None:
    """What differs between prompts but not between arms is no noise of the ratio; what differs between arms is."""
    generator = np.random.default_rng(3)
    prompts = 60
    tokens, cost = np.full((3, prompts), 50.0), np.exp(0.4 * generator.standard_normal(prompts))
    shared = tokens * cost
    names = tuple(f"p{index}" for index in range(prompts))
    rows = np.arange(3)
    plain = Sample(names, rows, tokens, shared, np.zeros(3))
    faster = replace(plain, denominator=shared / 1.2)
    own = replace(plain, denominator=shared * np.exp(0.2 * generator.standard_normal(prompts)))
    pool = pool_residuals([np.zeros(3), np.zeros(3)])
    assert compare(plain, faster, pool=pool, seed=1).standard_error == pytest.approx(0, abs=1e-9)
    influence = own.influence()[0] - plain.influence()[0]
    expected = math.sqrt(float(np.sum(influence**2)))
    assert compare(plain, own, pool=pool, seed=1, draws=20_000).standard_error == pytest.approx(expected, rel=0.05)


@given(st.floats(0.5, 2), st.integers(0, 5))
def test_p_value_and_interval_say_the_same(factor: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    baseline, treated = (noisy_starts(rate, generator, starts=3, requests=6) for rate in (40, 40 * factor))
    interval = bootstrap_ratio(baseline, treated, seed=seed, draws=100)
    assert (interval.p_value < 0.05) == (not interval.low <= 1 <= interval.high)


def test_an_interval_moves_as_the_records_do() -> None:
    generator = np.random.default_rng(5)
    first, second = (take_sample(noisy_starts(40, generator, starts=3), metric="throughput") for _ in range(2))
    pool = pool_of({AR: first, "k3": second})
    shifted = compare(first, second.slowed(math.log(0.8)), pool=pool, seed=1)
    quick = moved(compare(first, second, pool=pool, seed=1), log_factor=math.log(0.8))
    assert vars(quick) == pytest.approx(vars(shifted))


def test_the_seed_fixes_the_interval() -> None:
    generator = np.random.default_rng(0)
    arms = [[noisy_cell(rate, generator)] for rate in (40, 41, 42)], [[noisy_cell(50, generator)] for _ in range(3)]
    assert bootstrap_ratio(*arms, seed=5) == bootstrap_ratio(*arms, seed=5)
    assert bootstrap_ratio(*arms, seed=5) != bootstrap_ratio(*arms, seed=6)


@given(st.floats(0.2, 5), st.integers(1, 4))
def test_the_interval_contains_the_ratio_and_scales_with_it(factor: float, starts: int) -> None:
    baseline = arm(*(40.0 + number for number in range(starts)))
    treated = arm(*(factor * (40.0 + number) for number in range(starts)))
    interval = bootstrap_ratio(baseline, treated, seed=0, draws=100)
    assert interval.ratio == pytest.approx(factor)
    assert interval.low <= factor * (1 + 1e-9)
    assert interval.high >= factor * (1 - 1e-9)


QUIET = Design(arms=2, starts=3, prompts=12, start_sd=0.0, block_sd=0.02, prompt_sd=0.1)


@pytest.mark.parametrize(
    "design",
    [
        QUIET,
        replace(QUIET, start_sd=0.1, block_sd=0.12, prompt_sd=0.05),
        replace(QUIET, arms=5, start_sd=0.03, block_sd=0.05, prompts=16),
        replace(QUIET, starts=8, start_sd=0.05, blocks=3, prompts=16),
        replace(QUIET, arms=9, start_sd=0.02, answer_sd=0.2, prompts=32),
    ],
)
def test_coverage_by_simulation(design: Design) -> None:
    """The full table, with more tests per design, is in docs/evaluation.md; with few prompts as the only noise it is high."""
    result = simulate(design, sessions=-(-1000 // (design.arms - 1)), seed=11)
    assert 0.93 <= result.coverage <= 0.98
    assert result.alarms <= 0.075


def test_sessions_of_many_tests_keep_their_rate_with_few_prompts_as_the_only_noise() -> None:
    """Eight of these 100 sessions called something while the noise of answers was taken away as if it were known."""
    design = replace(QUIET, arms=6, cells=24)
    assert design.tests == 120
    assert simulate(design, sessions=100, seed=3).alarms <= 0.05


def test_the_null_band_is_the_scatter_of_ar_scaled_to_the_groups() -> None:
    quiet = take_sample(arm(40, 40, 40), metric="throughput")
    loud = take_sample(arm(40, 44, 42), metric="throughput")
    sd = float(np.log([40, 44, 42]).std(ddof=1))
    for ar, other in ((loud, quiet), (quiet, loud)):
        pool = pool_of({AR: ar, "k3": other})
        band = null_band(ar, pool=pool, treated_starts=3)
        own_sd = sd if ar is loud else sd / math.sqrt(2)
        assert band is not None
        assert math.log(band[1]) == pytest.approx(2.776445 * own_sd * math.sqrt(2 / 3), rel=1e-5)
        assert band[0] == pytest.approx(1 / band[1])
    assert null_band(take_sample(arm(40), metric="throughput"), pool=pool_residuals([]), treated_starts=3) is None


def test_splits_of_the_ar_starts_have_the_scatter_that_the_band_takes() -> None:
    """Root mean square over all splits of six starts in two groups = sd * sqrt(1/3 + 1/3)."""
    from itertools import combinations

    values = np.log([40, 44, 42, 39, 45, 41.5])
    ratios = [values[list(group)].mean() - np.delete(values, list(group)).mean() for group in combinations(range(6), 3)]
    assert np.sqrt(np.mean(np.square(ratios))) == pytest.approx(values.std(ddof=1) * math.sqrt(2 / 3))


def test_null_rows() -> None:
    cells = {cell(1.0).key: {AR: arm(40, 44, 42), "k3": arm(50, 50, 50)}, CellKey("x", 0.0, 1): {AR: arm(40)}}
    three, one = null_rows(cells, seed=0)
    assert three["tokens_per_second"] == pytest.approx([40, 44, 42])
    assert three["spread"] == pytest.approx(1.1)
    assert three["leave_one_out"] == pytest.approx(
        [40 / geometric_mean([44, 42]), 44 / geometric_mean([40, 42]), 42 / geometric_mean([40, 44])]
    )
    assert three["ratio"] == pytest.approx(44 / geometric_mean([40, 42]))
    assert three["interval"][0] < three["ratio"] < three["interval"][1]
    assert three["band"][0] < 1 < three["band"][1]
    assert one["tokens_per_second"] == pytest.approx([40])
    assert one["band"] is one["interval"] is one["spread"] is None


def test_the_band_of_pairs_is_the_scatter_of_twins_about_a_ratio_of_one() -> None:
    """One of two equal engines is always 5 % faster: that is no scatter about the mean, but it is what nothing looks like."""
    pool = pool_residuals([np.array([0.01, -0.01, 0.0]), np.array([0.05, 0.05, 0.05])])
    band = null_band_of_pairs(np.array([0.05, 0.05, 0.05]), pool=pool, pairs=3)
    assert band is not None
    assert math.log(band[1]) == pytest.approx(2.776445 * 0.05 / math.sqrt(3), rel=1e-5)
    quiet = null_band_of_pairs(np.zeros(3), pool=pool, pairs=3)
    assert quiet is not None
    assert math.log(quiet[1]) == pytest.approx(2.776445 * pool.sd / math.sqrt(3), rel=1e-5)
    assert null_band_of_pairs(np.array([0.05]), pool=pool, pairs=3) is None


def test_null_rows_side_by_side_compare_ar_with_its_twin() -> None:
    group = {AR: arm(40, 50, 44, 30, 60, 45), AR_TWIN: arm(40.4, 49.5, 44), "k3": arm(36, 72, 54)}
    pairs = {AR_TWIN: [(0, 0), (1, 1), (2, 2)], "k3": [(3, 0), (4, 1), (5, 2)]}
    (row,) = null_rows({cell(1.0).key: group}, partners=pairs, seed=0)
    assert row["ratio"] == pytest.approx(geometric_mean([1.01, 0.99, 1]))
    assert row["band"][0] < row["ratio"] < row["band"][1] < 1.03
    del group[AR_TWIN], pairs[AR_TWIN]
    (alone,) = null_rows({cell(1.0).key: group}, partners=pairs, seed=0)
    assert alone["band"] is alone["ratio"] is alone["interval"] is None
    assert alone["spread"] == pytest.approx(2)


def test_leave_one_out_of_two_starts_is_their_ratio_both_ways() -> None:
    assert leave_one_out(np.log([40.0, 50.0])) == pytest.approx([0.8, 1.25])


def test_a_hundred_cells_take_seconds() -> None:
    from time import process_time

    from eyas.eval.comparison import compare_arms

    group = next(iter(noisy_session({"k3": 1.2}, seed=1, cells=1, starts=3, requests=64).values()))
    began = process_time()
    for seed in range(10):
        compare_arms(group, partners=None, seed=seed)
    assert process_time() - began < 2.0, "ten cells with four metrics and 2000 draws"
