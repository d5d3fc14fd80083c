"""The feature store: tokens and hidden states of the target, per split, in safetensors shards.

A shard is self-contained: `token_ids` [N], `answer_mask` [N], `offsets` [documents + 1], `captured` [N, A*H] and `last`
[N, H], documents end to end. `index.json` says which target, layers and dtype made them. Reading maps the file and
copies only the rows asked for, so a store larger than memory works.

Bytes per token: (A + 1) * H * 2 in bfloat16, 4,608 for SmolLM2-135M with three captured layers.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from eyas.heads.files import read_json, write_bytes, write_json

INDEX_NAME = "index.json"


@dataclass(frozen=True)
class StoreIdentity:
    """What a store's numbers are: a head trained on one identity must not be fed another."""

    target_fingerprint: str
    hidden_size: int
    num_target_layers: int
    capture_layers: list[int]
    dtype: str


@dataclass(frozen=True)
class Document:
    """One conversation of a split: T tokens with their features."""

    token_ids_T: Tensor
    answer_mask_T: Tensor
    captured_TX: Tensor
    last_TH: Tensor


def write_shard(
    store: Path,
    *,
    split: str,
    number: int,
    token_ids_N: Tensor,
    answer_mask_N: Tensor,
    offsets: Tensor,
    captured_NX: Tensor,
    last_NH: Tensor,
) -> Path:
    """Write one shard atomically; an existing file of that number is a complete shard."""
    path = shard_path(store, split=split, number=number)
    tensors = {
        "token_ids": token_ids_N.int(),
        "answer_mask": answer_mask_N.bool(),
        "offsets": offsets.long(),
        "captured": captured_NX.contiguous(),
        "last": last_NH.contiguous(),
    }
    write_bytes(path, save(tensors))
    return path


def shard_path(store: Path, *, split: str, number: int) -> Path:
    """Where shard `number` of a split lies."""
    return store / f"{split}-{number:05d}.safetensors"


def write_index(store: Path, identity: StoreIdentity, *, shards: dict[str, int]) -> None:
    """Write the index last: a store without one is incomplete."""
    write_json(store / INDEX_NAME, {"identity": asdict(identity), "shards": shards})


def read_identity(store: Path) -> StoreIdentity:
    """Identity of the store in a directory."""
    return StoreIdentity(**read_json(store / INDEX_NAME)["identity"])


def check_identity(store: Path, *, target_fingerprint: str) -> StoreIdentity:
    """Identity of a store, which must have been made from the given target.

    Raises:
        ValueError: the store belongs to another target (or to the same one with another template or tokenizer).
    """
    identity = read_identity(store)
    if identity.target_fingerprint != target_fingerprint:
        raise ValueError(
            f"the feature store {store} was made from another target (or another template or tokenizer of it): "
            f"{identity.target_fingerprint[:12]}, not {target_fingerprint[:12]}; delete it and run the extract stage again"
        )
    return identity


class FeatureStore:
    """Random access to the documents of one split."""

    def __init__(self, store: Path, *, split: str) -> None:
        index = read_json(store / INDEX_NAME)
        self.paths = [shard_path(store, split=split, number=number) for number in range(index["shards"][split])]
        self._files: dict[int, Any] = {}
        self._where: list[tuple[int, int, int]] = []
        self.lengths: list[int] = []
        for number in range(len(self.paths)):
            offsets = self._file(number).get_tensor("offsets").tolist()
            for begin, end in itertools.pairwise(offsets):
                self._where.append((number, begin, end))
                self.lengths.append(end - begin)

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> Document:
        number, begin, end = self._where[index]
        file = self._file(number)
        return Document(
            token_ids_T=file.get_slice("token_ids")[begin:end].long(),
            answer_mask_T=file.get_slice("answer_mask")[begin:end],
            captured_TX=file.get_slice("captured")[begin:end],
            last_TH=file.get_slice("last")[begin:end],
        )

    def answer_token_counts(self, *, vocab_size: int) -> Tensor:
        """How often each token was written by the target in this split, [V]."""
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for number in range(len(self.paths)):
            file = self._file(number)
            answers = file.get_tensor("token_ids")[file.get_tensor("answer_mask").bool()].long()
            counts_V += torch.bincount(answers, minlength=vocab_size)
        return counts_V

    def _file(self, number: int) -> Any:
        # Opened on first use, so that a store object can cross into a worker process.
        if number not in self._files:
            if not self.paths[number].is_file():
                raise ValueError(f"{self.paths[number]} is missing from the feature store; run the extract stage again")
            self._files[number] = safe_open(self.paths[number], framework="pt")
        return self._files[number]
