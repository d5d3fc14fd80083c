"""Small files written so that a reader never sees half of one, and fingerprints of what they hold.

Every artefact of eyas goes through these functions: write beside the target, flush to disk, rename.
A kill at any moment leaves the old file or the new one, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LARGE_FILE_BYTES = 1 << 30
"""Above this size `fingerprint_file` samples a file instead of reading all of it."""

SAMPLES = 16
SAMPLE_BYTES = 1 << 20
TENSOR_SAMPLE_BYTES = 1 << 12
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors format allows."""


@contextmanager
def atomic_stream(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A stream whose bytes appear under `path` at once, flushed to disk, when the block ends without an error.

    The parent directory is made when it is missing. `mode` is the file's permissions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, making the parent directory when it is missing."""
    with atomic_stream(path) as stream:
        stream.write(content)


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    with atomic_stream(path, mode=mode) as stream:
        stream.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON atomically. NaN and infinity are refused: readers of other languages choke on them."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON from `path`.

    Raises:
        ValueError: the file is missing or is not JSON; the message names the file.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; it should be a JSON file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); restore it or delete it and run the stage again"
        ) from error


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, so that a rename inside it survives a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`: equal values give equal fingerprints whatever their key order."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a whole file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint_file(path: Path, *, sample_above: int = LARGE_FILE_BYTES) -> str:
    """Identity of a file's content: sha256 of it, or of its size and of samples when it is larger than `sample_above`.

    Reading 140 GB of weights to notice that nothing changed costs minutes, samples cost milliseconds: 16 windows of a MiB
    from the first byte to the last, and of a safetensors file its header and 4 KiB from the middle of every tensor,
    because training on or merging an adapter may change some tensors only, but then all over.
    """
    size = path.stat().st_size
    if size <= max(sample_above, SAMPLES * SAMPLE_BYTES):
        return sha256_file(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for sample in range(SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
        if path.suffix == ".safetensors":
            _digest_tensors(stream, digest)
    return f"sampled-{digest.hexdigest()}"


def _digest_tensors(stream: IO[bytes], digest: hashlib._Hash) -> None:
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if length > MAX_HEADER_BYTES:
        return  # no safetensors file after all; whoever reads it will say so
    header = stream.read(length)
    digest.update(header)
    begin = 8 + len(header)
    try:
        entries = json.loads(header)
        spans = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, AttributeError, TypeError):
        return
    for first, last in spans:
        stream.seek(begin + max(first, (first + last) // 2 - TENSOR_SAMPLE_BYTES // 2))
        digest.update(stream.read(min(TENSOR_SAMPLE_BYTES, last - first)))


def fingerprint_directory(directory: Path, *, patterns: tuple[str, ...] = ("*",)) -> str:
    """Identity of the files directly inside `directory` that match one of `patterns`, by name and content."""
    names = sorted({path.name for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    return fingerprint({name: fingerprint_file(directory / name) for name in names})
