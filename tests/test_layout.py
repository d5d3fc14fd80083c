"""Guards of the house: packages, floors, sizes, and the type checker's view."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("heads", "train", "eval", "recipes", "slurm")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MAY_IMPORT = {
    "heads": {"heads"},
    "train": {"heads", "train"},
    "eval": {"heads", "eval"},
    "slurm": {"slurm"},
    "recipes": set(ROOMS),
}
ALSO = {"train/__main__.py": {"recipes"}, "eval/__main__.py": {"recipes"}}
MAX_FILE_LINES = 330
MAX_FUNCTION_LINES = 70
HEAVY = {"torch", "transformers", "accelerate", "vllm", "numpy", "matplotlib", "pydantic", "yaml"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative import"
            assert node.module is not None
            modules |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "eyas" else {node.module}
            )
    return modules


def test_pyproject_lists_every_package() -> None:
    found = {f"eyas.{room}" for room in ROOMS}
    found |= {f"eyas.{room}.{name}" for room in ROOMS for name in find_packages(str(ROOT / room))}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {f"eyas.{room}": room for room in ROOMS}


def test_every_folder_with_code_is_a_package() -> None:
    assert [relative(path.parent) for path in SOURCES if not (path.parent / "__init__.py").is_file()] == []


def test_ruff_bans_the_accidental_top_level_names() -> None:
    assert set(PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(ROOMS)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_floors(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    modules = imported_modules(path)
    assert not {name.partition(".")[0] for name in modules} & set(ROOMS), "import eyas.<room>, not the folder"
    rooms = {name.split(".")[1] for name in modules if name.startswith("eyas.")}
    assert rooms <= MAY_IMPORT[room] | ALSO.get(relative(path), set())


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_type_checker_links_point_at_the_rooms() -> None:
    links = ROOT / "tests" / "typing" / "eyas"
    assert {path.name for path in links.iterdir()} == set(ROOMS)
    for room in ROOMS:
        assert (links / room).is_symlink()
        assert (links / room).resolve() == ROOT / room


def test_command_line_imports_nothing_heavy() -> None:
    code = "import sys, eyas.recipes.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) & HEAVY == set()
