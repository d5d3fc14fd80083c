"""Distributions and tests of the losslessness ladder against values known from elsewhere."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.lossless.binomial import binomial_tail, excluded_rate, mcnemar_one_sided, mcnemar_two_sided
from eyas.eval.lossless.chi_square import (
    critical_value,
    detectable_tv,
    goodness_of_fit,
    noise_floor,
    noncentral_survival,
    noncentrality,
    pool_small,
    pooled,
    survival,
    total_variation,
)
from eyas.eval.lossless.kolmogorov import (
    detectable_distance,
    ks_p_value,
    ks_statistic,
    paired_permutation_p,
    paired_shift_p,
)
from eyas.eval.lossless.two_sample import Stratum, stratum, two_sample

NORMAL = NormalDist()


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    [
        (3.841458820694124, 1, 0.05),  # tables of the chi-square distribution
        (6.634896601021213, 1, 0.01),
        (18.307038053275146, 10, 0.05),
        (124.34211340400407, 100, 0.05),
        (10.0, 5, 0.07523524614651217),
    ],
)
def test_chi_square_survival_is_that_of_the_tables(statistic: float, degrees: int, tail: float) -> None:
    assert survival(statistic, degrees) == pytest.approx(tail, rel=1e-9)
    assert critical_value(tail, degrees) == pytest.approx(statistic, rel=1e-8)


@given(st.integers(1, 60), st.floats(0.01, 400))
def test_chi_square_survival_with_even_degrees_is_a_poisson_sum(half: int, statistic: float) -> None:
    x = statistic / 2
    exact = math.fsum(math.exp(i * math.log(x) - x - math.lgamma(i + 1)) for i in range(half))
    assert survival(statistic, 2 * half) == pytest.approx(exact, rel=1e-8, abs=1e-12)


@given(st.floats(0.001, 60))
def test_chi_square_survival_with_one_degree_is_a_normal_tail(statistic: float) -> None:
    assert survival(statistic, 1) == pytest.approx(math.erfc(math.sqrt(statistic / 2)), rel=1e-9)


def test_far_tails_do_not_vanish_too_early() -> None:
    assert survival(100, 2) == pytest.approx(math.exp(-50), rel=1e-9)
    assert survival(0, 3) == survival(5, 0) == 1
    assert survival(math.inf, 3) == 0


@given(st.floats(0.1, 30), st.floats(0.1, 30))
def test_the_non_central_law_with_one_degree_is_a_shifted_normal(statistic: float, centre: float) -> None:
    root, shift = math.sqrt(statistic), math.sqrt(centre)
    exact = NORMAL.cdf(shift - root) + NORMAL.cdf(-root - shift)
    assert noncentral_survival(statistic, 1, centre) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("degrees", "centre"), [(1, 7.849), (2, 9.635), (3, 10.903), (5, 12.828), (10, 16.241)])
def test_non_centrality_for_a_power_of_eighty_percent(degrees: int, centre: float) -> None:
    """Tables of power analysis (level 0.05)."""
    assert noncentrality(0.05, degrees) == pytest.approx(centre, abs=2e-3)


def test_a_difference_of_the_detectable_size_is_found_four_times_in_five() -> None:
    """A shift spread like the probabilities themselves is the hardest of its size, so the bound is met there."""
    generator, samples, exact = np.random.default_rng(0), 4000, np.full(8, 1 / 8)
    distance = detectable_tv(samples, 7, level=0.01)
    assert distance is not None
    shifted = exact + np.tile([1, -1], 4) * distance / 4
    draws = generator.multinomial(samples, shifted, size=1000)
    found = np.mean([goodness_of_fit(draw.tolist(), exact.tolist()).p_value < 0.01 for draw in draws])
    assert 0.76 < found < 0.84
    assert detectable_tv(samples, 0, level=0.01) is None


@given(st.lists(st.floats(0, 40), min_size=1, max_size=30))
def test_pooled_cells_are_large_enough_and_nothing_is_lost(expected: list[float]) -> None:
    values = np.array(expected)
    groups = pool_small(values)
    sums = pooled(values, groups)
    assert sums.sum() == pytest.approx(values.sum())
    assert sorted(set(groups.tolist())) == list(range(len(sums)))
    assert (sums >= 5).all() or len(sums) == 1
    assert sum(values >= 5) - 1 <= len(sums)


def test_goodness_of_fit_of_a_die() -> None:
    """A textbook's 120 throws: statistic 5.0 with 5 degrees of freedom."""
    result = goodness_of_fit([25, 17, 15, 23, 24, 16], [1 / 6] * 6)
    assert (result.statistic, result.degrees) == (pytest.approx(5.0), 5)
    assert result.p_value == pytest.approx(0.41588, abs=1e-5)


def test_one_impossible_token_is_enough() -> None:
    assert goodness_of_fit([500, 499, 1], [0.5, 0.5, 0.0]).p_value == 0
    assert goodness_of_fit([500, 500, 0], [0.5, 0.5, 0.0]).p_value == 1


def test_total_variation_of_the_law_itself_is_the_noise_floor() -> None:
    generator, law = np.random.default_rng(0), np.full(10, 0.1)
    draws = generator.multinomial(20_000, law, size=300)
    mean = float(np.mean([total_variation(draw.tolist(), law.tolist()) for draw in draws]))
    assert noise_floor(law.tolist(), 20_000) == pytest.approx(mean, rel=0.05)
    assert noise_floor(law.tolist(), 20_000) == pytest.approx(0.0085, abs=1e-4)


def test_binomial_tails_and_pairs() -> None:
    assert binomial_tail(8, 10) == pytest.approx(56 / 1024)
    assert binomial_tail(0, 10) == 1
    assert binomial_tail(0, 0) == 1
    assert mcnemar_two_sided(10, 2) == pytest.approx(2 * 79 / 4096)
    assert mcnemar_two_sided(0, 0) == mcnemar_one_sided(0, 0) == 1
    assert mcnemar_one_sided(1, 0) == pytest.approx(0.5)
    assert mcnemar_one_sided(5, 0) == pytest.approx(1 / 32)


@given(st.integers(0, 40), st.integers(0, 40), st.fractions(Fraction(1, 50), Fraction(49, 50)))
def test_binomial_tail_is_the_exact_sum(successes: int, trials: int, probability: Fraction) -> None:
    terms = (
        math.comb(trials, x) * probability**x * (1 - probability) ** (trials - x) for x in range(successes, trials + 1)
    )
    assert binomial_tail(successes, trials, probability=float(probability)) == pytest.approx(
        float(sum(terms, Fraction(0))), abs=1e-10
    )


def test_the_rule_of_three() -> None:
    assert excluded_rate(100) == pytest.approx(0.0295, abs=1e-4)
    assert excluded_rate(0) is None


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 4), (5, 5), (4, 6)])
def test_the_exact_p_value_counts_all_orders(n: int, m: int) -> None:
    """Every order of n + m different values is equally likely under the null."""
    statistics = []
    for places in itertools.combinations(range(n + m), n):
        others = [place for place in range(n + m) if place not in places]
        statistics.append(ks_statistic(places, others))
    for statistic in set(statistics):
        share = np.mean([value >= statistic - 1e-9 for value in statistics])
        assert ks_p_value(statistic, n, m) == pytest.approx(share)


def test_known_kolmogorov_p_values() -> None:
    assert ks_p_value(0.8, 5, 5) == pytest.approx(0.079365, abs=1e-6)
    assert ks_p_value(0.0, 5, 5) == 1
    # Large samples: the limit law gives 0.05 at 1.358 sqrt(2 / n).
    assert ks_p_value(1.358 * math.sqrt(2 / 400), 400, 400) == pytest.approx(0.05, abs=0.006)


def test_swapping_within_pairs_sees_what_prompts_hide() -> None:
    """Answers of very different lengths, each one token longer on the right: the plain test sees nothing of it, nor of ten."""
    left = [float(10 * index) for index in range(40)]
    right = [value + 1 for value in left]
    assert ks_p_value(ks_statistic(left, right), 40, 40) > 0.9
    assert paired_permutation_p(left, left, seed=0, permutations=200) == 1
    assert paired_shift_p(left, right, seed=0, permutations=2000) == pytest.approx(1 / 2001)
    assert paired_shift_p(left, left, seed=0, permutations=200) == 1
    far = [value + 300 for value in left]
    assert paired_permutation_p(left, far, seed=0, permutations=500) < 0.01
    assert 0 < detectable_distance(100, 100, level=0.01) < 0.4


def test_two_samples_of_one_distribution_are_not_told_apart() -> None:
    """Permutation p-values of identically distributed samples are uniform, whatever was pooled."""
    generator = np.random.default_rng(1)
    law = 1 / np.arange(1, 200)
    p_values = []
    for seed in range(200):
        draws = generator.choice(199, size=(2, 150), p=law / law.sum()).tolist()
        test = two_sample([stratum(*draws)], level=0.01, seed=seed)
        p_values.append(test.permutation_p)
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.06)
    assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(0.05, abs=0.04)


def test_permutation_and_asymptotic_p_values_agree_on_large_cells() -> None:
    table = np.array([[300, 340, 360], [330, 350, 320]])
    test = two_sample([Stratum(table, rare=0, certain=False)], level=0.0002, seed=0)
    assert test.chi_square.statistic == pytest.approx(3.927, abs=1e-3)
    assert test.permutation_p == pytest.approx(test.chi_square.p_value, rel=0.4)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_a_two_sample_test_is_sound_on_anything(left: list[int], right: list[int]) -> None:
    test = two_sample([stratum(left, right), stratum(right, left)], level=0.01, seed=0)
    assert 0 < test.permutation_p <= 1
    assert 0 <= test.tv <= 1
    assert test.samples == (len(left) + len(right),) * 2
    assert test.detectable_tv is None or 0 < test.detectable_tv <= 1


def test_strata_keep_prompts_apart() -> None:
    """Each arm gives both tokens equally often, but to other prompts: pooled over prompts nothing would be seen."""
    strata = [stratum([0] * 50, [1] * 50), stratum([1] * 50, [0] * 50)]
    assert two_sample(strata, level=0.01, seed=0).permutation_p < 0.01
    together = Stratum(strata[0].table + strata[1].table, rare=0, certain=False)
    assert two_sample([together], level=0.01, seed=0).permutation_p > 0.5


def test_one_cell_means_certainty_or_that_nothing_could_be_compared() -> None:
    """Sixty values once each, and one value sixty times, both make one cell: only the second would show a difference."""
    certain = two_sample([stratum([7] * 60, [7] * 60)], level=0.05, seed=0)
    assert certain.rare_share == 0
    assert certain.detectable_tv == pytest.approx(0.5 * math.sqrt(7.849 / 30), rel=1e-3)
    rare = two_sample([stratum(range(60), range(60))], level=0.05, seed=0)
    assert (rare.rare_share, rare.detectable_tv) == (1, None)
    both = two_sample([stratum([7] * 60, [7] * 60), stratum(range(60), range(60))], level=0.05, seed=0)
    assert both.rare_share == pytest.approx(0.5)
    assert both.detectable_tv == certain.detectable_tv, "what could not be tested adds nothing"
    mixed = two_sample([stratum([7] * 40 + [8, 9], [7] * 40 + [5, 6])], level=0.05, seed=0)
    assert mixed.rare_share == pytest.approx(4 / 84)
    assert mixed.detectable_tv is not None, "all but four samples are one value"
