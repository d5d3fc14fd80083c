from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.records import CellRecord
from eyas.eval.stats import bootstrap_ratio, geometric_mean, null_spread
from tests.eval_records import cell


def noisy_cell(rate: float, generator: np.random.Generator, *, requests: int = 24) -> CellRecord:
    """A cell run one request at a time, in which every request's duration has 10 % noise of its own."""
    clock = 0.0
    served = []
    for each in cell(rate, requests=requests).requests:
        seconds = (each.t_finish - each.t_submit) * float(np.exp(0.1 * generator.standard_normal()))
        served.append(replace(each, t_submit=clock, t_finish=clock + seconds))
        clock += seconds
    return replace(cell(rate), requests=served, makespan=clock)


def test_ratio_of_constant_cells_is_exact() -> None:
    interval = bootstrap_ratio([cell(40.0), cell(40.0)], [cell(50.0), cell(50.0)], seed=1)
    assert (interval.ratio, interval.low, interval.high) == pytest.approx((1.25, 1.25, 1.25))


def test_starts_that_differ_widen_the_interval() -> None:
    interval = bootstrap_ratio([cell(40.0), cell(50.0)], [cell(45.0), cell(45.0)], seed=1)
    assert interval.low == pytest.approx(45 / 50)
    assert interval.high == pytest.approx(45 / 40)
    assert interval.ratio == pytest.approx(45 / geometric_mean([40, 50]))


def test_the_seed_fixes_the_interval() -> None:
    generator = np.random.default_rng(0)
    arms = [noisy_cell(40, generator) for _ in range(3)], [noisy_cell(50, generator) for _ in range(3)]
    assert bootstrap_ratio(*arms, seed=5) == bootstrap_ratio(*arms, seed=5)
    assert bootstrap_ratio(*arms, seed=5) != bootstrap_ratio(*arms, seed=6)


def test_coverage_is_near_nominal_with_many_starts() -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for trial in range(100):
        rates = 40 * np.exp(0.05 * generator.standard_normal((2, 8)))
        baseline, treated = ([noisy_cell(float(rate), generator) for rate in arm] for arm in rates)
        interval = bootstrap_ratio(baseline, treated, seed=trial, draws=400)
        covered += interval.low <= 1 <= interval.high
    assert 85 <= covered <= 100


def test_null_spread() -> None:
    assert null_spread([cell(40.0), cell(44.0), cell(42.0)]) == pytest.approx(1.1)
    assert null_spread([cell(40.0)]) is None


@given(st.floats(0.2, 5), st.integers(1, 4))
def test_the_interval_contains_the_ratio_and_scales_with_it(factor: float, starts: int) -> None:
    baseline = [cell(40.0 + start) for start in range(starts)]
    treated = [cell(factor * (40.0 + start)) for start in range(starts)]
    interval = bootstrap_ratio(baseline, treated, seed=0, draws=100)
    assert interval.ratio == pytest.approx(factor)
    assert interval.low <= factor * (1 + 1e-9)
    assert interval.high >= factor * (1 - 1e-9)
