"""Stages: directories that are complete or absent, and know what they were made from.

A stage is a function of its settings and of the fingerprints of its inputs. It works in `<name>.partial/`, which
records the fingerprint it works for, and becomes `<name>/` by one rename once `manifest.json` lies in it. So a kill at
any moment leaves either the old stage, or the new one, or a partial one that the same command continues.

What a stage hands on is the fingerprint of the *files* it made, not of its settings: a stage that is made again and
comes out different makes everything after it stale, and one that comes out the same does not.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from eyas.heads.differences import differences
from eyas.heads.files import LARGE_FILE_BYTES, fingerprint, fingerprint_file, read_json, sync_directory, write_json
from eyas.recipes.provenance import git_state, versions
from eyas.recipes.run_lock import LOCK, short_lock

SCHEMA_VERSION = 1
"""Part of every stage's fingerprint: raised when a change of code makes older directories unusable."""

MANIFEST = "manifest.json"
RECORD = ".stage.json"
"""In a partial directory: the fingerprint of the stage that works there."""

Status = Literal["complete", "stale", "partial", "missing"]


class Continues(Protocol):
    """Says whether a stage goes on from an unfinished one of other settings."""

    def __call__(self, *, earlier_settings: dict[str, Any], earlier_inputs: dict[str, str]) -> bool: ...


def _nothing(_counts: dict[str, Any]) -> list[str]:
    return []


def _leave(_directory: Path) -> None:
    """What most stages need when they stand."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a run.

    Attributes:
        name: of the directory it makes inside the run directory.
        settings: JSON values that change its result, and only those.
        inputs: what it reads, each with a fingerprint.
        body: fills the directory it is given and returns counts (JSON values). The directory may hold what an
            earlier, interrupted call of the same stage left there.
        describe: lines that tell a reader the outcome, from the counts.
        refresh: called with the directory of a stage that stands, before it is skipped.
        sample_above: files larger than this many bytes are identified by samples (`fingerprint_file`).
        precious: a pattern of what took long to make in an unfinished stage. It is not thrown away because settings changed.
        continues: whether an unfinished stage of other settings and inputs, given by keyword as `earlier_settings` and
            `earlier_inputs`, is one that this one goes on from: it then gets the directory as it is.
    """

    name: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    body: Callable[[Path], dict[str, Any]]
    describe: Callable[[dict[str, Any]], list[str]] = _nothing
    refresh: Callable[[Path], None] = _leave
    sample_above: int = LARGE_FILE_BYTES
    precious: str | None = None
    continues: Continues | None = None

    @property
    def fingerprint(self) -> str:
        """Identity of what this stage would make."""
        return fingerprint(
            {"stage": self.name, "schema": SCHEMA_VERSION, "settings": self.settings, "inputs": self.inputs}
        )


def stage_status(stage: Stage, *, run_dir: Path) -> Status:
    """What stands of `stage` in `run_dir`: complete, made from other settings or inputs, begun, or nothing."""
    final = run_dir / stage.name
    if _is_complete(final, expected=stage.fingerprint):
        return "complete"
    if _recorded_fingerprint(_partial(final)) == stage.fingerprint:
        return "partial"
    return "stale" if final.exists() else "missing"


def run_stage(stage: Stage, *, run_dir: Path) -> bool:
    """Make `run_dir/<name>`; return whether there was work to do.

    Raises:
        ValueError: an unfinished stage of other settings lies there, and is precious.
        Whatever the body raises. The partial directory then stays for the next attempt, unless it is empty.
    """
    final = run_dir / stage.name
    _remove(_stale(final))
    if _is_complete(final, expected=stage.fingerprint):
        _remove(_partial(final))
        stage.refresh(final)
        return False
    if (final / MANIFEST).is_file() and read_manifest(final)["fingerprint"] == stage.fingerprint:
        _reopen(final, stage=stage)
    resumed = _enter(_partial(final), stage=stage)
    start = time.monotonic()
    try:
        counts = stage.body(_partial(final))
    except BaseException:
        _remove_if_empty(_partial(final))
        raise
    assert not (_partial(final) / MANIFEST).exists(), f"stage {stage.name} wrote {MANIFEST} itself"
    manifest = _manifest(stage, directory=_partial(final), counts=counts)
    write_json(
        _partial(final) / MANIFEST, manifest | {"seconds": round(time.monotonic() - start, 3), "resumed": resumed}
    )
    _publish(final)
    return True


def without(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Settings that change a stage's result: all but `names`."""
    return {name: value for name, value in settings.items() if name not in names}


def partial_directory(stage: Stage, *, run_dir: Path) -> Path:
    """Where the unfinished files of `stage` lie."""
    return _partial(run_dir / stage.name)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Manifest of a complete stage directory."""
    return read_json(directory / MANIFEST)


def output_fingerprint(directory: Path, *, under: str = "") -> str:
    """Fingerprint of the files of a complete stage, or of those below its folder `under`: what a next stage reads."""
    files = read_manifest(directory)["files"]
    return fingerprint({name: entry["checksum"] for name, entry in files.items() if name.startswith(under)})


def refresh_files(directory: Path) -> None:
    """Bring the manifest of a stage up to date after a derived file in it (a report) was written again."""
    manifest = read_manifest(directory)
    write_json(directory / MANIFEST, manifest | {"files": _checksums(directory, sample_above=LARGE_FILE_BYTES)})


def begin_stage(stage: Stage, *, run_dir: Path) -> Path:
    """The directory in which several processes fill `stage` together; whoever comes first makes it.

    None of them publishes it: running the stage afterwards does, and finds their work done.

    Raises:
        ValueError: as `run_stage`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with short_lock(run_dir / f"{LOCK}-{stage.name}"):
        _enter(_partial(run_dir / stage.name), stage=stage)
    return _partial(run_dir / stage.name)


def _partial(final: Path) -> Path:
    return final.with_name(f"{final.name}.partial")


def _stale(final: Path) -> Path:
    return final.with_name(f"{final.name}.stale")


def _is_complete(directory: Path, *, expected: str) -> bool:
    """Whether the manifest matches and no file it lists was deleted."""
    if not (directory / MANIFEST).is_file():
        return False
    manifest = read_manifest(directory)
    return manifest["fingerprint"] == expected and all((directory / name).is_file() for name in manifest["files"])


def _recorded_fingerprint(partial: Path) -> str | None:
    return read_json(partial / RECORD)["fingerprint"] if (partial / RECORD).is_file() else None


def _enter(partial: Path, *, stage: Stage) -> bool:
    """Make `partial` ready for work; return whether work of an earlier attempt is in it."""
    if _recorded_fingerprint(partial) == stage.fingerprint:
        (partial / MANIFEST).unlink(missing_ok=True)  # killed between manifest and rename
        return True
    if _goes_on_from(partial, stage=stage):
        (partial / MANIFEST).unlink(missing_ok=True)
        write_json(partial / RECORD, _record(stage))
        return True
    if stage.precious is not None and any(partial.glob(stage.precious)):
        _refuse_other_settings(partial, stage=stage)
    _remove(partial)
    partial.mkdir(parents=True)
    write_json(partial / RECORD, _record(stage))
    return False


def _record(stage: Stage) -> dict[str, Any]:
    return {"fingerprint": stage.fingerprint, "settings": stage.settings, "inputs": stage.inputs}


def _goes_on_from(partial: Path, *, stage: Stage) -> bool:
    if stage.continues is None or not (partial / RECORD).is_file():
        return False
    record = read_json(partial / RECORD)
    return stage.continues(earlier_settings=record["settings"], earlier_inputs=record["inputs"])


def _refuse_other_settings(partial: Path, *, stage: Stage) -> None:
    record = read_json(partial / RECORD) if (partial / RECORD).is_file() else {}
    before = record.get("settings", {}) | {"inputs": record.get("inputs", {})}
    fields = differences(before, stage.settings | {"inputs": stage.inputs})
    raise ValueError(
        f"{partial} holds an unfinished {stage.name} stage of other settings: {fields}. Set them "
        f"back to continue it, remove {partial} to begin anew, or set "
        "run_dir=... to write elsewhere"
    )


def _reopen(final: Path, *, stage: Stage) -> None:
    """Make a stage of which files were deleted a partial one, so that only those are made again."""
    _remove(_partial(final))
    write_json(final / RECORD, _record(stage))  # first, so that a kill in between loses nothing
    final.rename(_partial(final))


def _publish(final: Path) -> None:
    """Rename the partial directory to `final`. A kill in between leaves a partial one that needs no more work."""
    sync_directory(_partial(final))
    if final.exists():
        final.rename(_stale(final))
    _partial(final).rename(final)
    sync_directory(final.parent)
    (final / RECORD).unlink()
    _remove(_stale(final))


def _remove(directory: Path) -> None:
    if directory.is_symlink():  # a combination of a sweep leaves what it shares to the others
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)


def _remove_if_empty(partial: Path) -> None:
    if {path.name for path in partial.iterdir()} <= {RECORD}:
        _remove(partial)


def _manifest(stage: Stage, *, directory: Path, counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "schema_version": SCHEMA_VERSION,
        "fingerprint": stage.fingerprint,
        "settings": stage.settings,
        "inputs": stage.inputs,
        "counts": counts,
        "files": _checksums(directory, sample_above=stage.sample_above),
        "versions": versions(),
        "argv": sys.argv,
        "git": git_state(),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _checksums(directory: Path, *, sample_above: int) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file below `directory`: sha256, of samples for large ones (`fingerprint_file`)."""
    own = {directory / MANIFEST, directory / RECORD}
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path not in own)
    return {
        path.relative_to(directory).as_posix(): {
            "bytes": path.stat().st_size,
            "checksum": fingerprint_file(path, sample_above=sample_above),
        }
        for path in paths
    }
