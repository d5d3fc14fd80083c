from __future__ import annotations

from pathlib import Path

import pytest

from eyas.eval.arms import plan_arms, require_free_name

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


def test_plain_decoding_the_head_at_each_length_and_the_others() -> None:
    others = {"ngram": NGRAM, "control": {}, "slow": {"slowed_by": 0.1}}
    arms = plan_arms(Path("head"), method="eagle3", draft_lengths=[3, 1], others=others)
    assert [(arm.name, arm.kind, arm.draft_length, arm.slowed_by) for arm in arms] == [
        ("ar", "ar", 0, 0.0),
        ("k3", "head", 3, 0.0),
        ("k1", "head", 1, 0.0),
        ("ngram", "other", 4, 0.0),
        ("control", "other", 0, 0.0),
        ("slow", "other", 0, 0.1),
    ]
    assert arms[1].speculative_config == {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert arms[3].speculative_config == NGRAM
    assert arms[4].speculative_config is None
    assert arms[5].speculative_config is None


def test_without_draft_lengths_no_head_is_needed() -> None:
    arms = plan_arms(None, method=None, draft_lengths=[], others={"ngram": NGRAM})
    assert [arm.name for arm in arms] == ["ar", "ngram"]


@pytest.mark.parametrize("name", ["ar", "ar_twin", "schedule", "k3", "k12"])
def test_names_of_eyas_are_taken(name: str) -> None:
    with pytest.raises(ValueError, match="choose another name"):
        require_free_name(name)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-x", "a-b", "../x", "a.b"])
def test_names_that_file_names_cannot_carry_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        require_free_name(name)


@pytest.mark.parametrize("name", ["ngram", "draft_0_5b", "k3b", "K3", "suffix"])
def test_other_names_are_free(name: str) -> None:
    require_free_name(name)
