"""Conversation files, token files, and the choice of prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eyas.train.data.conversations import hash_split, read_conversations, write_conversations
from eyas.train.data.generate import read_finished
from eyas.train.data.prepare import prepare
from eyas.train.data.prompts import MAX_PER_OPENING, Prompt, deduplicate, self_prompt_seeds, usable
from eyas.train.data.regenerate import repeated_ngram_share
from tests import tiny

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def _write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "'messages' is missing"),
        ('{"messages": [{"role": "user"}]}', "text 'content'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role 'robot'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no user turn"),
        (json.dumps({**GOOD, "split": "test"}), "split is 'test'"),
    ],
)
def test_a_broken_line_is_named_or_skipped_and_counted(tmp_path: Path, line: str, message: str) -> None:
    path = _write(tmp_path / "c.jsonl", json.dumps(GOOD), line, json.dumps(GOOD))
    with pytest.raises(ValueError, match="line 2") as error:
        read_conversations(path, on_bad_line="stop")
    assert message in str(error.value)
    rows, counts = read_conversations(path, on_bad_line="skip")
    assert len(rows) == 2
    assert counts == {"conversations_read": 2, "lines_skipped": 1}


def test_missing_and_unreadable_files_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_conversations(tmp_path / "none.jsonl", on_bad_line="skip")
    (tmp_path / "fake.jsonl.gz").write_text("plain")
    with pytest.raises(ValueError, match="cannot be read as text"):
        read_conversations(tmp_path / "fake.jsonl.gz", on_bad_line="skip")
    with pytest.raises(ValueError, match="no usable conversation"):
        read_conversations(_write(tmp_path / "bad.jsonl", "nonsense"), on_bad_line="skip")


def test_written_conversations_read_back_and_are_reproducible(tmp_path: Path) -> None:
    rows, _ = read_conversations(tiny.write_conversation_file(tmp_path / "c.jsonl"), on_bad_line="stop")
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_conversations(tmp_path / name, rows)
    assert read_conversations(tmp_path / "a.jsonl.gz", on_bad_line="stop")[0] == rows
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()).startswith(b"{")


@given(st.text())
def test_split_ignores_case_and_spacing(text: str) -> None:
    assert hash_split(text) == hash_split(f"  {text} ")


def test_split_holds_out_about_two_percent() -> None:
    assert 100 < sum(hash_split(f"prompt {i}") == "heldout" for i in range(10_000)) < 300


def test_prepare_writes_both_splits_with_masks(tmp_path: Path, tiny_target: Path) -> None:
    counts = _prepare(tmp_path, tiny_target, max_length=64, max_train_tokens=None)
    assert counts["train_conversations"] == 24
    assert counts["heldout_conversations"] == 4
    tokens = load_file(tmp_path / "train.safetensors")
    assert int(tokens["offsets"][-1]) == counts["train_tokens"] == tokens["token_ids"].shape[0]
    assert int(tokens["answer_mask"].sum()) == counts["train_answer_tokens"]


def test_prepare_cuts_limits_and_counts(tmp_path: Path, tiny_target: Path) -> None:
    counts = _prepare(tmp_path, tiny_target, max_length=40, max_train_tokens=500)
    assert counts["train_tokens"] <= 500
    assert counts["conversations_over_token_limit"] > 0
    assert counts["conversations_cut_at_max_length"] > 0
    with pytest.raises(ValueError, match=r"raise data\.max_length"):
        _prepare(tmp_path, tiny_target, max_length=10, max_train_tokens=None)


def _prepare(out_dir: Path, target: Path, *, max_length: int, max_train_tokens: int | None) -> dict[str, int]:
    return prepare(
        out_dir,
        target_dir=target,
        conversations=tiny.write_conversation_file(out_dir / "c.jsonl"),
        max_length=max_length,
        max_train_tokens=max_train_tokens,
        on_bad_line="stop",
        trust_remote_code=False,
        seed=0,
    )


def test_self_prompt_seeds_spread_over_topics_and_openers() -> None:
    seeds = self_prompt_seeds(400, topics=[f"t{i}" for i in range(100)], openers=["How", "What", "", "I"], seed=1)
    assert len(seeds) == 400
    assert seeds == self_prompt_seeds(
        400, topics=[f"t{i}" for i in range(100)], openers=["How", "What", "", "I"], seed=1
    )
    openers = [seed.opener for seed in seeds]
    assert all(openers.count(opener) == 100 for opener in ("How", "What", "", "I"))


def test_deduplication_caps_openings_of_self_written_prompts_only() -> None:
    own = [Prompt("self", None, [f"Can you provide a list of {i}"]) for i in range(20)]
    human = [Prompt("chitchat", None, [f"Can you provide a list of {i} x"]) for i in range(20)]
    kept, dropped = deduplicate([*human, human[0], *own])
    assert dropped["prompts_repeated"] == 1
    assert sum(prompt.source == "chitchat" for prompt in kept) == 20
    assert sum(prompt.source == "self" for prompt in kept) == 0
    kept, dropped = deduplicate(own)
    assert len(kept) == MAX_PER_OPENING
    assert dropped["prompts_common_opening"] == 20 - MAX_PER_OPENING


def test_usable_turns_look_typed() -> None:
    assert usable("How do I bake bread at home?")
    assert not usable("hi")
    assert not usable("a <|im_end|> leaked template token")
    assert not usable("0101 1010 2222 3333 4444 5555")


def test_repeated_ngram_share() -> None:
    assert repeated_ngram_share(list(range(100))) == 0.0
    assert repeated_ngram_share([1, 2, 3] * 40) > 0.9
    assert repeated_ngram_share([1, 1, 1]) == 0.0


def test_a_line_cut_by_a_kill_is_dropped_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": "a", "token_ids": [1]}\n{"id": "b", "tok')
    assert set(read_finished(path)) == {"a"}
    with path.open("a") as stream:
        stream.write('{"id": "b", "token_ids": [2]}\n')
    assert set(read_finished(path)) == {"a", "b"}
