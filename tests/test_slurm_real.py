"""Against a real SLURM of two node names on this machine: the chain, preemption, the time limit, a lost node, arrays.

The nodes share one address, so where they meet is tested by torch's own reckoning in test_slurm_scripts.py.
"""

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

from eyas.heads.files import read_json, write_json
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
            "epochs": 20,
            "batch_tokens": 128,
            "ttt_steps": 2,
            "learning_rate": 1e-3,
            "precision": "fp32",
            "evaluate_every": 200,
            "checkpoint_every": 50,
            "log_every": 5,
        },
        "tracking": {"trackers": ["wandb"], "mode": "offline"},
        "score": {
            "draft_lengths": [2, 1],
            "batch_sizes": [1],
            "starts_per_arm": 1,
            "min_requests": 2,
            "max_tokens": 8,
            "humaneval_requests": 0,
            "dtype": "float32",
            "max_model_len": 256,
            "kv_cache_gib": 1,
            "time_split": False,
            "lossless": {"requests": 0, "max_tokens": 16},
        },
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


def wait_for_words(run_dir: Path, words: str, *, seconds: float = 120) -> None:
    """Until a job's log has `words`."""
    deadline = time.monotonic() + seconds
    while words not in logs(run_dir):
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


def begin(
    cluster: Cluster, inputs: Path, undisturbed: Path, name: str, *words: str, **changes: Any
) -> tuple[Path, str]:
    """Submit the training of another run of the same recipe; returns its directory and job."""
    run_dir = inputs / name
    for stage in ("collect", "prepare", "features"):
        shutil.copytree(undisturbed / stage, run_dir / stage)
    recipe = write_recipe(inputs, name, **changes)
    return run_dir, submit(cluster, inputs, recipe, "--stage", "train", *words)["train"]


def test_the_chain_leaves_a_head_and_says_how_it_went(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    assert (undisturbed / "export" / "model.safetensors").is_file()
    jobs = read_json(undisturbed / "slurm" / "jobs.json")["jobs"]
    assert [job["dependency"] for job in jobs] == [None, *(f"afterok:{job['job']}" for job in jobs[:-1])]
    said = eyas(cluster, inputs, "slurm", "status", str(undisturbed))
    assert said.count("COMPLETED") == 6  # two of them tasks of the array
    assert "train      stands" in said
    assert "2 nodes x 1" in (undisturbed / "slurm" / f"train-{jobs[3]['job']}.out").read_text()
    assert read_json(undisturbed / "train" / "manifest.json")["counts"]["steps"] > 200


def test_signalled_and_then_a_node_lost_it_ends_with_the_same_bits(
    cluster: Cluster, inputs: Path, undisturbed: Path
) -> None:
    run_dir, job = begin(cluster, inputs, undisturbed, "disturbed")
    wait_for_step(run_dir, 50)
    refused = eyas(cluster, inputs, "slurm", "submit", str(inputs / "disturbed.yaml"), "--stage", "train", code=2)
    assert f"is held by job {job} (RUNNING)" in refused
    cluster.command("scancel", "--batch", "--signal=USR2", job)
    wait_for_words(run_dir, "; requeued")
    stopped = read_json(run_dir / "train.partial" / "REQUEUE")["step"]
    wait_for_step(run_dir, 10 * (stopped // 10) + 20)
    for pid in _processes_of(job, node="n2"):
        os.kill(pid, signal.SIGKILL)
    assert cluster.wait(job, seconds=120) == "FAILED"
    assert "eyas: training ended with status" in logs(run_dir)
    assert eyas(cluster, inputs, "slurm", "retry", str(run_dir)).startswith(f"{job}: runs again")
    finish(cluster, job, run_dir)
    assert cluster.fields(job)["Restarts"] == "2", logs(run_dir)
    assert weights(run_dir) == weights(undisturbed)
    last, whole = (_last_step(each / "train" / "metrics.jsonl") for each in (run_dir, undisturbed))
    assert last == whole
    offline = [path.name.rpartition("-")[2] for path in (run_dir / "train" / "wandb").glob("offline-run-*")]
    assert len(offline) >= 3
    assert len(set(offline)) == 1


def _last_step(path: Path) -> tuple[int, int, float]:
    record = [record for record in read_metrics(path) if "tokens" in record][-1]
    return record["step"], record["tokens"], record["loss"]


def test_the_time_limit_in_an_epoch_is_a_pause(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    """SLURM looks at time limits every 30 s: until it has, the training is held still, in the middle of an epoch."""
    run_dir, job = begin(cluster, inputs, undisturbed, "limited")
    wait_for_step(run_dir, 50)
    pids = _processes_of(job, node="n1") + _processes_of(job, node="n2")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_for_words(run_dir, "asked to stop")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_for_words(run_dir, "; requeued")
    cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=10")  # the next life may end
    finish(cluster, job, run_dir)
    assert cluster.fields(job)["Restarts"] == "1", logs(run_dir)
    assert weights(run_dir) == weights(undisturbed)


def test_preempted_it_is_requeued_and_cancelled_it_is_not(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    """Preemption as SLURM does it by default: the processes get TERM, the script hears nothing."""
    run_dir, job = begin(cluster, inputs, undisturbed, "preempted")
    waits = cluster.command("sbatch", "--parsable", f"--dependency=afterok:{job}", "--wrap=true").strip()
    wait_for_step(run_dir, 50)
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", f"--output={inputs}/urgent.out", "--wrap=true")
    first = cluster.command("sbatch", "--parsable", *urgent).strip()
    wait_for_words(run_dir, "; requeued")
    assert "asked to stop" not in logs(run_dir)
    assert cluster.wait(first, seconds=60) == "COMPLETED"
    stopped = read_json(run_dir / "train.partial" / "REQUEUE")["step"]
    wait_for_step(run_dir, 10 * (stopped // 10) + 20)
    cluster.command("scancel", job)
    wait_for_words(run_dir, "; not requeued")
    assert cluster.wait(job, seconds=60) == "CANCELLED"
    assert cluster.fields(job)["Restarts"] == "1"
    assert cluster.fields(waits)["JobState"] in ("PENDING", "CANCELLED"), "what waits for it does not begin"
    cluster.command("scancel", waits)


def test_deepspeed_trains_on_two_nodes(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    site = yaml.safe_load((inputs / "site.yaml").read_text())
    site["environment"] |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"}
    (inputs / "deepspeed-site.yaml").write_text(yaml.safe_dump(site))
    launch = inputs / "zero2.json"
    shipped = read_json(Path(__file__).parent.parent / "recipes" / "deepspeed" / "zero2.json")
    own_log = {"enabled": True, "output_path": str(inputs / "csv"), "job_name": "zero"}
    write_json(launch, shipped | {"csv_monitor": own_log})
    short = {"epochs": 1, "batch_tokens": 128, "precision": "fp32", "evaluate_every": 100}
    words = ("--launch", str(launch), "--site", str(inputs / "deepspeed-site.yaml"))
    run_dir, job = begin(cluster, inputs, undisturbed, "sharded", *words, train=short)
    finish(cluster, job, run_dir)
    assert "train: running in 2 processes" in logs(run_dir)
    assert (run_dir / "train" / "head" / "model.safetensors").is_file()
    assert list((inputs / "csv" / "zero").glob("*.csv")), "DeepSpeed keeps its own log"


@pytest.mark.engine
def test_arms_are_measured_by_tasks_of_an_array(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    pytest.importorskip("vllm")
    job = submit(cluster, inputs, inputs / "undisturbed.yaml", "--stage", "score")["score"]
    finish(cluster, job, undisturbed)
    for task, arm in enumerate(("k2", "k1")):
        results = read_json(undisturbed / f"score-{arm}" / "results.json")
        assert set(results["starts"]) == {"ar", arm}
        assert (
            f"eyas score --only --arm-number {task}" in (undisturbed / "slurm" / f"score-{job}_{task}.out").read_text()
        )


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
    """Its tasks train side by side on one machine, in two processes each: neither meets the other's."""
    site = yaml.safe_load((inputs / "site.yaml").read_text())
    site["environment"] |= {"EYAS_PROCESSES": "2"}
    (inputs / "sweep-site.yaml").write_text(yaml.safe_dump(site))
    recipe = write_recipe(
        inputs,
        "swept",
        sweep={"train.learning_rate": [1e-3], "train.ttt_steps": [1, 2]},
        train={"epochs": 1, "batch_tokens": 256, "precision": "fp32", "evaluate_every": 100},
    )
    ids = submit(cluster, inputs, recipe, "--nodes", "1", "--site", str(inputs / "sweep-site.yaml"))
    assert list(ids) == ["prepare", "extract", "link", "train", "table"]
    finish(cluster, ids["table"], inputs / "swept")
    table = (inputs / "swept" / "sweep" / "sweep.md").read_text()
    assert table.count("not trained") == 0
    assert len([line for line in table.splitlines() if line.startswith("| ") and "---" not in line]) == 3
    assert logs(inputs / "swept").count("train: running in 2 processes") == 2
    runs = read_json(inputs / "swept" / "sweep" / "sweep.json")["runs"]
    assert [run["values"]["train.ttt_steps"] for run in runs] == [1, 2]
    assert (inputs / "swept" / "sweep" / "0" / "features").is_symlink()
