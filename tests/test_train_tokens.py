"""Token files: what is written is read, whatever the shards; broken ones are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.heads.slots import serving_slots
from eyas.train.data.tokens import SPLITS, Tokens, TokenWriter, shard_path

DOCUMENTS = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8"), max_size=5),
        st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=6),
    ),
    max_size=8,
)


def _write(
    directory: Path, documents: dict[str, list[tuple[str, list[tuple[int, bool]]]]], *, shard_tokens: int
) -> None:
    writer = TokenWriter(directory, shard_tokens=shard_tokens)
    for split in SPLITS:
        for name, tokens in documents[split]:
            writer.add(
                split,
                name=name,
                token_ids=[token for token, _ in tokens],
                answer_mask=[inside for _, inside in tokens],
            )
    counts = writer.finish()
    for split in SPLITS:
        assert counts[f"{split}_documents"] == len(documents[split])
        assert counts[f"{split}_tokens"] == sum(len(tokens) for _, tokens in documents[split])


@given(train=DOCUMENTS, heldout=DOCUMENTS, shard_tokens=st.integers(1, 20))
def test_documents_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory,
    train: list[tuple[str, list[tuple[int, bool]]]],
    heldout: list[tuple[str, list[tuple[int, bool]]]],
    shard_tokens: int,
) -> None:
    directory = tmp_path_factory.mktemp("tokens")
    documents = {"train": train, "heldout": heldout}
    _write(directory, documents, shard_tokens=shard_tokens)
    for split in SPLITS:
        tokens = Tokens(directory, split=split)
        assert tokens.lengths.tolist() == [len(row) for _, row in documents[split]]
        assert tokens.lengths.dtype == torch.long
        for index in reversed(range(len(tokens))):
            name, row = documents[split][index]
            ids_T, mask_T = tokens[index]
            assert (ids_T.dtype, mask_T.dtype) == (torch.long, torch.bool)
            assert list(zip(ids_T.tolist(), mask_T.tolist(), strict=True)) == row
            assert tokens.ids(index) == name
        for num_steps in (1, 3):
            expected = [
                [slots_S.shape[0] for slots_S in serving_slots(tokens[index][1], num_steps=num_steps)]
                for index in range(len(tokens))
            ]
            rows = tokens.trained_rows(num_steps=num_steps)
            assert (rows.dtype, rows.shape) == (torch.long, (len(tokens), num_steps))
            assert rows.tolist() == expected
        written = [token for _, row in documents[split] for token, inside in row if inside]
        assert tokens.answer_token_counts(vocab_size=10).tolist() == [written.count(token) for token in range(10)]
        sizes = [
            int(tokens.lengths[first:last].sum())
            for first, last in zip(tokens._first.tolist(), tokens._first.tolist()[1:], strict=False)
        ]
        assert all(
            size <= shard_tokens or last - first == 1
            for size, first, last in zip(sizes, tokens._first.tolist(), tokens._first.tolist()[1:], strict=False)
        )


def _small(directory: Path) -> Path:
    row = [(1, False), (2, True), (3, True)]
    _write(directory, {"train": [("a", row), ("b", row)], "heldout": [("c", row)]}, shard_tokens=4)
    return directory


def test_an_index_out_of_range_is_refused(tmp_path: Path) -> None:
    tokens = Tokens(_small(tmp_path), split="train")
    for index in (2, -1):
        with pytest.raises(IndexError):
            tokens[index]


def test_the_fingerprint_tells_contents_apart(tmp_path: Path) -> None:
    first = Tokens(_small(tmp_path / "a"), split="train").fingerprint
    assert first == Tokens(_small(tmp_path / "b"), split="heldout").fingerprint
    row = [(1, False), (2, True), (4, True)]
    _write(tmp_path / "c", {"train": [("a", row), ("b", row)], "heldout": [("c", row)]}, shard_tokens=4)
    assert first != Tokens(tmp_path / "c", split="train").fingerprint


def test_a_rewrite_does_not_change_what_is_read_from_an_open_split(tmp_path: Path) -> None:
    tokens = Tokens(_small(tmp_path), split="train")
    ids_T, mask_T = tokens[1]
    row = [(7, True), (7, True), (7, False)]
    _write(tmp_path, {"train": [("a", row), ("b", row)], "heldout": [("c", row)]}, shard_tokens=4)
    assert ids_T.tolist() == [1, 2, 3]
    assert mask_T.tolist() == [False, True, True]


def test_unfinished_and_broken_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"index\.json does not exist"):
        Tokens(tmp_path, split="train")
    path = shard_path(_small(tmp_path), split="train", number=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="missing or broken"):
        Tokens(tmp_path, split="train")
    path.unlink()
    with pytest.raises(ValueError, match="missing or broken"):
        Tokens(tmp_path, split="train")
    _write(tmp_path / "other", {"train": [], "heldout": [("c", [(1, True)])]}, shard_tokens=4)
    path.write_bytes(shard_path(tmp_path / "other", split="heldout", number=0).read_bytes())
    with pytest.raises(ValueError, match="not the file"):
        Tokens(tmp_path, split="train")
    (tmp_path / "index.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="another version"):
        Tokens(tmp_path, split="train")


def test_a_flipped_bit_is_told(tmp_path: Path) -> None:
    documents = {"train": [("a", [(3, True), (4, False)] * 40)], "heldout": [("b", [(1, True)])]}
    _write(tmp_path, documents, shard_tokens=100)
    path = shard_path(tmp_path, split="train", number=0)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not the file that index\.json tells of; run the prepare stage again"):
        Tokens(tmp_path, split="train")
    assert len(Tokens(tmp_path, split="heldout")) == 1
