"""The schedule: chosen from cells with known speeds, in a form that vLLM reads as we do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.eval.cost.schedule import Schedule, choose_schedule, ranges_of
from eyas.eval.records import AR, AR_TWIN, ArmFacts
from tests.cost_cells import facts, measured

LENGTHS = {"k3": 3, "k1": 1}
BASE = {"method": "eagle3", "model": "head", "num_speculative_tokens": 5}
RATES = {
    1: {"ar": 40, "k3": 60, "k1": 50},
    4: {"ar": 100, "k3": 90, "k1": 120},
    16: {"ar": 300, "k3": 150, "k1": 280},
}


def test_the_fastest_length_per_batch_size_and_plain_where_none_pays() -> None:
    schedule = choose_schedule(measured(RATES), facts(LENGTHS))
    assert [(choice.batch_size, choice.draft_length) for choice in schedule.choices] == [(1, 3), (4, 1), (16, 0)]
    assert schedule.ranges == [(1, 1, 3), (2, 4, 1), (5, 16, 0)]
    assert schedule.pays
    assert [schedule.draft_length_at(size) for size in (1, 2, 4, 5, 16, 99)] == [3, 1, 1, 0, 0, 0]


def test_noise_is_plain_decoding() -> None:
    """6 % faster with starts that scatter by 10 %: no evidence, so nothing is drafted; with 1 % it is evidence."""
    rates = {1: {"ar": 100, "k3": 106, "k1": 90}}
    assert not choose_schedule(measured(rates, noise=(0.9, 1.0, 1.1)), facts(LENGTHS)).pays
    assert choose_schedule(measured(rates), facts(LENGTHS)).ranges == [(1, 1, 3)]


def test_one_start_per_arm_is_no_evidence() -> None:
    schedule = choose_schedule(measured(RATES, noise=(1.0,)), facts(LENGTHS))
    assert not schedule.pays
    assert "one start" in schedule.choices[0].candidates[0].why


def test_side_by_side_pairs_are_compared_with_their_partners() -> None:
    """The machine halves its speed from pair to pair; only against its own partner is k3 1.5 times as fast.

    Without pairs of AR and its twin there is no null band, and so no evidence.
    """
    speeds = (1.0, 0.5, 0.26)
    group = measured({1: {"k3": 60, AR_TWIN: 40}}, noise=speeds)
    (key,) = group
    group[key][AR] = measured({1: {"ar": 40}}, noise=(*speeds, 1.0, *speeds))[key][AR]
    arms = facts({"k3": 3}) | {AR_TWIN: ArmFacts("other", 0, None, False)}
    partners = {"k3": [(0, 0), (1, 1), (2, 2)]}
    assert choose_schedule(group, arms, partners=partners).ranges == [(1, 1, 0)]
    partners |= {AR_TWIN: [(4, 0), (5, 1), (6, 2)]}
    assert choose_schedule(group, arms, partners=partners).ranges == [(1, 1, 3)]


def test_a_tie_goes_to_the_shorter_chain() -> None:
    rates = {1: {"ar": 100, "k3": 150.9, "k1": 150.0}}
    assert choose_schedule(measured(rates), facts(LENGTHS)).ranges == [(1, 1, 1)]


def test_a_length_that_is_slower_on_any_dataset_is_not_served() -> None:
    cells = measured(RATES) | measured({1: {"ar": 40, "k3": 36, "k1": 44}}, dataset="humaneval")
    schedule = choose_schedule(cells, facts(LENGTHS))
    assert schedule.choices[0].draft_length == 1
    why = {candidate.arm: candidate.why for candidate in schedule.choices[0].candidates}
    assert why["k3"] == "slower on humaneval at temperature 0"


def test_cells_of_one_batch_size_are_pooled() -> None:
    cells = measured({1: {"ar": 40, "k3": 60}}) | measured({1: {"ar": 40, "k3": 48}}, temperature=1.0)
    (choice,) = choose_schedule(cells, facts({"k3": 3})).choices
    assert choice.candidates[0].ratio == pytest.approx((1.5 * 1.2) ** 0.5)


def test_other_methods_and_synthetic_arms_have_no_part() -> None:
    cells = measured({1: {"ar": 40, "ngram": 80, "k3": 60}})
    ngram = ArmFacts("other", 3, {"method": "ngram"}, False)
    assert choose_schedule(cells, facts({"k3": 3}) | {"ngram": ngram}).ranges == [(1, 1, 3)]
    with pytest.raises(ValueError, match=r"score\.draft_lengths"):
        choose_schedule(cells, facts({"k3": 3}, synthetic=True))


def test_unmeasured_batch_sizes_are_plain() -> None:
    cells = measured({4: {"ar": 100, "k3": 150}, 8: {"ar": 100, "k3": 150}})
    schedule = choose_schedule(cells, facts({"k3": 3}), max_num_seqs=64)
    assert schedule.ranges == [(1, 3, 0), (4, 8, 3), (9, 64, 0)]


def test_the_configuration_carries_the_longest_length() -> None:
    schedule = choose_schedule(measured(RATES), facts(LENGTHS))
    config = schedule.speculative_config(BASE)
    assert config == BASE | {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 4, 1], [5, 16, 0]],
    }
    plain = Schedule([(1, 8, 0)], [], 8).speculative_config(BASE)
    assert plain["num_speculative_tokens"] == 1


def validate(ranges: Sequence[Sequence[int]], *, largest: int, longest: int) -> list[int]:
    """vLLM's rules (0.32, v1/spec_decode/dynamic/utils.py) in our words: k for 0, 1, ..., `largest` requests."""
    assert ranges
    table, expected = [0] * (largest + 1), 1
    for first, last, length in ranges:
        assert first == expected, "from 1, in order, without gaps"
        assert first <= last
        assert 0 <= length <= longest
        for size in range(first, min(last, largest) + 1):
            table[size] = length
        expected = last + 1
    assert expected > largest
    return table


sizes_and_lengths = st.dictionaries(st.integers(1, 300), st.integers(0, 7), min_size=1, max_size=9)


@given(sizes_and_lengths, st.integers(0, 400))
def test_ranges_are_valid_and_say_what_was_chosen(lengths: dict[int, int], more: int) -> None:
    limit = max(lengths) + more
    ranges = ranges_of(lengths, max_num_seqs=limit)
    config = Schedule(ranges, [], limit).speculative_config(BASE)
    longest = config["num_speculative_tokens"]
    table = validate(config["num_speculative_tokens_per_batch_size"], largest=limit, longest=longest)
    assert longest >= 1
    assert all(table[size] == length for size, length in lengths.items())
    assert all(ranges[i][2] != ranges[i + 1][2] for i in range(len(ranges) - 1)), "no range is split for nothing"
    known = sorted(lengths)
    for size in range(1, limit + 1):
        if size not in lengths:
            inside = known[0] < size < known[-1]
            below, above = ([k for k in known if k < size], [k for k in known if k > size])
            assert table[size] == (min(lengths[below[-1]], lengths[above[0]]) if inside else 0)


@pytest.mark.engine
def test_vllm_itself_accepts_the_ranges_and_reads_them_alike(tmp_path: Path) -> None:
    """The same property against vLLM's own validator, in one child process."""
    cases = []
    for lengths, limit in (({1: 3, 4: 1, 16: 0}, 16), ({1: 0}, 1), ({5: 2}, 64), ({1: 7, 2: 0, 300: 5}, 512)):
        ranges = ranges_of(lengths, max_num_seqs=limit)
        config = Schedule(ranges, [], limit).speculative_config(BASE)
        longest = config["num_speculative_tokens"]
        ranges_json = config["num_speculative_tokens_per_batch_size"]
        cases.append([ranges_json, limit, longest, validate(ranges_json, largest=limit, longest=longest)])
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    code = (
        "import json, sys\n"
        "from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as build\n"
        "for ranges, limit, longest, table in json.load(open(sys.argv[1])):\n"
        "    assert build(ranges, limit, longest) == table, (ranges, table)\n"
    )
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cases.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
