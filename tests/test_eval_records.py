from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.eval.records import AR, CellKey, arms_of, cells_by_arm, is_synthetic, longest_draft, read_start, read_starts
from eyas.heads.files import read_json, write_json
from tests.eval_records import cell, head_config, write_start


def test_a_start_survives_its_files(tmp_path: Path) -> None:
    measured = [cell(50.0, batch_size=2, accepted=[1, 0] * 10, draft_length=3, block=block) for block in (0, 1)]
    write_start(tmp_path, 4, "k3", measured, draft_length=3, round=2, phase="schedule", beside="ar")
    start = read_start(tmp_path / "004-k3.jsonl")
    assert start.cells == measured
    assert (start.arm, start.kind, start.start, start.round, start.phase, start.beside) == (
        "k3",
        "head",
        4,
        2,
        "schedule",
        "ar",
    )
    assert start.draft_length == 3


def test_cells_are_grouped_by_key_arm_start_and_block(tmp_path: Path) -> None:
    for number in range(2):
        blocks = [cell(40.0, block=0), cell(41.0, block=1), cell(30.0, temperature=1.0)]
        write_start(tmp_path, number, AR, blocks, draft_length=0)
    grouped = cells_by_arm(read_starts(tmp_path))
    greedy = grouped[CellKey("heldout", 0.0, 1)][AR]
    assert [[block.block for block in blocks] for blocks in greedy] == [[0, 1], [0, 1]]
    assert [len(blocks) for blocks in grouped[CellKey("heldout", 1.0, 1)][AR]] == [1, 1]


def test_arms_come_plain_first_then_heads_by_chain_then_others_then_the_schedule(tmp_path: Path) -> None:
    schedule = head_config(3) | {"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 16, 0]]}
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    write_start(tmp_path, 0, "schedule", [cell(1.0)], draft_length=3, kind="schedule", speculative_config=schedule)
    write_start(tmp_path, 1, "ngram", [cell(1.0)], draft_length=4, kind="other", speculative_config=ngram)
    write_start(tmp_path, 2, "k1", [cell(1.0)], draft_length=1)
    write_start(tmp_path, 3, "k3", [cell(1.0)], draft_length=3)
    write_start(tmp_path, 4, AR, [cell(1.0)], draft_length=0)
    arms = arms_of(read_starts(tmp_path))
    assert list(arms) == [AR, "k3", "k1", "ngram", "schedule"]
    assert arms["schedule"].draft_length == 5
    assert not any(facts.synthetic for facts in arms.values())


def test_the_longest_draft_of_a_method_that_names_none_is_the_engines(tmp_path: Path) -> None:
    suffix = {"method": "suffix"}
    resolved = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 24}}
    write_start(
        tmp_path, 0, "suffix", [cell(1.0)], draft_length=0, kind="other", speculative_config=suffix, engine=resolved
    )
    assert read_start(tmp_path / "000-suffix.jsonl").draft_length == 24
    assert longest_draft(None) == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"rejection_sample_method": "synthetic"},
        {"synthetic_acceptance_length": 2.0},
        {"synthetic_acceptance_rates": [0.5]},
    ],
)
def test_made_up_acceptance_is_flagged_wherever_it_shows(tmp_path: Path, extra: dict[str, Any]) -> None:
    assert is_synthetic(head_config(3) | extra)
    assert not is_synthetic(head_config(3) | {"synthetic_acceptance_length": None})
    resolved = {"speculative_config": head_config(3) | extra}
    write_start(tmp_path, 0, "k3", [cell(1.0)], draft_length=3, engine=resolved)
    assert arms_of(read_starts(tmp_path))["k3"].synthetic


def test_records_of_two_sessions_are_refused_by_name(tmp_path: Path) -> None:
    write_start(tmp_path, 0, AR, [cell(1.0)], draft_length=0, session="one")
    write_start(tmp_path, 1, "k3", [cell(1.0)], draft_length=3, session="two")
    with pytest.raises(ValueError, match=r"mixes records of two sessions \(000-ar of one, 001-k3 of two\)"):
        read_starts(tmp_path)


@pytest.mark.parametrize("broken", ["{torn", '{"kind": "cell", "cell": 0}', '{"kind": "request", "cell": 0}', "[1]"])
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    write_start(tmp_path, 0, AR, [cell(1.0, requests=1)], draft_length=0)
    path = tmp_path / "000-ar.jsonl"
    path.write_text(path.read_text() + broken + "\n")
    with pytest.raises(ValueError, match=r"000-ar\.jsonl, line 3, is not a record of eyas"):
        read_start(path)


def test_records_of_an_earlier_version_say_to_score_again(tmp_path: Path) -> None:
    write_start(tmp_path, 0, AR, [cell(1.0)], draft_length=0)
    path = tmp_path / "000-ar.json"
    old = {name: value for name, value in read_json(path).items() if name != "session"}
    write_json(path, old)
    with pytest.raises(ValueError, match="score again"):
        read_start(tmp_path / "000-ar.jsonl")
    assert json.loads(path.read_text()) == old
