"""What a chain's scripts say beyond their templates, as it was looked at once: slurm_chain.txt.

A wanted change shows itself as the difference. `python -m tests.test_recipes_slurm_golden` writes the file anew.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from eyas.heads.files import write_text
from tests.slurm_runs import eyas, shared_folder

GOLDEN = Path(__file__).with_name("slurm_chain.txt")
SITE = {
    "partition": "gpu",
    "account": "nlp",
    "cpus_per_task": 16,
    "mem": "0",
    "time": "12:00:00",
    "setup": ["module load cuda/12.8", 'echo "on $HOSTNAME"'],
    "environment": {"NCCL_SOCKET_IFNAME": "ib0", "A_NAME": "it's one"},
    "container": {"kind": "pyxis", "image": "/images/eyas 1.sqsh", "mounts": ["/shared:/shared"], "mount_home": False},
    "stages": {"prepare": {"partition": "cpu", "time": "1:00:00"}, "score": {"constraint": "h100"}},
}


def filled_in(scripts: str) -> Iterator[str]:
    """Of every script its title, its directives and its site block."""
    inside = False
    for line in scripts.splitlines():
        inside = (inside or line == "# eyas: site") and line != "# eyas: end of site"
        if inside or line.startswith(("# ----", "#SBATCH ")):
            yield line


def chain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a dry run fills in for a whole chain on a cluster that wants much; the folder is called /shared."""
    shared = shared_folder(folder, monkeypatch)
    (shared / "site.yaml").write_text(yaml.safe_dump(SITE | {"shared_paths": [str(shared)]}))
    monkeypatch.chdir(shared)
    words = ["--nodes", "2", "--gpus-per-node", "8", "--extract-tasks", "4", "--dry-run"]
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "seed=7", *words)
    return re.sub(re.escape(str(shared)), "/shared", "\n".join(filled_in(said)) + "\n")


def test_a_chain_is_filled_in_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chain(tmp_path, monkeypatch) == GOLDEN.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        write_text(GOLDEN, chain(Path(name).resolve(), patch))
