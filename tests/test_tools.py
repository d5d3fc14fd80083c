"""The tools that keep the tree clean are the same versions from the dev extra and from pre-commit."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SHARED = {"ruff", "codespell"}


def test_pre_commit_runs_the_versions_of_the_dev_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = map(Requirement, project["optional-dependencies"]["dev"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    pinned = [Requirement(text) for hook in hooks for text in hook["additional_dependencies"]]
    versions = {each.name: str(each.specifier) for each in extra if each.name in SHARED}
    assert {each.name: str(each.specifier) for each in pinned if each.name in SHARED} == versions
    assert versions.keys() == SHARED
