"""Shards of a feature store: which documents go into one, writing one, and who writes it.

A shard is a safetensors file with the tensors of some documents end to end (encoding.py), `documents` [n] (their indices
in the split), `offsets` and `teacher_offsets` [n + 1] (where each begins among the token and the teacher rows) and
`crc32` [n], of all that is stored of a document. Its metadata name the store it belongs to. It is written beside its
final name, flushed to disk and renamed, so whatever is there under its name is whole.

Several processes may fill one store: each takes a lock on a shard's name while it makes it. The kernel lets go of a lock
when its process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Self

import torch
from torch import Tensor

from eyas.heads.files import atomic_stream, sync_directory
from eyas.train.features.encoding import EncodedDocument, has_teacher_rows, stored_tensors
from eyas.train.features.identity import StoreIdentity

CLAIMS_DIRECTORY = ".claims"
DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TYPE_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bool: "BOOL",
}
"""safetensors' names of the types in a shard."""


def shard_plan(lengths: Sequence[int], *, shard_tokens: int) -> list[range]:
    """Ranges of documents whose tokens stay within `shard_tokens`; a longer document is alone."""
    plan: list[range] = []
    first, filled = 0, 0
    for index, length in enumerate(lengths):
        if index > first and filled + length > shard_tokens:
            plan.append(range(first, index))
            first, filled = index, 0
        filled += length
    if len(lengths) > first:
        plan.append(range(first, len(lengths)))
    return plan


def shard_path(store: Path, *, split: str, name: str) -> Path:
    """Where a shard lies."""
    return store / f"{split}-{name}.safetensors"


def shard_name(documents: Sequence[int]) -> str:
    """Name of the shard that begins with a document: no other shard of its split can hold that document."""
    return f"{documents[0]:09d}"


class ShardWriter:
    """Writes shards of one split of a store."""

    def __init__(self, store: Path, *, identity: StoreIdentity, split: str) -> None:
        self.store, self.identity, self.split = store, identity, split
        self.kinds = stored_tensors(
            identity.form, hidden_size=identity.hidden_size, num_layers=len(identity.capture_layers)
        )

    def write(self, name: str, documents: Sequence[tuple[int, EncodedDocument]]) -> Path:
        """Write documents with their indices as one shard, atomically.

        Raises:
            ValueError: the disk is full; nothing of the shard is left.
        """
        path = shard_path(self.store, split=self.split, name=name)
        tables = _tables([index for index, _ in documents], [document for _, document in documents], kinds=self.kinds)
        pieces = {kind: [document.tensors[kind] for _, document in documents] for kind in self.kinds}
        self._check(pieces)
        pieces |= {table: [tensor] for table, tensor in tables.items()}
        # Large types first keeps every tensor aligned.
        pieces = dict(sorted(pieces.items(), key=lambda item: (-item[1][0].element_size(), item[0])))
        header = _header(pieces, metadata={"identity": self.identity.fingerprint})
        try:
            _write_atomically(path, header, pieces.values())
        except OSError as error:
            if error.errno not in DISK_IS_FULL:
                raise
            raise ValueError(
                f"no space for {path} ({error.strerror}); free some, or set run_dir to another disk. Complete shards are "
                "kept: run the extract stage again and it goes on after them"
            ) from error
        return path

    def _check(self, pieces: dict[str, list[Tensor]]) -> None:
        for name, (dtype, width) in self.kinds.items():
            for tensor in pieces[name]:
                assert tensor.dtype == dtype and tensor.shape[1:] == (() if width is None else (width,)), name


def _tables(
    indices: list[int], documents: list[EncodedDocument], *, kinds: dict[str, tuple[torch.dtype, int | None]]
) -> dict[str, Tensor]:
    # Where the last state is kept everywhere, it is the teacher, and there are no rows of its own.
    teacher = next((name for name in kinds if has_teacher_rows(name)), None)
    rows = [0 if teacher is None else document.tensors[teacher].shape[0] for document in documents]
    return {
        "documents": torch.tensor(indices, dtype=torch.int64),
        "offsets": _offsets([document.num_tokens for document in documents]),
        "teacher_offsets": _offsets(rows),
        "crc32": torch.tensor(
            [document_crc32(index, document.tensors) for index, document in zip(indices, documents, strict=True)],
            dtype=torch.int64,
        ),
    }


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def document_crc32(index: int, tensors: dict[str, Tensor]) -> int:
    """Checksum of a document's place and of all its rows, tensors in the order of their names."""
    checksum = zlib.crc32(struct.pack("<q", index))
    for name in sorted(tensors):
        checksum = zlib.crc32(struct.pack("<q", tensors[name].shape[0]), checksum)
        checksum = zlib.crc32(_raw(tensors[name]), checksum)
    return checksum


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(pieces: dict[str, list[Tensor]], *, metadata: dict[str, str]) -> bytes:
    """A safetensors header: its length, then JSON padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name, parts in pieces.items():
        first, rows = parts[0], sum(part.shape[0] for part in parts)
        end = begin + sum(part.numel() for part in parts) * first.element_size()
        entries[name] = {
            "dtype": TYPE_NAMES[first.dtype],
            "shape": [rows, *first.shape[1:]],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_atomically(path: Path, header: bytes, parts: Iterable[list[Tensor]]) -> None:
    # Only the holder of a shard's claim writes it, so a half file of that name is a dead writer's.
    for left_over in path.parent.glob(f".{path.name}.*"):
        left_over.unlink(missing_ok=True)
    with atomic_stream(path) as stream:
        stream.write(header)
        _write_tensors(stream, parts)
    sync_directory(path.parent)


def _write_tensors(stream: IO[bytes], parts: Iterable[list[Tensor]]) -> None:
    for tensors in parts:
        for tensor in tensors:
            stream.write(_raw(tensor))


@contextmanager
def claim(store: Path, *, split: str, name: str, wait: bool = False) -> Iterator[bool]:
    """Hold the making of one shard while in the block. False: another process holds it, and `wait` was false.

    Whoever gets a claim must look whether the shard has appeared meanwhile.
    """
    lock = store / CLAIMS_DIRECTORY / f"{split}-{name}"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        # A shard that is there needs no lock any more. Without one the file stays: another may hold it open.
        if shard_path(store, split=split, name=name).is_file():
            lock.unlink(missing_ok=True)


class BackgroundWriter:
    """Writes shards in a thread, one at a time and one waiting, so that the target's forward pass does not wait.

    An error of the thread is raised by the next `submit`, or on leaving the block. What `held` has to keep, such as the
    shard's claim, is let go once the shard is written.
    """

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eyas-shards")
        self._pending: list[Future[None]] = []

    def submit(self, name: str, documents: Sequence[tuple[int, EncodedDocument]], *, held: ExitStack) -> None:
        """Hand over a shard; waits while two are on their way."""

        def write() -> None:
            with held:
                self.writer.write(name, documents)

        try:
            while len(self._pending) > 1:
                self._pending.pop(0).result()
        except BaseException:
            held.close()
            raise
        self._pending.append(self._pool.submit(write))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            for future in self._pending:
                future.result()


def as_lengths(lengths_N: Tensor) -> array[int]:
    """A tensor of lengths as a sequence of plain integers that takes 8 bytes each."""
    lengths = array("q")
    lengths.frombytes(lengths_N.to(torch.int64).numpy().tobytes())
    return lengths
