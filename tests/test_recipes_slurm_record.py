"""The record of a run's jobs: kept whole whoever writes it, asked of SLURM, and what holds a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.heads.files import read_json
from eyas.recipes import slurm_record, slurm_retry, slurm_submit
from eyas.recipes.run_lock import is_held, run_lock
from eyas.recipes.slurm_record import Entry, known_jobs, read_entries, submit_entry
from eyas.slurm.sbatch import JobState, job_states
from tests.slurm_runs import eyas, job_line, shared_folder, slurm_says, told


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return shared_folder(tmp_path, monkeypatch)


def test_cancel_ends_arrays_as_a_whole(shared: Path) -> None:
    """Tasks that wait behind a limit are one line of scontrol, which scancel does not read."""
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export", "--stage", "score", "--at-once", "1")
    slurm_says(shared, "101", job_line(101, "COMPLETED", name="tiny-export"))
    tasks = [job_line(102, "PENDING", name="tiny-score", array=102, task="1-2%1")]
    slurm_says(shared, "102", job_line(103, "RUNNING", name="tiny-score", array=102, task="0"), *tasks)
    assert eyas("slurm", "cancel", str(shared / "run")).splitlines() == ["cancelled 102"]
    assert told(shared)[-1] == "scancel 102"


def test_an_interrupt_leaves_no_job_that_nobody_knows(shared: Path) -> None:
    """Ctrl-C while sbatch has the job and has not said its number."""
    (shared / "shims" / "bin" / "sbatch").write_text("#!/bin/bash\nkill -INT $PPID\necho 7\n")
    assert "Traceback" not in eyas("slurm", "submit", str(shared / "tiny.yaml"), code=130)
    assert [job["job"] for job in read_json(shared / "run" / "slurm" / "jobs.json")["jobs"]] == ["7"]


def test_a_job_submitted_while_slurm_is_asked_stays_in_the_record(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "COMPLETED"))
    ask = slurm_record.job_states

    def slowly(job: str) -> list[JobState]:
        entry = Entry(stage="export", name="tiny-export", output="log")
        submit_entry(shared / "run", entry, script="#!/bin/bash\n")
        return ask(job)

    monkeypatch.setattr(slurm_record, "job_states", slowly)
    known_jobs(shared / "run")
    entries = read_entries(shared / "run")
    assert [(entry.job, entry.states) for entry in entries] == [("101", {"": "COMPLETED"}), ("102", {})]


def test_whoever_submits_is_alone_from_the_look_at_the_jobs_on(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    for module, name in ((slurm_submit, "check_not_held"), (slurm_retry, "known_jobs")):
        monkeypatch.setattr(
            module, name, lambda run_dir: held.append(is_held(run_dir / "slurm" / "submitting.lock")) or []
        )
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    eyas("slurm", "retry", str(shared / "run"), code=2)
    assert held == [True, True]
    assert not is_held(shared / "run" / "slurm" / "submitting.lock")


def test_a_mistyped_run_directory_has_no_jobs(shared: Path) -> None:
    for command in ("cancel", "retry"):
        said = eyas("slurm", command, str(shared / "rum"), code=2)
        assert f"no jobs were submitted for {shared / 'rum'}" in said


def test_a_live_job_holds_the_run_directory(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "RUNNING"))
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export", code=2)
    assert "is held by job 101 (RUNNING)" in said
    slurm_says(shared, "101", job_line(101, "COMPLETED"))
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export")


def test_where_slurm_cannot_be_asked_nothing_is_submitted(shared: Path) -> None:
    """A controller that is down has forgotten nothing: two jobs in one run directory would spoil it."""
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    scontrol = shared / "shims" / "bin" / "scontrol"
    scontrol.write_text("#!/bin/bash\necho 'Unable to contact slurm controller (connect failure)' >&2\nexit 1\n")
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", code=2)
    assert "the state of job 101 is not known: Unable to contact slurm controller" in said
    assert "is not known" in eyas("slurm", "status", str(shared / "run"))


def test_a_job_of_another_name_is_not_ours(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "RUNNING", name="somebody-elses"))
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")


def test_what_ended_well_is_not_asked_about_again(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "COMPLETED"))
    for _ in range(2):
        assert "101 train: COMPLETED" in eyas("slurm", "status", str(shared / "run"))
    assert told(shared).count("scontrol show job 101 -o") == 1


def test_jobs_of_another_cluster_are_asked_about_there(shared: Path) -> None:
    sbatch = shared / "shims" / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho '7;far'\n")
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--stage", "export")
    assert "#SBATCH --dependency=afterok:7\n" in (shared / "run" / "slurm" / "001-export.sbatch").read_text()
    slurm_says(shared, "7", job_line(7, "RUNNING"))
    assert "7;far train: RUNNING" in eyas("slurm", "status", str(shared / "run"))
    eyas("slurm", "cancel", str(shared / "run"))
    assert told(shared)[-1].startswith("scancel 7")
    assert told(shared)[-1].endswith("--clusters=far")
    assert "scontrol show job 7 -o --clusters=far" in told(shared)


def test_a_job_submitted_by_hand_holds_the_run_directory(shared: Path) -> None:
    (shared / "run" / ".lock").write_text("id 17 on n1, SLURM job 55")
    slurm_says(shared, "55", job_line(55, "RUNNING", name="by-hand"))
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), code=2)
    assert "is in use by another eyas process (id 17 on n1, SLURM job 55)" in said
    slurm_says(shared, "55", job_line(55, "FAILED", name="by-hand"))
    eyas("slurm", "submit", str(shared / "tiny.yaml"))


def test_a_process_without_slurm_holds_it_too(shared: Path) -> None:
    with run_lock(shared / "run"):
        assert "is in use by another eyas process (id" in eyas("slurm", "submit", str(shared / "tiny.yaml"), code=2)
    eyas("slurm", "submit", str(shared / "tiny.yaml"))


def test_states_of_an_array(shared: Path) -> None:
    lines = [
        job_line(9, "RUNNING", array=7, task="1"),
        job_line(7, "PENDING", array=7, task="2-5%1"),
    ]
    slurm_says(shared, "7", *lines)
    assert [(state.job, state.state, state.live) for state in job_states("7")] == [
        ("7_1", "RUNNING", True),
        ("7_2-5%1", "PENDING", True),
    ]
    assert [state.tasks for state in job_states("7")] == [["1"], ["2", "3", "4", "5"]]
    assert job_states("8") == []
