"""Lengths of prompts and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.eval.lengths import histogram, length_rows, lengths_of
from eyas.eval.records import AR, arms_of, cells_by_arm, read_starts
from tests.eval_records import cell, write_start


def test_a_histogram_by_hand() -> None:
    # 1 | 2 3 | 4..7 | 8..15 | 16..31
    assert histogram([1, 2, 3, 3, 9, 15, 16]) == [[1, 1, 1], [2, 3, 3], [4, 7, 0], [8, 15, 2], [16, 31, 1]]
    assert histogram([100, 100]) == [[64, 127, 2]]
    assert histogram([0, 1]) == [[0, 0, 1], [1, 1, 1]]


def test_quantiles_of_lengths() -> None:
    found = lengths_of(list(range(11)))
    assert {name: found[name] for name in ("n", "mean", "min", "p10", "p50", "p90", "max")} == pytest.approx(
        {"n": 11, "mean": 5.0, "min": 0, "p10": 1.0, "p50": 5.0, "p90": 9.0, "max": 10}
    )


def test_prompts_count_once_and_answers_every_time(tmp_path: Path) -> None:
    for number in range(2):
        cells = [cell(40.0, requests=4), cell(90.0, batch_size=4, requests=6)]
        write_start(tmp_path, number, AR, cells, draft_length=0)
    starts = read_starts(tmp_path)
    (row,) = length_rows(cells_by_arm(starts), arms_of(starts))
    assert (row["dataset"], row["arm"]) == ("heldout", AR)
    assert (row["prompt_tokens"]["n"], row["prompt_tokens"]["p50"]) == (6, 10)
    assert (row["output_tokens"]["n"], row["output_tokens"]["max"]) == (2 * (4 + 6), 41)
