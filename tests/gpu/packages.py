"""Whether this Python has what the check needs, in the versions that eyas needs; exit code 2 and one line when not.

Run by check.sh before anything is imported.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

PACKAGES = ("torch", "transformers", "accelerate", "safetensors")
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def why_not() -> str | None:
    """What is missing or too old; None when nothing is."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whichever Python is tried
        return f"is Python {sys.version.split()[0]}, and 3.11 or later is needed"
    found = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        return f"has no {', '.join(missing)}"
    from packaging.requirements import Requirement  # transformers requires it

    old = [
        f"{requirement.name} {found[requirement.name]} (needed: {requirement.specifier})"
        for requirement in map(Requirement, _dependencies())
        if requirement.name in PACKAGES
        and not requirement.specifier.contains(found[requirement.name] or "", prereleases=True)
    ]
    return f"has {', '.join(old)}" if old else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dependencies() -> list[str]:
    import tomllib  # Python 3.11

    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        print(f"error: {sys.executable} {reason}; install that, or name another Python: PYTHON=...", file=sys.stderr)
        sys.exit(2)
