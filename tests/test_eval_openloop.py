"""The open loop's pure parts: timetables, streams, metrics, the saturation rule, and rows with known answers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.openloop.arrivals import poisson_arrivals
from eyas.eval.openloop.latency import (
    latency_summary,
    meets,
    time_per_output_token,
    time_to_first_token,
    total_latency,
)
from eyas.eval.openloop.metrics import counted, read_metrics
from eyas.eval.openloop.plan import plan_starts
from eyas.eval.openloop.rates import judge_backlog, mean_backlog, steady_window
from eyas.eval.openloop.records import (
    LoadCell,
    cell_path,
    holds,
    read_cell,
    read_cells,
    write_cell,
)
from eyas.eval.openloop.rows import highest_sustained, open_loop_rows
from eyas.eval.openloop.stream import BadStream, Chunk, EventReader, Summary, read_event
from eyas.eval.workload import Request
from tests import openloop_records as made


def test_arrivals_are_a_poisson_process_and_the_same_everywhere() -> None:
    times = poisson_arrivals(4000, rate=2.5, seed=1)
    gaps = np.diff([0.0, *times])
    assert times == sorted(times) == poisson_arrivals(4000, rate=2.5, seed=1)
    # Mean 1 / rate and standard deviation the same, both within 4 standard errors (that of the deviation is sqrt(2) as large).
    assert gaps.mean() == pytest.approx(0.4, abs=4 * 0.4 / math.sqrt(4000))
    assert gaps.std() == pytest.approx(0.4, abs=4 * 0.4 * math.sqrt(2 / 4000))
    assert np.mean(gaps > 0.4) == pytest.approx(math.exp(-1), abs=0.04)
    slower = poisson_arrivals(4000, rate=0.5, seed=1)
    np.testing.assert_allclose(np.array(slower) / times, 5.0)
    assert poisson_arrivals(5, rate=1.0, seed=1) != poisson_arrivals(5, rate=1.0, seed=2)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="no rate"):
        poisson_arrivals(3, rate=rate, seed=0)


@given(data=st.data())
def test_events_do_not_depend_on_how_bytes_are_cut(data: st.DataObject) -> None:
    payloads = [b'{"a": 1}', b"[DONE]", "ü✓".encode(), b"x" * 300]
    stream = b": comment\r\n" + b"".join(b"event: e\ndata: " + payload + b"\r\n\n" for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = EventReader()
    pieces = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event for piece in pieces for event in reader.feed(piece)] == payloads


def test_what_vllm_sends() -> None:
    """Lines copied from vLLM 0.32 (its CPU build), shortened."""
    head = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"t","choices":'
    choice = b'[{"index":0,"text":"T","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[54,7]}]}'
    assert read_event(head + choice) == Chunk([54, 7], None)
    last = choice.replace(b'"finish_reason":null', b'"finish_reason":"length"')
    assert read_event(head + last) == Chunk([54, 7], "length")
    closing = b'[],"usage":{"prompt_tokens":4,"total_tokens":9,"completion_tokens":5},"metrics":{"queue_time_ms":40.5}}'
    assert read_event(head + closing) == Summary(5, 0.0405, None, None, None)
    drafting = b'{"num_spec_steps":3,"num_draft_tokens":9,"num_accepted_draft_tokens":2,"num_spec_tokens":3}'
    spoken = closing.replace(b'"metrics":{', b'"metrics":{"speculative_decoding":' + drafting + b",")
    assert read_event(head + spoken) == Summary(5, 0.0405, 3, 9, 2)


@given(
    st.binary(max_size=80)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_nonsense_is_a_bad_stream_and_nothing_else(payload: bytes) -> None:
    with pytest.raises(BadStream):
        read_event(payload)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [3]},
        {"choices": [{"token_ids": [1.5]}]},
        {"choices": [{"token_ids": [True]}]},
        {"choices": [{"text": "a"}]},
        {"choices": [], "usage": None},
        {"choices": [], "usage": {"completion_tokens": "many"}},
        {"choices": [], "usage": {"completion_tokens": 3}, "metrics": [1]},
        {"error": {"message": "dead"}, "choices": []},
    ],
)
def test_objects_that_are_no_chunks_are_bad_streams(event: object) -> None:
    with pytest.raises(BadStream):
        read_event(json.dumps(event).encode())


METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="t"} 3.0
vllm:num_requests_running{engine="1",model_name="t"} 2.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="a } b"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="t"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="t",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="t",position="2"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
"""


def test_metrics_are_read_and_subtracted() -> None:
    before, after = read_metrics(""), read_metrics(METRICS)
    assert after.gauges == {"running": 5.0, "waiting": 0.0, "kv_cache": 0.0}
    counters, per_position = counted(before, after)
    assert counters["num_drafts"] == 40
    assert per_position == [20, 0, 1]
    assert counted(after, after)[1] == [0, 0, 0]


def steady(count: int = 200, *, latency: float) -> LoadCell:
    times = poisson_arrivals(count, rate=1.0, seed=0)
    return made.cell([made.request(i, arrives=t, first=0.1, finish=latency) for i, t in enumerate(times)])


def overloaded(count: int = 200, *, service: float) -> LoadCell:
    """One server that takes `service` seconds for each request, in order."""
    free, requests = 0.0, []
    for i, arrives in enumerate(poisson_arrivals(count, rate=1.0, seed=0)):
        free = max(free, arrives) + service
        requests.append(made.request(i, arrives=arrives, first=free - arrives, finish=free - arrives))
    return made.cell(requests)


def test_backlog_is_the_time_average_of_requests_in_the_system() -> None:
    one = made.cell([made.request(0, arrives=1.0, finish=3.0), made.request(1, arrives=2.0, finish=1.0)])
    np.testing.assert_allclose(mean_backlog(one, np.array([0.0, 2.0, 4.0])), [0.5, 1.5])
    lost = made.cell([made.request(0, arrives=1.0, failure="gone")])
    np.testing.assert_allclose(mean_backlog(lost, np.array([0.0, 2.0, 6.0])), [0.5, 1.0])


def test_saturation_rule() -> None:
    assert judge_backlog([steady(latency=0.3)]).load == "sustained"
    assert judge_backlog([steady(latency=5.0)]).load == "sustained"
    assert judge_backlog([overloaded(service=0.5)]).load == "sustained"
    grown = judge_backlog([overloaded(service=1.4)])
    assert grown.load == "saturated"
    begin, end = steady_window(overloaded(service=1.4))
    assert grown.rise == pytest.approx(grown.arrivals - (end - begin) / 1.4, rel=0.2), "what came minus what was served"
    assert judge_backlog([steady(8, latency=5.0)]).load == "undecided", "too few requests to tell"
    assert judge_backlog([made.cell([made.request(0, arrives=0.0)])]).load == "undecided"


def queue(rate: float, *, count: int, slots: int, seed: int) -> LoadCell:
    """`slots` servers with services of mean `slots` seconds (log-normal), so that the capacity is one request a second."""
    generator = np.random.default_rng(seed)
    arrivals = poisson_arrivals(count, rate=rate, seed=seed)
    services = generator.lognormal(math.log(slots) - 0.125, 0.5, size=count)
    free, requests = np.zeros(slots), []
    for i, arrives in enumerate(arrivals):
        slot = int(free.argmin())
        free[slot] = max(free[slot], arrives) + services[i]
        requests.append(made.request(i, arrives=arrives, finish=float(free[slot]) - arrives))
    return made.cell(requests)


@pytest.mark.parametrize(
    ("rate", "count", "right", "at_least", "wrong", "at_most"),
    [
        (0.5, 120, "sustained", 0.9, "saturated", 0.05),
        (0.75, 300, "sustained", 0.9, "saturated", 0.07),
        (1.3, 300, "saturated", 0.85, "sustained", 0.05),
        (1.6, 120, "saturated", 0.9, "sustained", 0.05),
        (0.75, 60, "sustained", 0.2, "saturated", 0.15),
    ],
)
def test_saturation_rule_is_calibrated(
    rate: float, count: int, right: str, at_least: float, wrong: str, at_most: float
) -> None:
    loads = Counter(judge_backlog([queue(rate, count=count, slots=8, seed=seed)]).load for seed in range(60))
    assert loads[right] / 60 >= at_least, loads
    assert loads[wrong] / 60 <= at_most, loads


def test_latencies_count_from_the_scheduled_arrival() -> None:
    one = made.request(0, arrives=10.0, first=1.0, finish=3.0, tokens=5)
    assert time_to_first_token(one) == pytest.approx(1.0)
    assert total_latency(one) == pytest.approx(3.0)
    assert time_per_output_token(one) == pytest.approx(0.5)
    assert meets(one, slo_ttft_ms=1000.1, slo_tpot_ms=500.1)
    assert not meets(one, slo_ttft_ms=999, slo_tpot_ms=500.1)
    assert not meets(one, slo_ttft_ms=1000.1, slo_tpot_ms=499)
    assert not meets(made.request(0, arrives=0.0, failure="lost"), slo_ttft_ms=1e9, slo_tpot_ms=1e9)


def test_rows_of_a_known_session(tmp_path: Path) -> None:
    """Eight requests, one a second from 1 s; the steady window is (2, 8]; the last request failed."""
    requests = [made.request(i, arrives=1.0 + i) for i in range(7)] + [made.request(7, arrives=8.0, failure="HTTP 500")]
    made.write_session(tmp_path, [made.cell(requests)])
    (row,) = open_loop_rows(tmp_path, session=made.SESSION)
    assert (row["requests"], row["answered"], row["failures"]) == (8, 7, {"HTTP 500": 1})
    assert row["ttft"]["p50"] == pytest.approx(1.0)
    assert row["tpot"]["p90"] == pytest.approx(0.5)
    assert (row["tpot"]["n"], row["tpot"]["p99"], row["wanted"], row["prompts"]) == (7, None, 10, 8)
    assert row["chunk_gap"]["mean"] == pytest.approx(2.0)
    # First tokens at 2, 3, ..., 8 (six of them after 2), the other four tokens at 4, ..., 10 (five of them until 8).
    assert row["tokens_per_second"] == pytest.approx((6 * 1 + 5 * 4) / 6)
    assert row["rates"] == pytest.approx({"scheduled": 1.0, "sent": 1.0, "answered": 5 / 6})
    # From the first arrival at 1 s to the end of the last request at 11 s.
    assert row["goodput"]["requests_per_second"] == pytest.approx(7 / 10)
    assert row["goodput"]["share"] == pytest.approx(7 / 8)
    assert row["queueing"]["client_lag"]["p50"] == pytest.approx(0.02)
    assert row["queueing"]["connection_wait"]["p50"] == pytest.approx(0.08)
    assert row["queueing"]["server_queue"]["p50"] == pytest.approx(0.5)
    assert row["queueing"]["waiting_max"] == 3.0
    assert row["running"]["sampled"]["mean"] == pytest.approx(3.0)
    # Eight requests of 2.9 s each from sending to end, in 11 s.
    assert row["running"]["under_way"] == pytest.approx(8 * 2.9 / 11)
    assert row["client"]["limit"] == pytest.approx(0.1)
    assert row["client"]["too_slow"] is False, "one late timer in 100 moves the p99 only a little"
    assert (row["ratio_to_ar"], row["no_ratio"]) == (None, None)
    assert row["acceptance"] is None
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(("prompts", "turns", "told"), [(100, 1, True), (99, 1, False), (99, 2, False)])
def test_no_p99_below_100_independent_requests(prompts: int, turns: int, told: bool) -> None:
    """Two starts and the turns of a conversation are no more prompts."""
    requests = [made.request(i, arrives=float(i), finish=1.0 + i / 100) for i in range(prompts * turns)]
    for request in requests:
        request.conversation = f"c{request.index % prompts}"
    assert [summary["p99"] is not None for summary in latency_summary(requests * 2).values() if summary] == [told] * 4


def test_a_slow_client_is_told() -> None:
    from eyas.eval.openloop.rows import client_check

    one = made.cell([made.request(0, arrives=1.0)])
    assert client_check([one], median_ttft=0.01)["too_slow"] is True
    assert client_check([one], median_ttft=None)["too_slow"] is None


def test_acceptance_is_reconciled(tmp_path: Path) -> None:
    requests = [made.request(i, arrives=1.0 + i) for i in range(4)]
    for each in requests:
        each.steps, each.drafted, each.accepted = 2, 6, 2
    counters = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 10, "generation_tokens": 20}
    config = {"method": "eagle3", "num_speculative_tokens": 3}
    drafted = made.cell(requests, arm="k3", kind="head", counters=counters, speculative_config=config)
    made.write_session(tmp_path, [drafted])
    (row,) = open_loop_rows(tmp_path, session=made.SESSION)
    assert row["acceptance"]["tau_engine"] == pytest.approx(2.0)
    assert row["acceptance"]["residuals"] == pytest.approx(
        {"num_drafts": 0.2, "num_draft_tokens": 0.2, "num_accepted_tokens": 0.2, "generation_tokens": 0.0}
    )
    assert (row["draft_length"], row["synthetic"]) == (3, False)


def test_highest_sustained_rate() -> None:
    good = {"requests_per_second": 1.5}
    rows = [
        {"arm": "ar", "starts": 1, "rate": 1.0, "load": "sustained", "goodput": good},
        {"arm": "ar", "starts": 1, "rate": 2.0, "load": "saturated", "goodput": {"requests_per_second": 0.5}},
        {"arm": "k3", "starts": 0, "rate": 1.0, "load": None},
    ]
    assert highest_sustained(rows) == [
        {"arm": "ar", "highest_sustained_rate": 1.0, "lowest_saturated_rate": 2.0, "best_goodput": 1.5},
        {"arm": "k3", "highest_sustained_rate": None, "lowest_saturated_rate": None, "best_goodput": None},
    ]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    path = cell_path(tmp_path / "000-ar", rate=0.5)
    original = made.cell([made.request(0, arrives=0.1), made.request(1, arrives=0.2, failure="lost")], rate=0.5)
    write_cell(path, original)
    assert read_cell(path) == original
    assert read_cells(tmp_path, session=made.SESSION) == [original]
    assert holds(path, "f")
    assert not holds(path, "another plan")
    lines = path.read_text().splitlines(keepends=True)
    for damage in ("".join(lines[:-1]), path.read_text()[:-20], "", "[]\n"):
        path.write_text(damage)
        assert not holds(path, "f")
        with pytest.raises(ValueError, match="score again"):
            read_cell(path)


def test_no_open_loop_no_rows(tmp_path: Path) -> None:
    assert open_loop_rows(tmp_path, session=made.SESSION) == []


def test_a_plan_refuses_prompts_that_are_served_twice() -> None:
    good = made.plan(requests=10, rates=(2.0, 5.0))
    assert good.seconds_per_start == pytest.approx(10 / 2 + 10 / 5)
    good.check()
    good.requests.append(Request("heldout", "again", [1]))
    with pytest.raises(ValueError, match=r"prompt again .* tokens of p1"):
        good.check()
    good.requests[-1] = Request("heldout", "warm", [0])
    with pytest.raises(ValueError, match="tokens of the warm-up"):
        good.check()


def test_rows_need_no_torch_and_no_client() -> None:
    code = "import sys, eyas.eval.openloop.rows; print({'torch', 'vllm', 'aiohttp', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_starts_go_forwards_and_backwards(tmp_path: Path) -> None:
    arms = [PLAIN, Arm("k3", "head", {"num_speculative_tokens": 3}), Arm("k1", "head", {"num_speculative_tokens": 1})]
    starts = list(plan_starts(tmp_path, made.plan(), arms=arms, starts_per_arm=2))
    assert [start.directory.name for start in starts] == ["000-ar", "001-k3", "002-k1", "003-k1", "004-k3", "005-ar"]
    assert len({start.fingerprint(1.0) for start in starts}) == 6
    assert [start.engine.speculative_config for start in starts[:3]] == [arm.speculative_config for arm in arms]
