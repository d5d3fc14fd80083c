"""Fingerprints of files: all of a small one, samples of a large one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.heads.files import SAMPLE_BYTES, SAMPLES, fingerprint_file, sha256_file

SIZE = 2 * SAMPLES * SAMPLE_BYTES + 12345


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.truncate(SIZE)
    return path


def change(path: Path, *, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"x")


def test_small_files_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    assert fingerprint_file(path) == sha256_file(path)


def test_large_files_are_sampled_from_the_first_byte_to_the_last(large: Path) -> None:
    found = {fingerprint_file(large, sample_above=1 << 20)}
    for at in (0, SIZE // 2, SIZE - 1, 8 * (SIZE - SAMPLE_BYTES) // (SAMPLES - 1)):
        change(large, at=at)
        found.add(fingerprint_file(large, sample_above=1 << 20))
    assert len(found) >= 4, "first, last and at least one window between were seen"
    with large.open("ab") as stream:
        stream.write(b"0")
    assert fingerprint_file(large, sample_above=1 << 20) not in found


def test_weights_changed_everywhere_are_another_target(large: Path) -> None:
    """What training on does to a model: every part of its files is different, whichever windows are looked at."""
    before = fingerprint_file(large, sample_above=1 << 20)
    for at in range(0, SIZE, SAMPLE_BYTES // 2):
        change(large, at=at)
    assert fingerprint_file(large, sample_above=1 << 20) != before


def test_one_changed_tensor_of_many_is_seen(tmp_path: Path) -> None:
    """What merging an adapter does: most of the file stays, one matrix changes all over."""
    tensors = {f"layer.{number}": torch.zeros(64 * 1024) for number in range(160)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    before = fingerprint_file(path, sample_above=1 << 20)
    assert before.startswith("sampled-")
    for name in ("layer.3", "layer.77", "layer.158"):
        save_file(tensors | {name: torch.ones(64 * 1024)}, path)
        assert fingerprint_file(path, sample_above=1 << 20) != before
    save_file(tensors, path)
    assert fingerprint_file(path, sample_above=1 << 20) == before
