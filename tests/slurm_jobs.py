"""Jobs of the private SLURM: where a tiny recipe and its files lie, submitting it, and what is seen of it from outside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from eyas.train.tracking import read_metrics
from tests import tiny
from tests.slurm_cluster import NODES, Cluster

EYAS = str(Path(sys.executable).with_name("eyas"))
PROGRAMS = str(Path(sys.executable).parent)
ENOUGH_SECONDS = 300


def write_inputs(folder: Path) -> Path:
    """A target, conversations, and a site file for two nodes that share the folder."""
    tiny.write_target(folder / "target")
    tiny.write_conversation_file(folder / "conversations.jsonl", train=48, heldout=4)
    site = {
        "shared_paths": [str(folder)],
        "cpus_per_task": 1,
        "signal_seconds": 55,
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


def write_site(inputs: Path, name: str, *, environment: dict[str, str] | None = None, **changes: Any) -> str:
    """Another site file beside the first, with changes; returns its path."""
    site = yaml.safe_load((inputs / "site.yaml").read_text()) | changes
    site["environment"] |= environment or {}
    path = inputs / f"{name}-site.yaml"
    path.write_text(yaml.safe_dump(site))
    return str(path)


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
            "epochs": 12,
            "batch_tokens": 128,
            "ttt_steps": 2,
            "learning_rate": 1e-3,
            "precision": "fp32",
            "evaluate_every": 100,
            "checkpoint_every": 20,
            "log_every": 2,
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
    lines = eyas(cluster, inputs, "slurm", "submit", str(recipe), *words).splitlines()
    return {line.partition(":")[0]: line.partition("job ")[2].partition(",")[0] for line in lines if ": job " in line}


def said(run_dir: Path) -> str:
    """All that the jobs of a run have written."""
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted((run_dir / "slurm").glob("*.out")))


def finish(cluster: Cluster, job: str, run_dir: Path, *, seconds: float = ENOUGH_SECONDS) -> None:
    state = cluster.wait(job, seconds=seconds)
    assert state == "COMPLETED", f"{job}: {state}\n{said(run_dir)}"


def last_step(run_dir: Path) -> int:
    """The last step that the training has logged; a job on another node says it nowhere else."""
    return max((record["step"] for record in read_metrics(run_dir / "train.partial" / "metrics.jsonl")), default=0)


def wait_for_step(run_dir: Path, step: int, *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while last_step(run_dir) < step:
        assert time.monotonic() < deadline, said(run_dir)
        time.sleep(0.05)


@contextmanager
def until_said(run_dir: Path, words: str, *, seconds: float = 120) -> Iterator[None]:
    """Leaves when the jobs' logs have `words` once more than at the beginning."""
    before = said(run_dir).count(words)
    yield
    deadline = time.monotonic() + seconds
    while said(run_dir).count(words) <= before:
        assert time.monotonic() < deadline, said(run_dir)
        time.sleep(0.1)


def weights(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "train" / "head" / "model.safetensors").read_bytes()).hexdigest()


def processes_of(job: str, *, node: str) -> list[int]:
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


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Signal processes, of which some may have ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def step_daemons(pids: list[int]) -> list[int]:
    """SLURM's own processes that started some of `pids`, one a node and step."""
    status = [_of_process(pid, "status") for pid in pids]
    parents = {int(line.split()[1]) for text in status for line in text.splitlines() if line.startswith("PPid:")}
    return [pid for pid in parents if _of_process(pid, "comm").strip() == "slurmstepd"]


def _of_process(pid: int, file: str) -> str:
    """A file of /proc; nothing of a process that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


@contextmanager
def held_still(job: str, *, nodes: Sequence[str] = NODES) -> Iterator[None]:
    """A job's processes stand still, so that a training does not end before it is disturbed."""
    pids = [pid for node in nodes for pid in processes_of(job, node=node)]
    signal_all(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(pids, signal.SIGCONT)
