"""The files of one checkpoint directory, and how to tell a whole one from a broken one.

A directory is written beside its place and renamed into it when every file, and a listing of their sizes and sha256,
is on disk. So a kill or a power cut leaves a directory that is whole, or one whose name says that it is not. A disk that
loses bytes later is caught by the listing, which is checked before anything is read.

    step-00000200         whole                            step-00000200.tmp     being written
    step-00000200.broken  failed the check, set aside      step-00000200.old     being replaced by one of the same step
    step-00000200.gone    being removed
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from eyas.heads.files import read_json, sha256_file, sync_directory

FORMAT = 1
"""Raised when older checkpoints cannot be read any more."""

LISTING = "files.json"
RECORD = "state.json"
REQUIRED = frozenset({RECORD, "weights.safetensors", "optimizer.safetensors", "rng.safetensors"})
PIECE_BYTES = 1 << 26

TYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of types."""


class BrokenCheckpoint(Exception):
    """Why a directory is no whole checkpoint; names the file."""


def step_name(step: int) -> str:
    """Name of the directory of a step, for checkpoints and for heads."""
    return f"step-{step:08d}"


def whole_directories(parent: Path) -> list[Path]:
    """Directories in `parent` whose names say that they are whole, by step."""
    found = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=step_of)


def step_of(directory: Path) -> int:
    """The step that a directory is named after."""
    return int(directory.name.partition("-")[2])


def write_directory(final: Path, *, tensors: Mapping[str, Mapping[str, Tensor]], record: bytes) -> None:
    """Write the files of `tensors` ("weights", ...) and the record, and let them appear as `final` at once."""
    temporary = final.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    listed = {
        f"{name}.safetensors": _write_tensors(temporary / f"{name}.safetensors", values)
        for name, values in tensors.items()
    }
    listed[RECORD] = _write(temporary / RECORD, record)
    _write(temporary / LISTING, _json({"format": FORMAT, "files": listed}))
    sync_directory(temporary)
    replaced = final.with_suffix(".old")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def check_directory(directory: Path) -> None:
    """Compare every file with the listing.

    Raises:
        BrokenCheckpoint: a file is missing, or not the one that was written.
        ValueError: another version of eyas wrote the directory.
    """
    for name, entry in _listed_files(directory).items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise BrokenCheckpoint(f"{name} has {size} bytes instead of {entry['bytes']}")
            if sha256_file(path) != entry["sha256"]:
                raise BrokenCheckpoint(f"{name} is not what was written: its sha256 differs")
        except PermissionError:
            raise
        except FileNotFoundError as error:
            raise BrokenCheckpoint(f"{name} is missing") from error
        except OSError as error:
            raise BrokenCheckpoint(f"{name} cannot be read: {error.strerror}") from error


def set_aside(directory: Path) -> Path:
    """Give a broken directory a name that says so. Several processes may do this at once."""
    aside = directory.with_suffix(".broken")
    with suppress(FileNotFoundError):
        if directory.exists():
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
    return aside


def remove_directory(directory: Path) -> None:
    """Remove a whole directory; a kill half-way leaves one whose name says so."""
    gone = directory.with_suffix(".gone")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Undo what a kill interrupted: a replacement goes back, half-written and half-removed directories go away.

    Several processes may do this at once, while none writes.
    """
    for replaced in parent.glob("step-*.old"):
        with suppress(OSError):  # fails when the new one is in place, or another process was faster
            if not replaced.with_suffix("").exists():
                replaced.rename(replaced.with_suffix(""))
        shutil.rmtree(replaced, ignore_errors=True)
    for suffix in ("tmp", "gone"):
        for leftover in parent.glob(f"step-*.{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)


def clear_broken(parent: Path) -> None:
    """Remove what was set aside."""
    for directory in parent.glob("step-*.broken"):
        shutil.rmtree(directory, ignore_errors=True)


def _listed_files(directory: Path) -> dict[str, Any]:
    try:
        listing = read_json(directory / LISTING)
        files, written = listing["files"], listing["format"]
        complete = files.keys() >= REQUIRED and all(
            isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str) for entry in files.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"{LISTING} is missing or is no listing of files") from error
    if written != FORMAT:
        raise ValueError(
            f"{directory} has checkpoint format {written}, and this version of eyas reads {FORMAT}; continue with the "
            "version that wrote it, or set run_dir=... to train from the beginning elsewhere"
        )
    if not complete:
        raise BrokenCheckpoint(f"{LISTING} does not list every file")
    return files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _write(path: Path, content: bytes) -> dict[str, Any]:
    with _hashed(path) as stream:
        stream.write(content)
    return stream.entry


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file straight from the tensors' memory.

    The library's own writer makes a second copy in older versions, keeps Python's other threads waiting, and reports a
    full disk as an error that is no OSError.
    """
    # Wide types first, as the library does, so that every tensor begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _hashed(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            stream.write(_bytes_of(tensors[name]))
    return stream.entry


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.device.type == "cpu", "checkpoints are written from the CPU"
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class _Hashed:
    """A file that knows its size and sha256."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._sha256, self._size = stream, hashlib.sha256(), 0

    def write(self, content: bytes | memoryview) -> None:
        """Write all of `content`, piece by piece: hashing a piece just after it was written finds it in the cache."""
        view = memoryview(content)
        for piece in range(math.ceil(len(view) / PIECE_BYTES)):
            part = view[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
            self._stream.write(part)
            self._sha256.update(part)
        self._size += len(view)

    @property
    def entry(self) -> dict[str, Any]:
        """What the listing says of the file."""
        return {"bytes": self._size, "sha256": self._sha256.hexdigest()}


@contextmanager
def _hashed(path: Path) -> Iterator[_Hashed]:
    """A new file, on disk when the block ends; an error of the disk names it."""
    try:
        with path.open("wb") as stream:
            hashed = _Hashed(stream)
            yield hashed
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
