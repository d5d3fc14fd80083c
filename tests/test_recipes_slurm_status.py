"""`eyas slurm status` and `eyas slurm retry`: what a run's jobs did, and what of them is done again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from eyas.heads.files import read_json, write_json
from eyas.recipes import slurm_retry
from tests.slurm_runs import eyas, job_line, recipe_settings, shared_folder, slurm_says, stands, told

LATER = "2999-01-01T00:00:00+00:00"
"""After everything that a test submits."""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return shared_folder(tmp_path, monkeypatch)


def test_status_shows_stage_steps_rate_time_left_and_logs(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "train.epochs=4", "train.batch_tokens=1000", "--stage", "train")
    run = shared / "run"
    shutil.rmtree(run / "train")
    (run / "train.partial").mkdir()
    records = [
        {"step": 50, "epoch": 1.0, "tokens_per_second": 500.0},
        {"step": 50, "heldout/tau": 1.75},
    ]
    (run / "train.partial" / "metrics.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in records) + '{"step": 6'
    )
    write_json(run / "train.partial" / "REQUEUE", {"signal": "SIGUSR2", "step": 50, "time": "now"})
    slurm_says(shared, "101", job_line(101, "PENDING").replace("Reason=None", "Reason=BeginTime"))
    said = eyas("slurm", "status", str(run))
    assert "train      under way" in said
    # 150 of 200 steps are left, of 1000 tokens at 500 a second.
    assert "step 50 of about 200, epoch 1.00 of 4, 500 tokens/s, about 0:05:00 left, last held-out tau 1.750" in said
    assert "stopped at step 50 by SIGUSR2, to be continued" in said
    assert f"101 train: PENDING, BeginTime, on n1, 2 restarts; log {run}/slurm/train-101.out" in said
    assert "is no run directory" in eyas("slurm", "status", str(shared), code=2)


def test_status_of_what_is_done(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--stage", "score")
    run = shared / "run"
    stands(run / "train", LATER)
    stands(run / "score-k3", LATER)
    write_json(run / "train" / "heldout.json", {"heldout_tau": 1.9})
    record = {"step": 50, "epoch": 2.0, "tokens_per_second": 500.0, "heldout/tau": 1.75}
    (run / "train" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    said = eyas("slurm", "status", str(run))
    assert (
        "training: step 50, epoch 2.00 of 2, 500 tokens/s, last held-out tau 1.750, tau of the head kept 1.900" in said
    )
    assert f"arm k3: stands (12 s, 2999-01-01T00:00:00+00:00), {run}/score-k3" in said
    assert "arm ngram: not begun" in said
    assert "101 train: COMPLETED" in said  # SLURM has forgotten it, its result is there
    assert "102_0 score: COMPLETED" in said
    assert "102_1 score: SLURM has forgotten it and its result is not there" in said


def test_what_slurm_forgot_is_not_asked_about_again(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "FAILED"))
    assert "101 train: FAILED" in eyas("slurm", "status", str(shared / "run"))
    slurm_says(shared, "101")
    for _ in range(2):
        assert "101 train: FAILED" in eyas("slurm", "status", str(shared / "run"))
    assert told(shared).count("scontrol show job 101 -o") == 2


def test_status_reads_the_recipe_that_was_submitted_last(shared: Path) -> None:
    (shared / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe_settings(shared, name="older")))
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    assert eyas("slurm", "status", str(shared / "run")).startswith("tiny:")


def test_status_of_a_sweep(shared: Path) -> None:
    swept = recipe_settings(shared, sweep={"train.losses": [{"forward_kl": 1.0}, {"log_acceptance": 1.0}]})
    (shared / "tiny.yaml").write_text(yaml.safe_dump(swept))
    eyas("slurm", "submit", str(shared / "tiny.yaml"))
    stands(shared / "run" / "sweep" / "1" / "train", LATER)
    said = eyas("slurm", "status", str(shared / "run"))
    assert "sweep/0 losses=forward_kl=1.0: not begun" in said
    assert "sweep/1 losses=log_acceptance=1.0: stands" in said
    assert "table: not written yet" in said


def scored(shared: Path, *states: str, live: bool = True) -> Path:
    """A run whose scoring was submitted as job 102 after the export, with tasks in these states."""
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export", "--stage", "score")
    slurm_says(shared, "101", job_line(101, "COMPLETED", name="tiny-export"))
    lines = [
        job_line(110 + number, state, name="tiny-score", array=102, task=str(number))
        for number, state in enumerate(states)
    ]
    if live:
        slurm_says(shared, "102", *lines)
    return shared / "run"


def test_retry_requeues_the_task_that_failed(shared: Path) -> None:
    run = scored(shared, "COMPLETED", "NODE_FAIL", "RUNNING")
    assert eyas("slurm", "retry", str(run)).splitlines() == ["102_1: runs again"]
    assert [line for line in told(shared) if line.startswith("scontrol requeue")] == ["scontrol requeue 102_1"]


def test_what_slurm_forgot_is_submitted_again_for_the_tasks_that_failed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_retry, "requeue", refuse)
    run = scored(shared, live=False)
    (shared / "shims" / "jobs" / "accounted-102").write_text(
        "102_0|COMPLETED|n1|00:01:00|tiny-score\n102_1|FAILED|n1|00:01:00|tiny-score\n102_2|TIMEOUT|n2|01:00:00|tiny-score\n"
    )
    assert eyas("slurm", "retry", str(run)).splitlines() == ["103 score: submitted again for 102, tasks 1,2"]
    script = (run / "slurm" / "002-score.sbatch").read_text()
    assert "#SBATCH --array=1,2\n" in script
    assert "dependency" not in script.replace("kill-on-invalid-dep", "")
    # The newest job of each task decides: task 1 failed in the first and ran well in the second.
    slurm_says(shared, "103", *(job_line(120, "COMPLETED", name="tiny-score", array=103, task=task) for task in "12"))
    assert "no job of" in eyas("slurm", "retry", str(run), code=2)


def refuse(job: str) -> None:
    raise ValueError(f"scontrol did not requeue {job}: Invalid job id specified")


def test_a_task_run_again_alone_hides_no_other(shared: Path) -> None:
    run = scored(shared, "FAILED", "FAILED", "COMPLETED")
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "score", "--array", "0")
    slurm_says(shared, "103", job_line(130, "COMPLETED", name="tiny-score", array=103, task="0"))
    assert eyas("slurm", "retry", str(run)).splitlines() == ["102_1: runs again"]


def test_what_was_cancelled_stays_so(shared: Path) -> None:
    run = scored(shared, "COMPLETED", "CANCELLED", "COMPLETED")
    assert "cancelled, so left alone: 102_1" in eyas("slurm", "retry", str(run), code=2)


def test_jobs_that_wait_are_told_what_for(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "extract", "--stage", "train", "--extract-tasks", "4")
    run = shared / "run"
    tasks = [
        job_line(110, "COMPLETED", name="tiny-extract", array=101, task="0"),
        job_line(111, "FAILED", name="tiny-extract", array=101, task="1"),
        job_line(101, "PENDING", name="tiny-extract", array=101, task="2-3%1"),
    ]
    slurm_says(shared, "101", *tasks)
    slurm_says(shared, "102", job_line(102, "PENDING", name="tiny-seal"))
    slurm_says(shared, "103", job_line(103, "PENDING"))
    eyas("slurm", "retry", str(run))
    assert [line for line in told(shared) if line.startswith(("scontrol requeue", "scontrol update"))] == [
        "scontrol requeue 101_1",
        "scontrol update JobId=102 Dependency=afterok:101_1:101_2:101_3",
    ]


def test_a_table_is_written_again_after_its_runs(shared: Path) -> None:
    (shared / "tiny.yaml").write_text(yaml.safe_dump(recipe_settings(shared, sweep={"train.ttt_steps": [1, 2]})))
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    jobs = read_json(shared / "run" / "slurm" / "jobs.json")["jobs"]
    assert [(job["stage"], job["dependency"]) for job in jobs] == [
        ("link", None),
        ("train", "afterok:101"),
        ("table", "afterany:102"),
    ]
    slurm_says(shared, "101", job_line(101, "COMPLETED", name="tiny-link"))
    slurm_says(
        shared,
        "102",
        job_line(110, "COMPLETED", array=102, task="0"),
        job_line(111, "FAILED", array=102, task="1"),
    )
    slurm_says(shared, "103", job_line(103, "COMPLETED", name="tiny-table"))
    said = eyas("slurm", "retry", str(shared / "run"))
    assert said.splitlines() == ["102_1: runs again", "104 table: submitted again for 103"]
    assert "#SBATCH --dependency=afterany:102_1\n" in (shared / "run" / "slurm" / "003-table.sbatch").read_text()
