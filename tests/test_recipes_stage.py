"""The stage mechanism: skipping, staleness, resuming after a kill, locking, atomicity."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.files import write_json
from eyas.recipes.disk import require_free_bytes
from eyas.recipes.provenance import git_state, versions
from eyas.recipes.run_lock import run_lock
from eyas.recipes.stage import (
    MANIFEST,
    RECORD,
    Stage,
    output_fingerprint,
    read_manifest,
    refresh_files,
    run_stage,
    stage_status,
)


def write_result(work_dir: Path) -> dict[str, Any]:
    (work_dir / "sub").mkdir(exist_ok=True)
    (work_dir / "sub" / "result.txt").write_text("done")
    return {"rows": 1}


def must_not_run(_: Path) -> dict[str, Any]:
    raise AssertionError("the stage should have been skipped")


def make(body: Callable[[Path], dict[str, Any]] = write_result, *, setting: int = 0, source: str = "a") -> Stage:
    return Stage(name="prepare", settings={"setting": setting}, inputs={"source": source}, body=body)


def test_a_complete_stage_is_skipped(tmp_path: Path) -> None:
    assert stage_status(make(), run_dir=tmp_path) == "missing"
    assert run_stage(make(), run_dir=tmp_path)
    assert stage_status(make(), run_dir=tmp_path) == "complete"
    assert not run_stage(make(must_not_run), run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["prepare"]


def test_the_manifest_tells_where_the_files_come_from(tmp_path: Path) -> None:
    run_stage(make(setting=3), run_dir=tmp_path)
    manifest = read_manifest(tmp_path / "prepare")
    assert manifest["settings"] == {"setting": 3}
    assert manifest["inputs"] == {"source": "a"}
    assert manifest["counts"] == {"rows": 1}
    assert set(manifest["files"]) == {"sub/result.txt"}
    assert manifest["files"]["sub/result.txt"]["bytes"] == 4
    assert manifest["resumed"] is False
    assert {"versions", "argv", "git", "seconds", "finished_at"} <= set(manifest)
    assert not (tmp_path / "prepare" / RECORD).exists()


@pytest.mark.parametrize("changed", [{"setting": 1}, {"source": "b"}])
def test_changed_settings_or_inputs_replace_the_stage(tmp_path: Path, changed: dict[str, Any]) -> None:
    run_stage(make(), run_dir=tmp_path)
    (tmp_path / "prepare" / "old.txt").write_text("old")
    assert stage_status(make(**changed), run_dir=tmp_path) == "stale"
    assert run_stage(make(**changed), run_dir=tmp_path)
    assert not (tmp_path / "prepare" / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["prepare"]


def test_a_deleted_file_makes_the_stage_stale(tmp_path: Path) -> None:
    run_stage(make(), run_dir=tmp_path)
    (tmp_path / "prepare" / "sub" / "result.txt").unlink()
    assert stage_status(make(), run_dir=tmp_path) == "stale"
    assert run_stage(make(), run_dir=tmp_path)


def test_only_what_was_deleted_is_made_again(tmp_path: Path) -> None:
    """As a reader of a broken shard is told: delete that file and run the stage again."""
    made: list[str] = []

    def body(work_dir: Path) -> dict[str, Any]:
        for name in ("shard-0", "shard-1", "shard-2"):
            if not (work_dir / name).is_file():
                made.append(name)
                (work_dir / name).write_text(name)
        return {}

    run_stage(make(body), run_dir=tmp_path)
    (tmp_path / "prepare" / "shard-1").unlink()
    made.clear()
    assert run_stage(make(body), run_dir=tmp_path)
    assert made == ["shard-1"]
    assert stage_status(make(body), run_dir=tmp_path) == "complete"
    (tmp_path / "prepare" / "shard-1").unlink()
    made.clear()
    assert run_stage(make(body, setting=1), run_dir=tmp_path)
    assert made == ["shard-0", "shard-1", "shard-2"], "other settings share nothing"


def interrupted_after_half(work_dir: Path) -> dict[str, Any]:
    (work_dir / "half.txt").write_text("half")
    raise KeyboardInterrupt


def test_an_interrupted_stage_is_continued(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_stage(make(interrupted_after_half), run_dir=tmp_path)
    assert stage_status(make(), run_dir=tmp_path) == "partial"
    assert not (tmp_path / "prepare").exists()

    def finish(work_dir: Path) -> dict[str, Any]:
        return {"found": (work_dir / "half.txt").read_text()}

    run_stage(make(finish), run_dir=tmp_path)
    assert read_manifest(tmp_path / "prepare")["counts"] == {"found": "half"}
    assert read_manifest(tmp_path / "prepare")["resumed"] is True


def test_work_for_other_settings_is_not_continued(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_stage(make(interrupted_after_half), run_dir=tmp_path)
    run_stage(make(setting=1), run_dir=tmp_path)
    assert set(read_manifest(tmp_path / "prepare")["files"]) == {"sub/result.txt"}


def test_a_failure_before_any_work_leaves_nothing_and_keeps_the_old_stage(tmp_path: Path) -> None:
    def refuse(_: Path) -> dict[str, Any]:
        raise ValueError("bad input")

    run_stage(make(), run_dir=tmp_path)
    with pytest.raises(ValueError, match="bad input"):
        run_stage(make(refuse, setting=1), run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["prepare"]
    assert stage_status(make(), run_dir=tmp_path) == "complete"


def test_a_kill_between_manifest_and_rename_is_survived(tmp_path: Path) -> None:
    run_stage(make(), run_dir=tmp_path)
    stale = tmp_path / "prepare"
    stale.rename(tmp_path / "prepare.stale")
    new = make(setting=1)
    partial = tmp_path / "prepare.partial"
    partial.mkdir()
    write_json(partial / RECORD, {"fingerprint": new.fingerprint})
    write_json(partial / MANIFEST, {"fingerprint": new.fingerprint, "files": {}})
    run_stage(new, run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["prepare"]
    assert stage_status(new, run_dir=tmp_path) == "complete"


KILLED = """
import os, signal, sys
from pathlib import Path
from eyas.recipes.run_lock import run_lock
from eyas.recipes.stage import Stage, run_stage

def body(work_dir):
    (work_dir / "half.txt").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

run_dir = Path(sys.argv[1])
with run_lock(run_dir):
    run_stage(Stage(name="prepare", settings={"setting": 0}, inputs={"source": "a"}, body=body), run_dir=run_dir)
"""


def test_a_killed_process_leaves_a_stage_to_continue_and_no_lock(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    with run_lock(tmp_path):
        assert stage_status(make(), run_dir=tmp_path) == "partial"
        run_stage(make(), run_dir=tmp_path)
    assert set(read_manifest(tmp_path / "prepare")["files"]) == {"half.txt", "sub/result.txt"}


def test_output_fingerprint_follows_the_files_and_not_the_settings(tmp_path: Path) -> None:
    def fingerprint_of(folder: str, *, setting: int, text: str) -> str:
        def body(work_dir: Path) -> dict[str, Any]:
            (work_dir / "head").mkdir()
            (work_dir / "head" / "w").write_text(text)
            (work_dir / f"log-{setting}").write_text("log")
            return {}

        run_stage(make(body, setting=setting), run_dir=tmp_path / folder)
        return output_fingerprint(tmp_path / folder / "prepare", under="head/")

    first = fingerprint_of("a", setting=0, text="x")
    assert fingerprint_of("b", setting=1, text="x") == first
    assert fingerprint_of("c", setting=0, text="y") != first


def test_refresh_files_takes_in_a_rewritten_report(tmp_path: Path) -> None:
    run_stage(make(), run_dir=tmp_path)
    before = output_fingerprint(tmp_path / "prepare")
    (tmp_path / "prepare" / "sub" / "result.txt").write_text("again")
    refresh_files(tmp_path / "prepare")
    assert output_fingerprint(tmp_path / "prepare") != before
    assert stage_status(make(), run_dir=tmp_path) == "complete"


def test_too_little_disk_says_what_and_where(tmp_path: Path) -> None:
    require_free_bytes(tmp_path / "not" / "yet", needed=1, what="the feature store")
    with pytest.raises(ValueError, match=r"the feature store needs .* GiB in .*run_dir="):
        require_free_bytes(tmp_path / "not" / "yet", needed=1 << 60, what="the feature store")


def test_provenance_reads_without_importing() -> None:
    assert versions()["eyas"] is not None
    state = git_state()
    assert state is None or len(state["commit"]) == 40


def test_a_broken_manifest_is_reported(tmp_path: Path) -> None:
    run_stage(make(), run_dir=tmp_path)
    (tmp_path / "prepare" / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        run_stage(make(), run_dir=tmp_path)


def test_a_stage_that_stands_may_be_refreshed(tmp_path: Path) -> None:
    seen: list[Path] = []
    stage = replace(make(), refresh=seen.append)
    assert run_stage(stage, run_dir=tmp_path)
    assert seen == []
    assert not run_stage(stage, run_dir=tmp_path)
    assert seen == [tmp_path / "prepare"]


def test_an_unfinished_stage_that_is_precious_is_not_thrown_away(tmp_path: Path) -> None:
    def interrupted(work_dir: Path) -> dict[str, Any]:
        (work_dir / "checkpoints").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(replace(make(interrupted), precious="checkpoints"), run_dir=tmp_path)
    other = replace(make(setting=7, source="b"), precious="checkpoints")
    with pytest.raises(ValueError, match=r'inputs\.source was "a" and is "b"; setting was 0 and is 7\. Set them back'):
        run_stage(other, run_dir=tmp_path)
    assert (tmp_path / "prepare.partial" / "checkpoints").is_dir()
    assert run_stage(replace(make(), precious="checkpoints"), run_dir=tmp_path)


def test_an_unfinished_stage_of_other_settings_is_continued_where_the_stage_goes_on_from_it(tmp_path: Path) -> None:
    def interrupted(work_dir: Path) -> dict[str, Any]:
        (work_dir / "starts").mkdir()
        (work_dir / "starts" / "one.jsonl").write_text("hours of work")
        raise KeyboardInterrupt

    seen: list[dict[str, Any]] = []

    def continues(*, earlier_settings: dict[str, Any], earlier_inputs: dict[str, str]) -> bool:
        seen.append({"settings": earlier_settings, "inputs": earlier_inputs})
        return True

    def body(work_dir: Path) -> dict[str, Any]:
        return {"found": (work_dir / "starts" / "one.jsonl").read_text()}

    first = make(interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stage(first, run_dir=tmp_path)
    longer = replace(make(body, setting=7), continues=continues, precious="starts/*.jsonl")
    assert run_stage(longer, run_dir=tmp_path)
    assert seen == [{"settings": first.settings, "inputs": first.inputs}]
    manifest = read_manifest(tmp_path / "prepare")
    assert manifest["counts"] == {"found": "hours of work"}
    assert (manifest["resumed"], manifest["settings"]) == (True, longer.settings)
