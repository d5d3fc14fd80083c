"""The target's tables are shared by the processes of a node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.heads.target import load_target_pieces

ROWS, WIDTH = 50_000, 2_000  # 200 MB in bfloat16
READER = """
import sys
from pathlib import Path
from eyas.heads.target import load_target_pieces

def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) // 1024

def proportional():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024

before, share = anonymous(), proportional()
pieces = load_target_pieces(Path(sys.argv[1]))
pieces.embedding_VH.view(-1)[::1024].sum().item()  # every page
assert pieces.readout_VH.data_ptr() == pieces.embedding_VH.data_ptr()
print("read", flush=True)
sys.stdin.readline()
print(anonymous() - before, proportional() - share, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_processes_share_the_tables(tmp_path: Path) -> None:
    table_VH = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    save_file(
        {"model.embed_tokens.weight": table_VH, "model.norm.weight": torch.ones(WIDTH)},
        tmp_path / "model.safetensors",
    )
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        figures = []
        assert [_line(reader) for reader in readers] == ["read", "read"]
        for reader in readers:
            _say(reader)
            figures.append([int(number) for number in _line(reader).split()])
    finally:
        for reader in readers:
            reader.communicate()
    for own_mb, share_mb in figures:
        assert own_mb < 20, figures
        assert share_mb < 130, figures  # half of 190 MiB


def test_readout_rows(tmp_path: Path) -> None:
    table_VH = torch.randn(30, 8).bfloat16()
    save_file({"model.embed_tokens.weight": table_VH, "model.norm.weight": torch.ones(8)}, tmp_path / "a.safetensors")
    ids_D = torch.tensor([2, 5, 29])
    rows_DH = load_target_pieces(tmp_path).readout_rows(ids_D, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(rows_DH, table_VH[ids_D].float())


def _say(reader: subprocess.Popen[str]) -> None:
    assert reader.stdin is not None
    reader.stdin.write("\n")
    reader.stdin.flush()


def _line(reader: subprocess.Popen[str]) -> str:
    assert reader.stdout is not None
    return reader.stdout.readline().strip()
