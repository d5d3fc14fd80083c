"""The feature store: tokens and states of the target in safetensors shards, read by document.

`index.json` says which target, tokens, layers and form the numbers are of (identity.py); shards hold any subset of a
split's documents in any order (shards.py), so a store can be read while it grows. Reading maps files, some at a time, and
touches only the rows asked for, so a store larger than memory works. What is kept of a document is some integers.

Shapes: N documents of a split, T tokens of a document, V vocabulary, K TTT steps.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.train.data.rows import trained_rows
from eyas.train.features.documents import Document
from eyas.train.features.encoding import EncodedDocument, decode, has_teacher_rows, stored_tensors
from eyas.train.features.identity import StoreIdentity as StoreIdentity
from eyas.train.features.identity import check_identity as check_identity
from eyas.train.features.identity import read_identity, read_num_documents
from eyas.train.features.shards import TYPE_NAMES, document_crc32

Verify = Literal["open", "read"]
TABLES = ("documents", "offsets", "teacher_offsets", "crc32")
OPEN_FILES = 128
"""Shards that are mapped at a time: a system allows some ten thousand mappings, and a store may have more shards."""


@dataclass(frozen=True)
class _Shard:
    path: Path
    documents: Tensor
    offsets: Tensor
    teacher_offsets: Tensor
    crc32: Tensor


class FeatureStore:
    """Random access to the documents of one split."""

    def __init__(self, store: Path, *, split: str, verify: Verify = "read") -> None:
        """
        Args:
            verify: "open" checks every checksum of a shard when it is opened; "read" checks a document's when it is read.

        Raises:
            ValueError: no store, one of another version, or a broken shard; the message says which and how to mend it.
        """
        self.store, self.split, self.verify = store, split, verify
        self.identity = read_identity(store)
        self._kinds = stored_tensors(
            self.identity.form, hidden_size=self.identity.hidden_size, num_layers=len(self.identity.capture_layers)
        )
        self._num_documents = read_num_documents(store, split=split)
        self._shards: list[_Shard] = []
        self._files: OrderedDict[Path, Any] = OrderedDict()
        self._seen: set[str] = set()
        # Of each document: its shard (-1 while it is missing), its row there, and its tokens.
        self._shard_of, self._row_of, self.lengths = array("i"), array("i"), array("q")
        self._grow(self._num_documents or 0)
        self.refresh()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        return self.load([index])[0]

    def refresh(self) -> int:
        """Find shards that were written since the last look; how many."""
        new = sorted(path for path in self.store.glob(f"{self.split}-*.safetensors") if path.name not in self._seen)
        for path in new:
            self._add(_read_tables(path, self._file(path), identity=self.identity.fingerprint, kinds=self._kinds))
            self._seen.add(path.name)
        return len(new)

    def missing(self) -> list[int]:
        """Documents that no shard holds yet."""
        return self.missing_among(range(len(self)))

    def missing_among(self, indices: Iterable[int]) -> list[int]:
        """Those of some documents that no shard holds yet."""
        return [index for index in indices if self._shard_of[index] < 0]

    def require_complete(self) -> None:
        """
        Raises:
            ValueError: documents are missing.
        """
        missing = len(self) - sum(shard >= 0 for shard in self._shard_of)
        if missing:
            raise ValueError(
                f"the feature store {self.store} lacks {missing} of {len(self)} documents of the {self.split} split; run "
                "the extract stage again, and only what is missing is made"
            )

    def load(self, indices: Sequence[int]) -> list[Document]:
        """Some of the documents, in the order asked for.

        Raises:
            ValueError: a document is not there yet, or its stored bytes changed.
        """
        return [decode(self.load_encoded(index)) for index in indices]

    def load_encoded(self, index: int) -> EncodedDocument:
        """A document as it is stored."""
        shard, row = self._place(index)
        document = self._rows(shard, row, names=self._kinds)
        if self.verify == "read":
            _verify(shard, row, document)
        return document

    def token_ids(self, index: int) -> Tensor:
        """Tokens of a document, int32 and not verified: a search through all of them touches nothing else."""
        return self._rows(*self._place(index), names=("token_ids",)).tensors["token_ids"]

    def answer_token_counts(self, *, vocab_size: int) -> Tensor:
        """How often each token was written by the target in this split, [V]."""
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for number, shard in enumerate(self._shards):
            file = self._file(shard.path)
            mask = file.get_tensor("answer_mask").bool() & self._read_from(number, shard)
            counts_V += torch.bincount(file.get_tensor("token_ids")[mask].long(), minlength=vocab_size)
        return counts_V

    def trained_rows(self, *, num_steps: int) -> Tensor:
        """Rows that training has of each document at each of `num_steps` TTT steps, [N, K]."""
        rows = torch.zeros(len(self), num_steps, dtype=torch.long)
        for shard in self._shards:
            mask = self._file(shard.path).get_tensor("answer_mask")
            rows[shard.documents] = trained_rows(mask, offsets=shard.offsets, num_steps=num_steps)
        return rows

    def start(self, batches: Sequence[Sequence[int]], *, first: int = 0) -> None:
        """Files need no warning."""

    def close(self) -> None:
        """Let go of the files; the store is not read after this."""
        self._shards.clear()
        self._files.clear()

    def _read_from(self, number: int, shard: _Shard) -> Tensor:
        """Which token rows of a shard are those of documents that are read from it: shards may repeat a document."""
        owned = [self._shard_of[index] == number for index in shard.documents.tolist()]
        return torch.tensor(owned).repeat_interleave(shard.offsets.diff())

    def _place(self, index: int) -> tuple[_Shard, int]:
        number = self._shard_of[index]
        if number < 0:
            raise ValueError(
                f"document {index} of the {self.split} split is missing from the feature store {self.store}; run the "
                "extract stage again"
            )
        return self._shards[number], self._row_of[index]

    def _rows(self, shard: _Shard, row: int, *, names: Iterable[str]) -> EncodedDocument:
        begin, end = shard.offsets[row : row + 2].tolist()
        first, last = shard.teacher_offsets[row : row + 2].tolist()
        bounds = {name: slice(first, last) if has_teacher_rows(name) else slice(begin, end) for name in names}
        file = self._file(shard.path)
        return EncodedDocument({name: file.get_slice(name)[rows] for name, rows in bounds.items()})

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise _broken(path, f"it is cut short or not a safetensors file ({error})") from error
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(path)
        return self._files[path]

    def _add(self, shard: _Shard) -> None:
        indices = shard.documents.tolist()
        limit = self._num_documents
        if indices and (min(indices) < 0 or (limit is not None and max(indices) >= limit)):
            raise _broken(shard.path, f"it names a document that the {self.split} split does not have")
        if self.verify == "open":
            for row in range(len(indices)):
                _verify(shard, row, self._rows(shard, row, names=self._kinds))
        self._grow(max(indices, default=-1) + 1)
        for row, (index, length) in enumerate(zip(indices, shard.offsets.diff().tolist(), strict=True)):
            if self._shard_of[index] < 0:
                self._shard_of[index], self._row_of[index], self.lengths[index] = len(self._shards), row, length
        self._shards.append(shard)

    def _grow(self, num_documents: int) -> None:
        more = max(0, num_documents - len(self.lengths))
        self._shard_of.extend([-1] * more)
        self._row_of.extend([0] * more)
        self.lengths.extend([0] * more)


def _read_tables(path: Path, file: Any, *, identity: str, kinds: dict[str, tuple[torch.dtype, int | None]]) -> _Shard:
    """Where a shard holds which documents, after a look at whether it is what it should be."""
    if (file.metadata() or {}).get("identity") != identity:
        raise ValueError(
            f"{path} belongs to another feature store (another target, tokens, layers or storage type); delete that file "
            "and run the extract stage again: only it is made again"
        )
    expected = {name: (TYPE_NAMES[dtype], () if width is None else (width,)) for name, (dtype, width) in kinds.items()}
    expected |= {name: ("I64", ()) for name in TABLES}
    if set(file.keys()) != set(expected):
        raise _broken(path, "its header changed")
    for name, kind in expected.items():
        piece = file.get_slice(name)
        if (piece.get_dtype(), tuple(piece.get_shape()[1:])) != kind:
            raise _broken(path, f"the header of {name} changed")
    shard = _Shard(path, **{name: file.get_tensor(name).clone() for name in TABLES})
    rows = {name: int(file.get_slice(name).get_shape()[0]) for name in kinds}
    if not _is_sound(shard, rows=rows):
        raise _broken(path, "its table of documents changed")
    return shard


def _is_sound(shard: _Shard, *, rows: dict[str, int]) -> bool:
    """Whether the tables lead to rows that exist; the checksums say whether the rows are right."""
    num_documents = shard.documents.shape[0]
    ends = {name: shard.teacher_offsets if has_teacher_rows(name) else shard.offsets for name in rows}
    for offsets in (shard.offsets, shard.teacher_offsets):
        if offsets.shape[0] != num_documents + 1 or int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
            return False
    return shard.crc32.shape[0] == num_documents and all(int(ends[name][-1]) == count for name, count in rows.items())


def _verify(shard: _Shard, row: int, document: EncodedDocument) -> None:
    index = int(shard.documents[row])
    if document_crc32(index, document.tensors) != int(shard.crc32[row]):
        raise _broken(shard.path, f"the stored bytes of document {index} changed since they were written")


def _broken(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: {what}; delete that file and run the extract stage again: only it is made again")
