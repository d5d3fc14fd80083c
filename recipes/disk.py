"""Room on a disk: what is free, what a folder takes, and refusing to fill it."""

from __future__ import annotations

import shutil
from pathlib import Path


def free_bytes(path: Path) -> tuple[Path, int]:
    """The nearest existing folder of a path that is, or will be, and the free bytes of its disk."""
    existing = next(folder for folder in [path.absolute(), *path.absolute().parents] if folder.exists())
    return existing, shutil.disk_usage(existing).free


def directory_bytes(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def require_free_bytes(path: Path, *, needed: int, what: str) -> None:
    """Refuse to begin what would fill the disk that `path` is, or will be, on.

    Raises:
        ValueError: fewer than `needed` bytes are free.
    """
    _, free = free_bytes(path)
    if free < needed:
        raise ValueError(
            f"{what} needs {needed / 2**30:.1f} GiB in {path}, and {free / 2**30:.1f} GiB are free; "
            "free some space, or set run_dir=... to a larger disk"
        )
