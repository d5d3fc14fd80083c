from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.eval.latency import (
    chunk_gaps,
    latency_summary,
    summarise,
    summarise_requests,
    throughput,
    time_per_output_token,
    time_to_first_token,
    total_latency,
)
from tests.eval_records import cell, request


def test_the_three_latencies_of_a_request() -> None:
    served = request(submit=1.0, first=1.2, finish=3.2, token_ids=list(range(41)))
    assert total_latency(served) == pytest.approx(2.2)
    assert time_to_first_token(served) == pytest.approx(0.2)
    assert time_per_output_token(served) == pytest.approx((2.2 - 0.2) / 40)
    assert chunk_gaps(served) == pytest.approx([2.0])


def test_an_answer_of_one_token_has_no_per_token_latency() -> None:
    assert time_per_output_token(request(token_ids=[7])) is None


def test_throughput_counts_the_makespan_not_the_sum_of_latencies() -> None:
    assert throughput(cell(50.0, requests=4)) == pytest.approx(50.0)


def test_percentiles() -> None:
    summary = summarise([float(value) for value in range(101)])
    assert summary == pytest.approx({"n": 101, "mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert summarise([]) is None


@pytest.mark.parametrize(("independent", "p99"), [(100, 99.0), (99, None)])
def test_a_p99_needs_a_hundred_independent_requests(independent: int, p99: float | None) -> None:
    summary = summarise_requests([float(value) for value in range(101)], independent=independent)
    assert summary is not None and summary["p99"] == (None if p99 is None else pytest.approx(p99))
    assert (summary["n"], summary["p90"]) == (101, pytest.approx(90.0))


def test_starts_and_turns_are_no_independent_requests() -> None:
    # 34 prompts in 3 starts are 102 answers of 34 prompts; 100 turns of one conversation are one witness.
    few = latency_summary([cell(41.0, requests=34) for _ in range(3)])["e2e"]
    assert few is not None and (few["n"], few["p99"]) == (102, None)
    assert (latency_summary([cell(41.0, requests=100)])["e2e"] or {})["p99"] is not None
    made = cell(41.0, requests=100)
    turns = replace(made, requests=[replace(each, conversation="one") for each in made.requests])
    assert (latency_summary([turns])["e2e"] or {})["p99"] is None


def test_summary_covers_all_starts() -> None:
    summary = latency_summary([cell(41.0), cell(82.0)])
    assert summary["e2e"] is not None
    assert summary["e2e"]["mean"] == pytest.approx(0.75)
