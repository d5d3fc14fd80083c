"""Talking to SLURM through its own commands: submit, ask, cancel. What they say is passed on word for word."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIVE = frozenset(
    {
        "PENDING",
        "RUNNING",
        "REQUEUED",
        "CONFIGURING",
        "COMPLETING",
        "SUSPENDED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "RESIZING",
    }
)
"""States of a job that may still write into its run directory."""

TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class JobState:
    """A job, or a task of an array, as SLURM knows it now."""

    job: str
    state: str
    reason: str
    nodes: str
    elapsed: str
    restarts: int

    @property
    def live(self) -> bool:
        return self.state in LIVE


def require_slurm() -> None:
    """Refuse to go on where there is no SLURM.

    Raises:
        ValueError: sbatch is not on PATH.
    """
    if shutil.which("sbatch") is None:
        raise ValueError(
            "sbatch is not on PATH: this machine submits no SLURM jobs. Run this on a login node (`module load slurm`?); "
            "--dry-run shows the scripts anywhere"
        )


def submit(script: Path) -> str:
    """Hand a script to sbatch; returns the job's id.

    Raises:
        ValueError: sbatch refused, with its words.
    """
    result = _run(["sbatch", "--parsable", str(script)])
    if result.returncode != 0:
        raise ValueError(f"sbatch refused {script}: {_said(result)}")
    return result.stdout.strip().partition(";")[0]  # a cluster's name may follow


ENDED_BADLY = frozenset(
    {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)


def requeue(job: str) -> None:
    """Run an ended job, or one task of an array, again.

    Raises:
        ValueError: scontrol refused, with its words.
    """
    result = _run(["scontrol", "requeue", job])
    if result.returncode != 0:
        raise ValueError(f"scontrol did not requeue {job}: {_said(result)}")


def wait_for_again(job: str, *, dependency: str) -> None:
    """Give a waiting job its dependency anew: SLURM gives up on one that failed once, even when the job before it is repeated.

    Raises:
        ValueError: scontrol refused, with its words.
    """
    result = _run(["scontrol", "update", f"JobId={job}", f"Dependency={dependency}"])
    if result.returncode != 0:
        raise ValueError(f"scontrol did not change job {job}: {_said(result)}")


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs.

    Raises:
        ValueError: scancel refused, with its words.
    """
    result = _run(["scancel", *jobs])
    if result.returncode != 0:
        raise ValueError(f"scancel refused: {_said(result)}")


def job_states(job: str) -> list[JobState]:
    """The state of a job and of each task of an array; empty when SLURM has forgotten it."""
    result = _run(["scontrol", "show", "job", job, "-o"])
    if result.returncode != 0:
        return []
    return [_state(line) for line in result.stdout.splitlines() if line.startswith("JobId=")]


def _state(line: str) -> JobState:
    """One line of `scontrol show job -o`: words NAME=VALUE; a value may hold blanks, none of those read here does."""
    fields: dict[str, str] = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    return JobState(
        job=f"{array}_{task}" if array and task else fields["JobId"],
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", "None"),
        nodes=fields.get("NodeList", "(null)"),
        elapsed=fields.get("RunTime", ""),
        restarts=int(fields.get("Restarts", "0")),
    )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except FileNotFoundError as error:
        raise ValueError(f"{command[0]} is not on PATH: this machine has no SLURM commands") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{command[0]} did not answer within {TIMEOUT_SECONDS} s; is the controller up? (`scontrol ping`)"
        ) from error


def _said(result: subprocess.CompletedProcess[str]) -> str:
    words = (result.stderr.strip() or result.stdout.strip()).splitlines()
    return (
        " ".join(line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in words)
        or f"exit code {result.returncode}"
    )
