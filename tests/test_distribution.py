"""What is published: the source distribution, the wheel that is built from it, and that wheel installed on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from eyas.recipes.load import shipped_recipes

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("heads", "train", "eval", "recipes", "slurm")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCUMENTS = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "docs/guide.md", "mkdocs.yml")


def packaged_files() -> set[str]:
    """Every file of the rooms as it stands in the checkout."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the two distributions; built from a copy, so that no old file of the checkout gets in and no new one stays."""
    folder = tmp_path_factory.mktemp("built")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in names:
        if name and (ROOT / name).is_file() and not name.startswith("tests/typing/"):
            goal = folder / "source" / name
            goal.parent.mkdir(parents=True, exist_ok=True)
            goal.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel; what it requires is lent by this one, whose own eyas stays out of sight."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(next(built.glob("*.whl")))]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True, capture_output=True)
    # A path that is added by a .pth file has its own .pth files left alone, and one of them is the editable eyas.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return environment / "bin"


def run_installed(command: list[str], *, where: Path) -> str:
    """Output of a command that is run outside the checkout, with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"EYAS_CACHE": str(where / "cache"), "HF_HOME": str(where / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_source_distribution_has_the_packages_and_the_documents(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    assert path.name == f"eyas-{PROJECT['version']}.tar.gz"
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert packaged_files() | set(DOCUMENTS) <= names
    assert not {name for name in names if name.startswith("tests")}, "a part of the tests is of no use"


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(built: Path) -> None:
    (path,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(path).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == {f"eyas/{name}" for name in packaged_files()}
    assert f"eyas-{PROJECT['version']}.dist-info/licenses/LICENSE" in names


def test_the_installed_command_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = run_installed(
        [str(installed / "python"), "-c", "import eyas.recipes.cli as cli; print(cli.__file__)"], where=tmp_path
    )
    assert where.startswith(str(installed.parent))
    eyas = str(installed / "eyas")
    assert run_installed([eyas, "--version"], where=tmp_path) == f"eyas {PROJECT['version']}\n"
    assert "score" in run_installed([eyas, "--help"], where=tmp_path)
    listed = run_installed([eyas, "recipes", "ls"], where=tmp_path).splitlines()
    assert {line.partition("\t")[0] for line in listed} == set(shipped_recipes())
    assert "sharegpt" in run_installed([eyas, "presets"], where=tmp_path)


def test_an_installed_recipe_is_planned_without_a_hub(installed: Path, tmp_path: Path) -> None:
    shown = run_installed(
        [str(installed / "eyas"), "plan", "llama-3.1-8b-eagle3", "--hardware", "h100"], where=tmp_path
    )
    assert "features disk:" in shown
    assert "1 x h100" in shown
