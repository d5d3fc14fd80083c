"""Token files: documents with their answer mask, in shards of some megabytes, written and read one shard at a time.

    {split}-{number:05}.safetensors   token_ids int32 [N], answer_mask bool [N], offsets int64 [n + 1] of its n documents,
                                      names uint8 and name_offsets int64 [n + 1]: the documents' ids as UTF-8, end to end
    index.json                        written last: documents, tokens and checksum of every shard

A document's id is its conversation's; further documents of one conversation are `ID#2`, `ID#3` and so on.

Shape legend: N tokens of a shard, n documents of a shard or a split, T tokens of a document, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eyas.heads.files import read_json, sha256_file, write_bytes, write_json
from eyas.train.data.rows import trained_rows

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
SHARD_TOKENS = 1 << 20
VERSION = 1

_INDEX = "index.json"
_OPEN_SHARDS = 4
"""Shards kept mapped; more would only add to the resident memory that the system counts."""


def shard_path(tokens_dir: Path, *, split: str, number: int) -> Path:
    """Where a shard of a split lies."""
    return tokens_dir / f"{split}-{number:05}.safetensors"


class TokenWriter:
    """Writes the token files of both splits; memory holds one shard of each at most.

    What an earlier, unfinished run left in the directory is removed first. Without `finish` there is no index, so a
    reader never takes a part for the whole.
    """

    def __init__(self, tokens_dir: Path, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self._dir = tokens_dir
        self._shard_tokens = shard_tokens
        self._rows: dict[str, list[tuple[bytes, Tensor, Tensor]]] = {split: [] for split in SPLITS}
        self._waiting = dict.fromkeys(SPLITS, 0)
        self._shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        (tokens_dir / _INDEX).unlink(missing_ok=True)
        for split in SPLITS:
            for stale in tokens_dir.glob(f"{split}-*.safetensors"):
                stale.unlink()

    def add(self, split: Split, *, name: str, token_ids: Sequence[int], answer_mask: Sequence[bool]) -> None:
        """Append a document to a split."""
        assert len(token_ids) == len(answer_mask) > 0
        if self._waiting[split] and self._waiting[split] + len(token_ids) > self._shard_tokens:
            self._flush(split)
        ids_T = torch.tensor(token_ids, dtype=torch.int32)
        mask_T = torch.tensor(answer_mask, dtype=torch.bool)
        self._rows[split].append((name.encode(), ids_T, mask_T))
        self._waiting[split] += len(token_ids)

    def finish(self) -> dict[str, int]:
        """Write what is left and the index.

        Returns:
            Documents, tokens and answer tokens of each split.
        """
        for split in SPLITS:
            self._flush(split)
        write_json(self._dir / _INDEX, {"version": VERSION, "splits": self._shards})
        return {
            f"{split}_{what}": sum(shard[what] for shard in self._shards[split])
            for split in SPLITS
            for what in ("documents", "tokens", "answer_tokens")
        }

    def _flush(self, split: Split) -> None:
        rows, self._rows[split], self._waiting[split] = self._rows[split], [], 0
        if not rows:
            return
        mask_N = torch.cat([mask_T for _, _, mask_T in rows])
        tensors = {
            "token_ids": torch.cat([ids_T for _, ids_T, _ in rows]),
            "answer_mask": mask_N,
            "offsets": _offsets([ids_T.shape[0] for _, ids_T, _ in rows]),
            "names": torch.frombuffer(
                bytearray(b"".join(name for name, _, _ in rows)) or bytearray(1), dtype=torch.uint8
            ),
            "name_offsets": _offsets([len(name) for name, _, _ in rows]),
        }
        content = save(tensors)
        write_bytes(shard_path(self._dir, split=split, number=len(self._shards[split])), content)
        self._shards[split].append(
            {
                "documents": len(rows),
                "tokens": mask_N.shape[0],
                "answer_tokens": int(mask_N.sum()),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        )


class Tokens:
    """The documents of one split, memory-mapped.

    Attributes:
        lengths: tokens of each document, int64 [n].
        fingerprint: identity of the token files of both splits.

    Raises:
        ValueError: the directory has no index, or a shard is missing or broken.
    """

    def __init__(self, tokens_dir: Path, *, split: Split) -> None:
        self._dir, self._split = tokens_dir, split
        index = read_json(tokens_dir / _INDEX)
        if not isinstance(index, dict) or index.get("version") != VERSION:
            raise ValueError(f"{tokens_dir / _INDEX} is of another version of eyas; run the prepare stage again")
        self.fingerprint = sha256_file(tokens_dir / _INDEX)
        self._open: OrderedDict[int, Any] = OrderedDict()
        offsets = [self._offsets(number, shard) for number, shard in enumerate(index["splits"][split])]
        self.lengths = torch.cat([offsets_N[1:] - offsets_N[:-1] for offsets_N in offsets] or [torch.zeros(0).long()])
        self._starts = torch.cat([offsets_N[:-1] for offsets_N in offsets] or [torch.zeros(0).long()])
        self._first = _offsets([offsets_N.shape[0] - 1 for offsets_N in offsets])
        """Index of the first document of each shard."""

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """`(token_ids_T, answer_mask_T)` of a document: int64 and bool."""
        number, _ = self._place(index)
        begin = int(self._starts[index])
        end = begin + int(self.lengths[index])
        shard = self._shard(number)
        return shard.get_slice("token_ids")[begin:end].long(), shard.get_slice("answer_mask")[begin:end].clone()

    def ids(self, index: int) -> str:
        """Id of a document."""
        number, row = self._place(index)
        shard = self._shard(number)
        begin, end = shard.get_slice("name_offsets")[row : row + 2].tolist()
        return bytes(shard.get_slice("names")[begin:end].tolist()).decode()

    def answer_token_counts(self, *, vocab_size: int) -> Tensor:
        """How often each token was written by the target: int64 [V]."""
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for number in range(self._first.shape[0] - 1):
            shard = self._shard(number)
            ids_N, mask_N = shard.get_tensor("token_ids"), shard.get_tensor("answer_mask")
            counts_V += torch.bincount(ids_N[mask_N].long(), minlength=vocab_size)
        return counts_V

    def trained_rows(self, *, num_steps: int) -> Tensor:
        """Rows that training has of each document at each of `num_steps` TTT steps: int64 [n, K]."""
        rows = [torch.zeros(0, num_steps, dtype=torch.long)]
        for number in range(self._first.shape[0] - 1):
            shard = self._shard(number)
            mask_N, offsets = shard.get_tensor("answer_mask"), shard.get_tensor("offsets")
            rows.append(trained_rows(mask_N, offsets=offsets, num_steps=num_steps))
        return torch.cat(rows)

    def _place(self, index: int) -> tuple[int, int]:
        """Shard of a document, and its row there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(torch.searchsorted(self._first, index, right=True)) - 1
        return number, index - int(self._first[number])

    def _offsets(self, number: int, expected: dict[str, Any]) -> Tensor:
        path = shard_path(self._dir, split=self._split, number=number)
        try:
            offsets_N = self._shard(number).get_tensor("offsets")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is missing or broken ({error}); run the prepare stage again") from error
        if sha256_file(path) != expected["sha256"]:
            raise ValueError(f"{path} is not the file that {_INDEX} tells of; run the prepare stage again")
        return offsets_N

    def _shard(self, number: int) -> Any:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = safe_open(shard_path(self._dir, split=self._split, number=number), framework="pt")
        self._open[number] = shard
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard


def _offsets(lengths: Sequence[int]) -> Tensor:
    """Where each of some pieces begins when they lie end to end, and where the last one ends: int64 [n + 1]."""
    return torch.cat((torch.zeros(1, dtype=torch.long), torch.tensor(list(lengths), dtype=torch.long).cumsum(0)))
