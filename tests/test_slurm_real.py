"""Against a real SLURM of two node names on this machine: the chain, preemption, the time limit, lost nodes, arrays.

The nodes share one address, so where they meet is tested by torch's own reckoning in test_slurm_scripts.py.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.files import read_json, write_json
from eyas.train.tracking import read_metrics
from tests import slurm_cluster, slurm_jobs
from tests.slurm_cluster import SPARE, Cluster
from tests.slurm_jobs import (
    eyas,
    finish,
    held_still,
    last_step,
    processes_of,
    said,
    signal_all,
    step_daemons,
    submit,
    until_said,
    wait_for_step,
    weights,
    write_recipe,
    write_site,
)
from tests.wandb_offline import offline_runs

EPOCHS = 12
"""Of the training, as tests/slurm_jobs.py writes it."""

pytestmark = [pytest.mark.slurm, pytest.mark.processes]

if slurm_cluster.why_not() is not None:
    pytest.skip(str(slurm_cluster.why_not()), allow_module_level=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.cluster() as found:
        yield found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all files, with a name that scripts have to quote."""
    return slurm_jobs.write_inputs(tmp_path_factory.mktemp('it\'s a "disk" #1 $HOME '))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, inputs: Path) -> Path:
    """The recipe as a chain of jobs that nothing disturbs; its run directory."""
    recipe = write_recipe(inputs, "undisturbed")
    ids = submit(cluster, inputs, recipe, "--extract-tasks", "2")
    assert list(ids) == ["prepare", "extract", "seal", "train", "export", "score"]
    cluster.command("scontrol", "hold", ids["score"])  # it needs vLLM; one of the tests lets it go
    finish(cluster, ids["export"], inputs / "undisturbed")
    return inputs / "undisturbed"


def begin(
    cluster: Cluster, inputs: Path, undisturbed: Path, name: str, *words: str, **changes: Any
) -> tuple[Path, dict[str, str]]:
    """Submit the training of another run of the same recipe; returns its directory and jobs."""
    run_dir = inputs / name
    for stage in ("collect", "prepare", "features"):
        shutil.copytree(undisturbed / stage, run_dir / stage)
    recipe = write_recipe(inputs, name, **changes)
    return run_dir, submit(cluster, inputs, recipe, "--stage", "train", *words)


def test_the_chain_leaves_a_head_and_says_how_it_went(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    assert (undisturbed / "export" / "model.safetensors").is_file()
    jobs = read_json(undisturbed / "slurm" / "jobs.json")["jobs"]
    assert [job["dependency"] for job in jobs] == [None, *(f"afterok:{job['job']}" for job in jobs[:-1])]
    status = eyas(cluster, inputs, "slurm", "status", str(undisturbed))
    assert status.count("COMPLETED") == 6  # two of them tasks of the array
    assert status.count("score: PENDING") == 1
    assert "train      stands" in status
    assert "2 nodes x 1" in (undisturbed / "slurm" / f"train-{jobs[3]['job']}.out").read_text()
    assert read_json(undisturbed / "train" / "manifest.json")["counts"]["steps"] > 150


def test_whatever_stops_it_it_ends_with_the_same_bits(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    """One training, stopped in every way, wherever it is: seldom at the end of an epoch."""
    run_dir, ids = begin(cluster, inputs, undisturbed, "disturbed")
    preempted(cluster, inputs, run_dir, ids["train"])
    cancelled(cluster, run_dir, ids["train"])
    job = submit(cluster, inputs, inputs / "disturbed.yaml", "--stage", "train")["train"]
    signalled(cluster, inputs, run_dir, job)
    out_of_time(cluster, run_dir, job)
    processes_killed(cluster, inputs, run_dir, job)
    node_set_down(cluster, run_dir, job)
    node_lost(cluster, run_dir, job)
    finish(cluster, job, run_dir)
    node_found(cluster)
    assert cluster.fields(job)["Restarts"] == "5", said(run_dir)
    assert weights(run_dir) == weights(undisturbed)
    last, whole = (_last_record(each / "train" / "metrics.jsonl") for each in (run_dir, undisturbed))
    assert last == whole
    identities = [path.name.rpartition("-")[2] for path in offline_runs(run_dir / "train")]
    assert len(identities) >= 7
    assert len(set(identities)) == 1, "one run in wandb"
    saved = {int(step) for step in re.findall(r"saved at step (\d+)", said(run_dir))}
    steps = read_json(run_dir / "train" / "manifest.json")["counts"]["steps"]
    assert any(step * EPOCHS % steps for step in saved), f"in the middle of an epoch: {saved} of {steps} steps"


def _last_record(path: Path) -> tuple[int, int, float]:
    record = [record for record in read_metrics(path) if "tokens" in record][-1]
    return record["step"], record["tokens"], record["loss"]


def wait_for_steps(run_dir: Path) -> None:
    """Until the training has gone on from where it stood when nothing ran."""
    wait_for_step(run_dir, last_step(run_dir) + 1)


def preempted(cluster: Cluster, inputs: Path, run_dir: Path, job: str) -> None:
    """As SLURM does it by default: the processes get TERM, the script hears nothing."""
    wait_for_steps(run_dir)
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", f"--output={inputs}/urgent.out", "--wrap=true")
    with until_said(run_dir, "; requeued"), held_still(job):
        first = cluster.command("sbatch", "--parsable", *urgent).strip()
    assert "asked to stop" not in said(run_dir)
    assert cluster.wait(first, seconds=60) == "COMPLETED"
    cluster.wait_until_pending(job)


def cancelled(cluster: Cluster, run_dir: Path, job: str) -> None:
    """It saves, is not requeued, and what waits for it does not begin. It was preempted before."""
    waits = cluster.command("sbatch", "--parsable", f"--dependency=afterok:{job}", "--wrap=true").strip()
    wait_for_steps(run_dir)
    with until_said(run_dir, "; not requeued"), held_still(job):
        cluster.command("scancel", job)
    assert cluster.wait(job, seconds=60) == "CANCELLED"
    assert cluster.fields(job)["Restarts"] == "1"
    assert cluster.fields(waits)["JobState"] in ("PENDING", "CANCELLED")
    cluster.command("scancel", waits)


def signalled(cluster: Cluster, inputs: Path, run_dir: Path, job: str) -> None:
    wait_for_steps(run_dir)
    with until_said(run_dir, "; requeued"), held_still(job):
        refused = eyas(cluster, inputs, "slurm", "submit", str(inputs / "disturbed.yaml"), "--stage", "train", code=2)
        assert f"is held by job {job} (RUNNING)" in refused
        cluster.command("scancel", "--batch", "--signal=USR2", job)
    cluster.wait_until_pending(job)


def out_of_time(cluster: Cluster, run_dir: Path, job: str) -> None:
    """SLURM looks at time limits every 30 s: until it has, the training is held still."""
    wait_for_steps(run_dir)
    with until_said(run_dir, "; requeued"), held_still(job), until_said(run_dir, "asked to stop"):
        minutes, seconds = (int(part) for part in cluster.fields(job)["RunTime"].split(":")[1:])
        limit = minutes + (1 if seconds < 25 else 2)
        cluster.command("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    cluster.wait_until_pending(job)
    cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # the next lives may end


def processes_killed(cluster: Cluster, inputs: Path, run_dir: Path, job: str) -> None:
    """Those of one node, which itself is well: the job fails, and is run again."""
    wait_for_steps(run_dir)
    signal_all(processes_of(job, node="n2"), signal.SIGKILL)
    assert cluster.wait(job, seconds=120) == "FAILED"
    assert "eyas: training ended with status" in said(run_dir)
    assert eyas(cluster, inputs, "slurm", "retry", str(run_dir)).startswith(f"{job}: runs again")
    cluster.wait_until_pending(job)


def node_set_down(cluster: Cluster, run_dir: Path, job: str) -> None:
    """As SLURM itself sets a node that no longer answers: it requeues the job."""
    wait_for_steps(run_dir)
    with held_still(job):
        cluster.set_down("n2")
    cluster.wait_until_pending(job)


def node_lost(cluster: Cluster, run_dir: Path, job: str) -> None:
    """The processes on the other node fail before SLURM has noticed anything: the script finds it out, and requeues.

    SLURM's own process for the step outlives the others, without which srun would wait for it for a minute and a half. Another
    node takes the place of the lost one: SLURM still has orders for that, such as to end the life that it was lost in.
    """
    wait_for_steps(run_dir)
    pids = processes_of(job, node="n2")
    daemons = step_daemons(pids)
    try:
        with until_said(run_dir, "eyas: a node was lost; requeued"):
            cluster.kill_node("n2")
            signal_all(pids, signal.SIGKILL)
        cluster.wait_until_requeued(job)
    finally:
        signal_all(daemons, signal.SIGKILL)
        cluster.set_down("n2")
    cluster.wait_until_pending(job)
    cluster.start_node(SPARE)


def node_found(cluster: Cluster) -> None:
    """The lost node comes back, and the one in its place goes."""
    cluster.kill_node(SPARE)
    cluster.set_down(SPARE)
    cluster.start_node("n2")


def test_deepspeed_trains_on_two_nodes_and_goes_on_where_it_was(
    cluster: Cluster, inputs: Path, undisturbed: Path
) -> None:
    site = write_site(inputs, "deepspeed", environment={"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"})
    launch = inputs / "zero2.json"
    shipped = read_json(Path(__file__).parent.parent / "recipes" / "deepspeed" / "zero2.json")
    own_log = {"enabled": True, "output_path": str(inputs / "csv"), "job_name": "zero"}
    write_json(launch, shipped | {"csv_monitor": own_log})
    short = {"epochs": 3, "batch_tokens": 256, "precision": "fp32", "evaluate_every": 100, "log_every": 1}
    words = ("--launch", str(launch), "--site", site)
    run_dir, ids = begin(cluster, inputs, undisturbed, "sharded", *words, train=short)
    wait_for_step(run_dir, 1)
    with until_said(run_dir, "; requeued"), held_still(ids["train"]):
        cluster.command("scancel", "--batch", "--signal=USR2", ids["train"])
    finish(cluster, ids["train"], run_dir)
    assert cluster.fields(ids["train"])["Restarts"] == "1"
    assert said(run_dir).count("train: running in 2 processes") == 2
    assert (run_dir / "train" / "head" / "model.safetensors").is_file()
    assert list((inputs / "csv" / "zero").glob("*.csv")), "DeepSpeed keeps its own log"


@pytest.mark.engine
def test_arms_are_measured_by_tasks_of_an_array(cluster: Cluster, undisturbed: Path) -> None:
    """The last job of the chain, which has waited for the export."""
    pytest.importorskip("vllm")
    job = read_json(undisturbed / "slurm" / "jobs.json")["jobs"][-1]["job"]
    cluster.command("scontrol", "release", job)
    finish(cluster, job, undisturbed)
    for task, arm in enumerate(("k2", "k1")):
        results = read_json(undisturbed / f"score-{arm}" / "results.json")
        assert set(results["starts"]) == {"ar", arm}
        log = (undisturbed / "slurm" / f"score-{job}_{task}.out").read_text()
        assert f"eyas score --only --arm-number {task}" in log


def test_a_task_that_failed_runs_again_alone_and_the_chain_goes_on(cluster: Cluster, inputs: Path) -> None:
    """The scripts as they are, with an `eyas` in the jobs that fails in task 1 until it may not."""
    programs, done, run_dir = inputs / "programs", inputs / "done", inputs / "failing"
    programs.mkdir()
    (programs / "eyas").write_text(
        '#!/bin/bash\ncd "$(dirname "$0")/.."\necho "$SLURM_ARRAY_TASK_ID $1" >> done\n'
        '[ "$SLURM_ARRAY_TASK_ID" != 1 ] || [ -f mended ]\n'
    )
    (programs / "eyas").chmod(0o755)
    site = write_site(inputs, "failing", setup=['export PATH="$PWD/programs:$PATH"'])
    recipe = write_recipe(inputs, "failing")
    stages = ("--stage", "extract", "--stage", "export", "--extract-tasks", "3")
    ids = submit(cluster, inputs, recipe, *stages, "--site", site)
    assert cluster.wait(ids["extract"], seconds=60) == "COMPLETED,FAILED"
    assert "FAILED" in eyas(cluster, inputs, "slurm", "status", str(run_dir))
    (inputs / "mended").touch()
    again = eyas(cluster, inputs, "slurm", "retry", str(run_dir))
    assert again.splitlines()[0] == f"{ids['extract']}_1: runs again"
    cluster.wait_until_pending(f"{ids['extract']}_1")
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
    recipe = str(write_recipe(inputs, "refused"))
    words = eyas(cluster, inputs, "slurm", "submit", recipe, "--partition", "nowhere else", code=2)
    assert "invalid partition specified: nowhere else" in words
    assert len(words.splitlines()) == 1
    assert not (inputs / "refused" / "slurm" / "jobs.json").exists()


def test_a_sweep_is_an_array_and_a_table(cluster: Cluster, inputs: Path, undisturbed: Path) -> None:
    """Its tasks train side by side on one machine, in two processes each: neither meets the other's, and one that is told to stop
    requeues itself and not the other."""
    words = ("--nodes", "1", "--site", write_site(inputs, "sweep", environment={"EYAS_PROCESSES": "2"}))
    sweep = {"train.learning_rate": [1e-3], "train.ttt_steps": [1, 2]}
    short = {"epochs": 3, "batch_tokens": 256, "precision": "fp32", "evaluate_every": 100, "log_every": 1}
    run_dir, ids = begin(cluster, inputs, undisturbed, "swept", *words, sweep=sweep, train=short)
    assert list(ids) == ["link", "train", "table"]
    wait_for_step(run_dir / "sweep" / "1", 1)
    task = cluster.fields(f"{ids['train']}_1")
    with until_said(run_dir, "; requeued"), held_still(task["JobId"], nodes=[task["NodeList"]]):
        cluster.command("scancel", "--batch", "--signal=USR2", f"{ids['train']}_1")
    finish(cluster, ids["table"], run_dir)
    table = (run_dir / "sweep" / "sweep.md").read_text()
    assert table.count("not trained") == 0
    assert len([line for line in table.splitlines() if line.startswith("| ") and "---" not in line]) == 3
    assert said(run_dir).count("train: running in 2 processes") == 3
    assert [cluster.fields(f"{ids['train']}_{number}")["Restarts"] for number in (0, 1)] == ["0", "1"]
    runs = read_json(run_dir / "sweep" / "sweep.json")["runs"]
    assert [run["values"]["train.ttt_steps"] for run in runs] == [1, 2]
    assert (run_dir / "sweep" / "0" / "features").is_symlink()
