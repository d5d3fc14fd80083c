"""Configs of well-known targets that come with the package, for plans without a hub, a licence accepted or weights."""

from __future__ import annotations

from pathlib import Path

from eyas.recipes.load import package_folder


def packaged_targets() -> dict[str, Path]:
    """Hub id -> directory with a copy of the config.json, and nothing else."""
    folder = package_folder() / "targets"
    return {path.parent.name.replace("--", "/"): path.parent for path in sorted(folder.glob("*/config.json"))}


def is_packaged(directory: Path) -> bool:
    """Whether a target's directory is one of these: it has sizes, and neither tokenizer nor weights."""
    return directory in packaged_targets().values()
