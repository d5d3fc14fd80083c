"""The serving mask against its definition, and vocabulary choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.heads.slots import contiguous_runs, serving_slots, teacher_positions
from eyas.heads.vocab import choose_draft_vocabulary, coverage


@given(mask=st.lists(st.booleans(), min_size=1, max_size=40), num_steps=st.integers(1, 6))
def test_slots_are_those_whose_whole_chain_lies_in_one_answer(mask: list[bool], num_steps: int) -> None:
    steps = serving_slots(torch.tensor(mask), num_steps=num_steps)
    for step, slots in enumerate(steps):
        expected = [t for t in range(len(mask)) if t + 2 + step < len(mask) and all(mask[t + 1 : t + 3 + step])]
        assert slots.tolist() == expected


@given(mask=st.lists(st.booleans(), min_size=1, max_size=40), num_steps=st.integers(1, 6))
def test_teacher_positions_are_where_the_losses_of_all_steps_point(mask: list[bool], num_steps: int) -> None:
    positions = teacher_positions(torch.tensor(mask)).tolist()
    steps = serving_slots(torch.tensor(mask), num_steps=num_steps)
    assert set(positions) == {slot + 1 + step for step, slots in enumerate(steps) for slot in slots.tolist()}
    assert positions == [p for p in range(1, len(mask) - 1) if mask[p] and mask[p + 1]]


def test_the_last_prompt_token_drafts_and_the_last_answer_tokens_do_not() -> None:
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0])  # prompt 0..2, answer 3..6
    first, second = serving_slots(mask, num_steps=2)
    assert first.tolist() == [2, 3, 4]
    assert second.tolist() == [2, 3]


def test_runs_split_where_slots_are_not_consecutive() -> None:
    runs = contiguous_runs(torch.tensor([2, 3, 4, 9, 10]))
    assert [run.tolist() for run in runs] == [[2, 3, 4], [9, 10]]
    assert contiguous_runs(torch.tensor([], dtype=torch.long)) == []


def test_vocabulary_takes_the_commonest_then_the_lowest_ids_and_always_the_stop_tokens() -> None:
    counts = torch.tensor([0, 0, 5, 0, 5, 1, 0, 0])
    assert choose_draft_vocabulary(counts, size=4, always=[7]).tolist() == [2, 4, 5, 7]
    assert choose_draft_vocabulary(counts, size=6, always=[7]).tolist() == [0, 1, 2, 4, 5, 7]
    assert choose_draft_vocabulary(counts, size=2, always=[7]).tolist() == [2, 7]  # a tie goes to the lower id
    assert counts.tolist() == [0, 0, 5, 0, 5, 1, 0, 0]


def test_vocabulary_refuses_a_size_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="draft_vocab_size=9"):
        choose_draft_vocabulary(torch.zeros(8), size=9, always=[0])
    with pytest.raises(ValueError, match="draft_vocab_size=1"):
        choose_draft_vocabulary(torch.zeros(8), size=1, always=[0, 3])


def test_coverage_is_the_share_that_can_be_proposed() -> None:
    chosen = torch.tensor([1, 3])
    assert coverage(torch.tensor([1, 2, 0, 1]), draft_to_target_D=chosen) == pytest.approx(0.75)
    assert coverage(torch.zeros(4), draft_to_target_D=chosen) == 1.0
