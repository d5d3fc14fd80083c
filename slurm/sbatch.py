"""Talking to SLURM through its own commands: submit, ask, cancel. What they say is passed on word for word."""

from __future__ import annotations

import re
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


FORGOTTEN = "FORGOTTEN"
"""State of a job that neither the controller nor accounting knows."""


@dataclass(frozen=True)
class JobState:
    """A job, or a task of an array (several that wait are one), as SLURM knows it now.

    `job` is its id, with `;cluster` behind it where it was submitted to another cluster; so it is in all functions here.
    """

    job: str
    state: str
    reason: str = "None"
    nodes: str = "(null)"
    elapsed: str = ""
    restarts: int = 0
    name: str | None = None
    command: str | None = None

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def tasks(self) -> list[str]:
        """Numbers of the tasks it stands for; [""] for a job that is no array."""
        _, _, numbers = self.job.partition(";")[0].partition("_")
        return [str(number) for number in tasks_of(numbers)] if numbers else [""]


def tasks_of(array: str) -> list[int]:
    """Numbers of an array as sbatch writes it, such as "0-7:2,9%4".

    Raises:
        ValueError: it is no such text.
    """
    numbers: list[int] = []
    for part in array.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part)
        if match is None:
            raise ValueError(f"--array {array!r} names no tasks; write numbers and ranges, such as 3 or 0-7 or 0-7%4")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        numbers += range(first, last + 1, step)
    return numbers


def plain_id(job: str) -> str:
    """An id as dependencies name it: without its cluster."""
    return job.partition(";")[0]


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
    """Hand a script to sbatch; returns the job's id, and its cluster when sbatch names one. Ctrl-C does not reach sbatch.

    Raises:
        ValueError: sbatch refused, with its words.
    """
    result = _run(["sbatch", "--parsable", str(script)], own_session=True)
    if result.returncode != 0:
        raise ValueError(f"sbatch refused {script}: {_said(result)}")
    return result.stdout.strip()


ENDED_BADLY = frozenset(
    {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)


def requeue(job: str) -> None:
    """Run an ended job, or one task of an array, again.

    Raises:
        ValueError: scontrol refused, with its words.
    """
    result = _run(["scontrol", "requeue", plain_id(job), *_cluster(job)])
    if result.returncode != 0:
        raise ValueError(f"scontrol did not requeue {job}: {_said(result)}")


def wait_for_again(job: str, *, dependency: str) -> None:
    """Give a waiting job its dependency anew: SLURM gives up on one that failed once, even when the job before it is repeated.

    Raises:
        ValueError: scontrol refused, with its words.
    """
    result = _run(["scontrol", "update", f"JobId={plain_id(job)}", f"Dependency={dependency}", *_cluster(job)])
    if result.returncode != 0:
        raise ValueError(f"scontrol did not change job {job}: {_said(result)}")


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs.

    Raises:
        ValueError: scancel refused, with its words.
    """
    for cluster in dict.fromkeys(job.partition(";")[2] for job in jobs):
        there = [job for job in jobs if job.partition(";")[2] == cluster]
        result = _run(["scancel", *map(plain_id, there), *_cluster(there[0])])
        if result.returncode != 0:
            raise ValueError(f"scancel refused: {_said(result)}")


def job_states(job: str) -> list[JobState]:
    """The state of a job and of each task of an array; empty when the controller has forgotten it.

    Raises:
        ValueError: SLURM cannot be asked, which says nothing about the job.
    """
    result = _run(["scontrol", "show", "job", plain_id(job), "-o", *_cluster(job)])
    if result.returncode == 0:
        return [_state(line, job=job) for line in result.stdout.splitlines() if line.startswith("JobId=")]
    said = _said(result)
    if "Invalid job id" in said or said.endswith("not found"):
        return []
    raise ValueError(f"the state of job {job} is not known: {said}")


def accounted_states(job: str) -> list[JobState]:
    """What accounting has of a job that the controller forgot (after MinJobAge, five minutes by default), if there is any."""
    if shutil.which("sacct") is None:
        return []
    fields = "JobID,State,NodeList,Elapsed,JobName"
    result = _run(["sacct", "-j", plain_id(job), "-X", "-n", "-P", "-o", fields, *_cluster(job)])
    lines = [line.split("|") for line in result.stdout.splitlines()] if result.returncode == 0 else []
    return [
        JobState(
            job=re.sub(r"[\[\]]", "", number) + _suffix(job),
            state=state.split(" ")[0],  # "CANCELLED by 1000"
            nodes=nodes,
            elapsed=elapsed,
            name=name,
        )
        for number, state, nodes, elapsed, name in (line for line in lines if len(line) == 5)
        if state
    ]


def _cluster(job: str) -> list[str]:
    """Words that lead a command to the cluster of a job."""
    cluster = job.partition(";")[2]
    return [f"--clusters={cluster}"] if cluster else []


def _suffix(job: str) -> str:
    return "".join(job.partition(";")[1:])


def _state(line: str, *, job: str) -> JobState:
    """One line of `scontrol show job -o`: words NAME=VALUE; a value may hold blanks, of those read here only Command's does."""
    fields: dict[str, str] = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    command = re.search(r" Command=(.*?) WorkDir=", line)
    return JobState(
        job=(f"{array}_{task}" if array and task else fields["JobId"]) + _suffix(job),
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", "None"),
        nodes=fields.get("NodeList", "(null)"),
        elapsed=fields.get("RunTime", ""),
        restarts=int(fields.get("Restarts", "0")),
        name=fields.get("JobName"),
        command=command[1] if command else None,
    )


def _run(command: Sequence[str], *, own_session: bool = False) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            start_new_session=own_session,
        )
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
