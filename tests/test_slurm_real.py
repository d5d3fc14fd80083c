"""Against a real SLURM of two node names on this machine: the chain, preemption, the time limit, a lost node, arrays."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.heads.files import read_json
from eyas.train.tracking import read_metrics
from tests import slurm_cluster, tiny
from tests.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.processes]

if slurm_cluster.why_not() is not None:
    pytest.skip(str(slurm_cluster.why_not()), allow_module_level=True)

EYAS = str(Path(sys.executable).with_name("eyas"))
PROGRAMS = str(Path(sys.executable).parent)
ENOUGH_SECONDS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.cluster() as found:
        yield found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and conversations; jobs read and write below it."""
    folder = tmp_path_factory.mktemp("slurm")
    tiny.write_target(folder / "target")
    tiny.write_conversation_file(folder / "conversations.jsonl", train=48, heldout=4)
    site = {
        "shared_paths": [str(folder)],
        "cpus_per_task": 1,
        "signal_seconds": 30,
        "environment": {
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "EYAS_PROCESSES": "1",
        },
        "stages": {"train": {"nodes": 2}},
    }
    (folder / "site.yaml").write_text(yaml.safe_dump(site))
    return folder


def write_recipe(inputs: Path, name: str, **changes: Any) -> Path:
    """A recipe with a run directory of its own and enough steps to be interrupted in."""
    settings: dict[str, Any] = {
        "name": name,
        "run_dir": str(inputs / name),
        "target": {"model": str(inputs / "target")},
        "data": {"conversations": str(inputs / "conversations.jsonl"), "max_length": 64},
        "features": {"capture_layers": list(tiny.CAPTURE_LAYERS), "dtype": "float32", "batch_tokens": 512},
        "head": {"draft_vocab_size": 128},
        "train": {
            "epochs": 60,
            "batch_tokens": 128,
            "ttt_steps": 2,
            "learning_rate": 1e-3,
            "precision": "fp32",
            "evaluate_every": 200,
            "checkpoint_every": 100,
            "log_every": 5,
        },
        "tracking": {"trackers": ["wandb"], "mode": "offline"},
        "score": {"humaneval_requests": 0},
    }
    path = inputs / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


def eyas(cluster: Cluster, inputs: Path, *words: str, code: int = 0) -> str:
    """Run eyas where SLURM's commands lead to the cluster."""
    environment = dict(cluster.environment) | {
        "PATH": f"{PROGRAMS}:{cluster.environment['PATH']}",
        "EYAS_SLURM": str(inputs / "site.yaml"),
    }
    result = subprocess.run(
        [EYAS, *words], env=environment, cwd=inputs, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == code, result.stderr + result.stdout
    return result.stdout if code == 0 else result.stderr


def submit(cluster: Cluster, inputs: Path, recipe: Path, *words: str) -> dict[str, str]:
    """Submit; returns the jobs' ids by name."""
    said = eyas(cluster, inputs, "slurm", "submit", str(recipe), *words)
    return {
        line.partition(":")[0]: line.partition("job ")[2].partition(",")[0]
        for line in said.splitlines()
        if ": job " in line
    }


def logs(run_dir: Path) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted((run_dir / "slurm").glob("*.out"))
    )


def finish(cluster: Cluster, job: str, run_dir: Path, *, seconds: float = ENOUGH_SECONDS) -> None:
    state = cluster.wait(job, seconds=seconds)
    assert state == "COMPLETED", f"{job}: {state}\n{logs(run_dir)}"


def wait_for_step(run_dir: Path, step: int, *, seconds: float = 120) -> None:
    """Until the training has logged `step`; a job on another node says it nowhere else."""
    deadline = time.monotonic() + seconds
    path = run_dir / "train.partial" / "metrics.jsonl"
    while not path.is_file() or f'"step": {step},' not in path.read_text():
        assert time.monotonic() < deadline, logs(run_dir)
        time.sleep(0.1)


def weights(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "train" / "head" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, inputs: Path) -> Path:
    """The recipe as a chain of jobs that nothing disturbs; its run directory."""
    recipe = write_recipe(inputs, "undisturbed")
    stages = [word for stage in ("prepare", "extract", "train", "export") for word in ("--stage", stage)]
    ids = submit(cluster, inputs, recipe, *stages, "--extract-tasks", "2")
    assert list(ids) == ["prepare", "extract", "seal", "train", "export"]
    finish(cluster, ids["export"], inputs / "undisturbed")
    return inputs / "undisturbed"


def begin(cluster: Cluster, inputs: Path, undisturbed: Path, name: str, *words: str) -> tuple[Path, str]:
    """Submit the training of another run of the same recipe; returns its directory and job."""
    run_dir = inputs / name
    for stage in ("collect", "prepare", "features"):
        shutil.copytree(undisturbed / stage, run_dir / stage)
    return run_dir, submit(cluster, inputs, write_recipe(inputs, name), "--stage", "train", *words)["train"]


def test_the_chain_leaves_a_head_and_says_how_it_went(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    assert (undisturbed / "export" / "model.safetensors").is_file()
    jobs = read_json(undisturbed / "slurm" / "jobs.json")["jobs"]
    assert [job["dependency"] for job in jobs] == [None, *(f"afterok:{job['job']}" for job in jobs[:-1])]
    said = eyas(cluster, inputs, "slurm", "status", str(undisturbed))
    assert said.count("COMPLETED") == 6  # two of them tasks of the array
    assert "train      stands" in said
    assert "2 nodes x 1" in (undisturbed / "slurm" / f"train-{jobs[3]['job']}.out").read_text()
    assert read_json(undisturbed / "train" / "manifest.json")["counts"]["steps"] > 300


def test_a_signalled_job_is_requeued_and_ends_with_the_same_bits(
    cluster: Cluster, inputs: Path, undisturbed: Path
) -> None:
    run_dir, job = begin(cluster, inputs, undisturbed, "signalled")
    wait_for_step(run_dir, 150)
    refused = eyas(cluster, inputs, "slurm", "submit", str(inputs / "signalled.yaml"), "--stage", "train", code=2)
    assert f"is held by job {job} (RUNNING)" in refused
    cluster.command("scancel", "--batch", "--signal=USR2", job)
    finish(cluster, job, run_dir)
    assert cluster.fields(job)["Restarts"] == "1", logs(run_dir)
    assert weights(run_dir) == weights(undisturbed)
    last, whole = (read_metrics(each / "train" / "metrics.jsonl")[-1] for each in (run_dir, undisturbed))
    assert {key: last[key] for key in ("step", "tokens")} == {key: whole[key] for key in ("step", "tokens")}
    offline = [path.name.rpartition("-")[2] for path in (run_dir / "train" / "wandb").glob("offline-run-*")]
    assert len(offline) == 2
    assert len(set(offline)) == 1


def test_the_time_limit_in_an_epoch_is_a_pause(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    """SLURM looks at time limits every 30 s, so this takes a minute or two."""
    run_dir, job = begin(cluster, inputs, undisturbed, "limited")
    wait_for_step(run_dir, 20)
    cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    finish(cluster, job, run_dir)
    assert int(cluster.fields(job)["Restarts"]) >= 1, logs(run_dir)
    assert weights(run_dir) == weights(undisturbed)


def test_a_lost_node_ends_the_job_and_the_requeued_one_completes(
    cluster: Cluster, inputs: Path, undisturbed: Path
) -> None:
    run_dir, job = begin(cluster, inputs, undisturbed, "lost")
    wait_for_step(run_dir, 150)
    for pid in _processes_of(job, node="n2"):
        os.kill(pid, signal.SIGKILL)
    assert cluster.wait(job, seconds=120) == "FAILED"
    assert "eyas: training ended with status" in logs(run_dir)
    cluster.command("scontrol", "requeue", job)
    finish(cluster, job, run_dir)
    assert weights(run_dir) == weights(undisturbed)


def _processes_of(job: str, *, node: str) -> list[int]:
    """Processes of a job's step on one of the node names."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"SLURM_JOB_ID={job}".encode(), f"SLURMD_NODENAME={node}".encode(), b"SLURM_STEP_ID=0"} <= set(variables):
            found.append(int(path.parent.name))
    assert found
    return found


def test_a_task_that_failed_runs_again_alone_and_the_chain_goes_on(cluster: Cluster, inputs: Path) -> None:
    """The scripts as they are, with an `eyas` in the jobs that fails in task 1 until it may not."""
    programs, done, run_dir = inputs / "programs", inputs / "done", inputs / "failing"
    programs.mkdir()
    (programs / "eyas").write_text(
        f'#!/bin/bash\necho "$SLURM_ARRAY_TASK_ID $1" >> {done}\n[ "$SLURM_ARRAY_TASK_ID" != 1 ] || [ -f {inputs}/mended ]\n'
    )
    (programs / "eyas").chmod(0o755)
    site = yaml.safe_load((inputs / "site.yaml").read_text()) | {"setup": [f"export PATH={programs}:$PATH"]}
    (inputs / "failing-site.yaml").write_text(yaml.safe_dump(site))
    recipe = write_recipe(inputs, "failing")
    stages = ("--stage", "extract", "--stage", "export", "--extract-tasks", "3")
    ids = submit(cluster, inputs, recipe, *stages, "--site", str(inputs / "failing-site.yaml"))
    assert cluster.wait(ids["extract"], seconds=60) == "COMPLETED,FAILED"
    assert "FAILED" in eyas(cluster, inputs, "slurm", "status", str(run_dir))
    (inputs / "mended").touch()
    said = eyas(cluster, inputs, "slurm", "retry", str(run_dir))
    assert said.splitlines()[0] == f"{ids['extract']}_1: runs again"
    finish(cluster, ids["export"], run_dir, seconds=90)
    assert sorted(done.read_text().splitlines()) == [
        " export",
        " extract",
        "0 extract",
        "1 extract",
        "1 extract",
        "2 extract",
    ]


def test_sbatch_words_are_passed_on(cluster: Cluster, inputs: Path) -> None:
    said = eyas(
        cluster, inputs, "slurm", "submit", str(write_recipe(inputs, "refused")), "--partition", "nowhere", code=2
    )
    assert "invalid partition specified: nowhere" in said
    assert len(said.splitlines()) == 1
    assert not (inputs / "refused" / "slurm" / "jobs.json").exists()


def test_a_sweep_is_an_array_and_a_table(cluster: Cluster, inputs: Path) -> None:
    recipe = write_recipe(
        inputs,
        "swept",
        sweep={"train.learning_rate": [1e-3, 3e-3], "train.ttt_steps": [1, 2]},
        train={"epochs": 1, "batch_tokens": 256, "precision": "fp32", "evaluate_every": 100},
    )
    ids = submit(cluster, inputs, recipe, "--nodes", "1")
    assert list(ids) == ["prepare", "extract", "link", "train", "table"]
    finish(cluster, ids["table"], inputs / "swept")
    table = (inputs / "swept" / "sweep" / "sweep.md").read_text()
    assert table.count("not trained") == 0
    assert len([line for line in table.splitlines() if line.startswith("| ") and "---" not in line]) == 5
    runs = read_json(inputs / "swept" / "sweep" / "sweep.json")["runs"]
    assert [run["values"]["train.ttt_steps"] for run in runs] == [1, 2, 1, 2]
    assert len({run["heldout_tau"] for run in runs}) > 1
    assert (inputs / "swept" / "sweep" / "0" / "features").is_symlink()
