"""Conversation files: every kind of bad line, any bytes at all, streaming, offsets, and what is written."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.train.data.conversations import (
    Conversation,
    hash_split,
    iterate_conversations,
    prompt_hash,
    read_at,
    write_conversations,
)
from eyas.train.data.messages import ROLES, BadConversation

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
ASKING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "c1"}
GOOD = json.dumps({"messages": [USER, ANSWER]}).encode()


def of(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": list(messages), **fields}).encode()


BAD_LINES = [
    (b"{broken", "not_json"),
    (b"9" * 5000, "not_json"),
    (b"[" * 200_000, "not_json"),
    (b"[1]", "not_an_object"),
    (GOOD.replace(b"hello", b"\xff\xfe"), "not_utf8"),
    (GOOD.replace(b"hello", b"\\ud800"), "surrogates"),
    (of(USER, ANSWER, id="\ud800"), "surrogates"),
    (b"{}", "no_messages"),
    (of(), "no_messages"),
    (b'{"messages": {"role": "user"}}', "no_messages"),
    (of("hi"), "message_not_an_object"),
    (of({"role": "robot", "content": "x"}), "unknown_role"),
    (of({"role": ["user"], "content": "x"}), "unknown_role"),
    (of({"content": "x"}), "unknown_role"),
    (of({"role": "user"}), "content_not_text"),
    (of({"role": "user", "content": 3}), "content_not_text"),
    (of({"role": "user", "content": [{"type": "text", "text": "x"}]}), "content_not_text"),
    (of(USER, {"role": "assistant", "content": None}), "content_not_text"),
    (of(USER, {**ANSWER, "reasoning_content": 3}), "content_not_text"),
    (of({"role": "user", "content": ""}, ANSWER), "empty_user_turn"),
    (of(USER, {"role": "assistant", "content": ""}), "empty_answer"),
    (of(ANSWER), "no_user_turn"),
    (of({"role": "system", "content": "x"}), "no_user_turn"),
    (of(ANSWER, USER), "assistant_first"),
    (of(USER, USER, ANSWER), "two_user_turns"),
    (of(USER, {"role": "system", "content": "x"}, USER), "two_user_turns"),
    (of(USER, ANSWER, ANSWER), "two_assistant_turns"),
    (of(RESULT, USER, ANSWER), "tool_without_call"),
    (of(USER, RESULT), "tool_without_call"),
    (of(USER, ANSWER, RESULT), "tool_without_call"),
    (of(USER, ASKING, RESULT, RESULT), "tool_without_call"),
    (of(USER, {**ASKING, "tool_calls": "weather"}), "bad_tool_calls"),
    (of(USER, {**ASKING, "tool_calls": [{"name": "weather"}]}), "bad_tool_calls"),
    (of(USER, {**ASKING, "tool_calls": [{"function": {"name": "w", "arguments": [1]}}]}), "bad_tool_calls"),
    (of(USER, {**ANSWER, "token_ids": [1, -2]}), "bad_token_ids"),
    (of(USER, {**ANSWER, "token_ids": [True]}), "bad_token_ids"),
    (of(USER, ANSWER, tools={"name": "weather"}), "bad_tools"),
    (of(USER, ANSWER, tools=[{"limit": float("nan")}]), "not_json"),
    (of(USER, ANSWER, truncated="false"), "bad_truncated"),
    (of(USER, ANSWER, split="test"), "bad_split"),
    (of(USER, ANSWER, split=["train"]), "bad_split"),
]


@pytest.mark.parametrize(
    ("line", "reason"), BAD_LINES, ids=[f"{n}-{reason}" for n, (_, reason) in enumerate(BAD_LINES)]
)
def test_a_bad_line_costs_that_line_and_is_counted_by_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join((GOOD, line, b"", GOOD)))
    skipped: Counter[str] = Counter()
    assert len(list(iterate_conversations(path, on_bad_line="skip", skipped=skipped))) == 2
    assert skipped == {reason: 1}
    with pytest.raises(ValueError, match=r"line 2: .*data\.on_bad_line=skip"):
        list(iterate_conversations(path, on_bad_line="stop"))


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, ANSWER, USER],
        [{"role": "developer", "content": "Be short."}, USER, ANSWER],
        [USER, ASKING, RESULT, ANSWER, USER, ANSWER],
        [USER, ASKING, RESULT],
        [USER, {**ASKING, "tool_calls": [CALL, CALL]}, RESULT, {"role": "tool", "content": ""}, ANSWER],
        [USER, ASKING, RESULT, ASKING, RESULT, ANSWER],
        [USER, ASKING, USER, ANSWER],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "Hm."}],
        [USER, {"role": "assistant", "content": "", "token_ids": [5, 6]}],
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
    ],
)
def test_what_is_a_conversation(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(of(*messages, tools=[{"type": "function", "function": {"name": "weather"}}]))
    (row,) = iterate_conversations(path, on_bad_line="stop")
    assert row.messages == [{"content": "", **message} for message in messages]
    assert row.tools is not None
    write_conversations(tmp_path / "again.jsonl", [row])
    assert list(iterate_conversations(tmp_path / "again.jsonl", on_bad_line="stop")) == [row]


def test_unknown_fields_of_messages_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(of({**USER, "weight": 1}, {**ANSWER, "tool_calls": None, "name": "bot"}, tools=[]))
    (row,) = iterate_conversations(path, on_bad_line="stop")
    assert row.messages == [USER, ANSWER]
    assert row.tools is None


texts = st.text(alphabet=st.characters(exclude_categories=()), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
odd_messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(ROLES) | values,
        "content": texts | values,
        "tool_calls": st.just([CALL]) | values,
        "reasoning_content": values,
        "token_ids": st.lists(st.integers(0, 9)) | values,
    },
)
records = st.fixed_dictionaries(
    {"messages": st.lists(odd_messages | st.sampled_from([USER, ANSWER, ASKING, RESULT]), max_size=5) | values},
    optional={"id": values, "split": values, "source": values, "truncated": values, "tools": values},
)
lines = st.binary(max_size=30) | records.map(json.dumps).map(str.encode) | values.map(json.dumps).map(str.encode)


@settings(max_examples=300, deadline=None)
@given(content=st.lists(lines, max_size=6).map(b"\n".join))
def test_any_bytes_are_read_or_refused_and_no_line_is_lost(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "c.jsonl"
    path.write_bytes(content)
    skipped: Counter[str] = Counter()
    rows = list(iterate_conversations(path, on_bad_line="skip", skipped=skipped))
    assert len(rows) + skipped.total() == sum(bool(line.strip()) for line in content.split(b"\n"))
    try:
        assert list(iterate_conversations(path, on_bad_line="stop")) == rows
        assert not skipped
    except ValueError:
        assert skipped
    write_conversations(path, rows)  # whatever was accepted can be written, and is the same when read again
    assert list(iterate_conversations(path, on_bad_line="stop")) == rows


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60) | st.binary(max_size=60).map(gzip.compress).map(lambda packed: packed[:-3]))
def test_any_bytes_named_gz_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "c.jsonl.gz"
    path.write_bytes(content)
    try:
        rows = list(iterate_conversations(path, on_bad_line="skip"))
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert rows == [] == list(content)  # nothing that is made here is valid gzip, but no bytes at all are


def test_a_truncated_or_flipped_gzip_names_the_file(tmp_path: Path) -> None:
    packed = gzip.compress(b"\n".join([of(USER, ANSWER, id=str(n)) for n in range(500)]))
    for name, content in (
        ("cut.jsonl.gz", packed[: len(packed) // 2]),
        ("flipped.jsonl.gz", packed[:200] + bytes([packed[200] ^ 0x55]) + packed[201:]),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            list(iterate_conversations(tmp_path / name, on_bad_line="skip"))


def test_byte_order_mark_and_windows_line_ends_are_no_errors(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD + b"\r\n")
    assert [row.id for row in iterate_conversations(path, on_bad_line="stop")] == ["1", "3"]


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(GOOD + b"\nnonsense\n")
    rows = iterate_conversations(path, on_bad_line="stop")
    assert next(rows).messages == [USER, ANSWER]
    with pytest.raises(ValueError, match="line 2"):
        next(rows)


def test_lines_are_found_again_by_offset(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n" + of(USER, ANSWER, id="ä") + b"\n  \nbad\n" + of(USER, ANSWER, id="b"))
    content = path.read_bytes()
    with path.open("rb") as stream:
        assert read_at(stream, content.rindex(b'{"messages')).id == "b"
        assert read_at(stream, 1).id == "ä"
        with pytest.raises(BadConversation):
            read_at(stream, content.index(b"bad"))


def test_writing_is_atomic_and_reproducible(tmp_path: Path) -> None:
    rows = [Conversation(str(n), "train", "s", False, [USER, ANSWER]) for n in range(3)]

    def failing() -> Any:
        yield rows[0]
        raise RuntimeError

    for name in ("a.jsonl", "a.jsonl.gz"):
        write_conversations(tmp_path / name, iter(rows))
        first = (tmp_path / name).read_bytes()
        write_conversations(tmp_path / name, rows)
        assert (tmp_path / name).read_bytes() == first
        with pytest.raises(RuntimeError):
            write_conversations(tmp_path / name, failing())
        assert (tmp_path / name).read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.gz"]
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == (tmp_path / "a.jsonl").read_bytes()
    assert b"tools" not in (tmp_path / "a.jsonl").read_bytes()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        list(iterate_conversations(tmp_path / "none.jsonl", on_bad_line="skip"))


@given(st.text(), st.floats(0, 1))
def test_a_larger_share_holds_out_a_superset(text: str, share: float) -> None:
    assert hash_split(text) == hash_split(f"  {text.strip()} ") == hash_split(text, heldout_share=0.02)
    assert hash_split(text) == ("heldout" if prompt_hash(text) % 1000 < 20 else "train")
    if hash_split(text, heldout_share=share) == "heldout":
        assert hash_split(text, heldout_share=min(1.0, share * 1.5)) == "heldout"
    assert hash_split(text, heldout_share=1.0) == "heldout"
    assert hash_split(text, heldout_share=0.0) == "train"


def test_shares_below_one_in_a_thousand_are_kept() -> None:
    heldout = sum(hash_split(f"prompt {n}", heldout_share=0.0005) == "heldout" for n in range(100_000))
    assert 25 < heldout < 85
