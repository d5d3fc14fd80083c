"""What wandb's own reader finds in offline runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def inspected(run: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records of an offline run; with `--summary` one that sums it up."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", *arguments, "--json", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    if "--summary" in arguments:
        return [json.loads(done.stdout)]
    return [json.loads(line) for line in done.stdout.splitlines()]


def offline_runs(run_dir: Path) -> list[Path]:
    """In the order of their starts, which may lie in the same second."""
    return sorted((run_dir / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)
