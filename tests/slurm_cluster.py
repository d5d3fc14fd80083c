"""A private SLURM on this machine: two node names, plain daemons, loopback only, everything in one folder, ended by pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NODES = ("n1", "n2")
SPARE = "n3"
"""DOWN until a test starts it in place of a lost node."""
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
CONFIG = """\
ClusterName=eyas
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdSpoolDir={folder}/state/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
MinJobAge=600
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why no SLURM can be started here; None when one can."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root here"
    missing = [
        name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name, path=daemon_path()) is None
    ]
    return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)" if missing else None


def daemon_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Cluster:
    """A running SLURM. `environment` leads its commands to it."""

    folder: Path
    environment: Mapping[str, str]

    def command(self, *words: str) -> str:
        """Run one of SLURM's commands; returns what it said.

        Raises:
            RuntimeError: it failed.
        """
        result = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {result.stderr or result.stdout}")
        return result.stdout

    def fields(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of one job or array task."""
        line = self.command("scontrol", "show", "job", job, "-o").splitlines()[-1]
        return _fields(line)

    def wait(self, job: str, *, seconds: float) -> str:
        """The state in which a job, or every task of an array, ends. SLURM tells nobody, so it is asked."""
        deadline = time.monotonic() + seconds
        while True:
            lines = self.command("scontrol", "show", "job", job, "-o").splitlines()
            states = {_fields(line)["JobState"] for line in lines}
            if states <= set(FINISHED):
                return states.pop() if len(states) == 1 else ",".join(sorted(states))
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {states} after {seconds:g} s")
            time.sleep(0.2)

    def wait_until_pending(self, job: str, *, seconds: float = 60) -> None:
        """Until a requeued job waits."""
        deadline = time.monotonic() + seconds
        while self.fields(job)["JobState"] != "PENDING":
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {self.fields(job)}")
            time.sleep(0.1)

    def wait_until_requeued(self, job: str, *, seconds: float = 60) -> None:
        """Until a running job has been requeued, and the second in which it was is over.

        SLURM 22.05 revokes a life of a job by the second: where a node is set DOWN at once, the next life may begin within that
        second, is "already killed", and the job has FAILED. SLURM by itself takes longer to set a node DOWN.
        """
        deadline = time.monotonic() + seconds
        while self.fields(job)["JobState"] == "RUNNING":
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {self.fields(job)}")
            time.sleep(0.1)
        second = int(time.time())
        while int(time.time()) <= second:
            time.sleep(0.1)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node name."""
        self.command("slurmd", "-f", self.environment["SLURM_CONF"], "-N", node)

    def kill_node(self, node: str) -> None:
        """End the daemon of a node name as a power cut would."""
        pid_file = self.folder / "run" / f"slurmd.{node}.pid"
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        pid_file.unlink()  # another process may get the number

    def set_down(self, node: str) -> None:
        """What SLURM does itself when a node has not answered for long."""
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")


def _fields(line: str) -> dict[str, str]:
    """Words NAME=VALUE of a line of scontrol."""
    return {name: value for name, _, value in (word.partition("=") for word in line.split(" ") if "=" in word)}


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start the daemons, and end them with the block."""
    # Sockets need a short path whose folders everyone may enter, which pytest's are not.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    environment = None
    try:
        environment = _write_configuration(folder)
        yield _start(folder, environment)
    finally:
        _stop(folder, environment)
        shutil.rmtree(folder, ignore_errors=True)


def _write_configuration(folder: Path) -> dict[str, str]:
    for name in ("munge", "state", "log", "run", *(f"state/slurmd.{node}" for node in (*NODES, SPARE))):
        (folder / name).mkdir(parents=True)
    key = folder / "munge" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host, (port, *node_ports) = socket.gethostname().partition(".")[0], _free_ports(2 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=4 RealMemory=4096 "
        f"State={'DOWN' if node == SPARE else 'UNKNOWN'}"
        for node, node_port in zip((*NODES, SPARE), node_ports, strict=True)
    )
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, port=port, folder=folder, nodes=nodes))
    return dict(os.environ) | {"SLURM_CONF": str(config), "PATH": daemon_path()}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _start(folder: Path, environment: dict[str, str]) -> Cluster:
    munge = folder / "munge"
    names = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munged.seed",
    }
    found = Cluster(folder, environment)
    found.command("munged", *(f"--{option}={munge / name}" for option, name in names.items()))
    found.command("slurmctld", "-f", environment["SLURM_CONF"])
    for node in NODES:
        found.start_node(node)
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(RuntimeError):
            if set(found.command("sinfo", "-h", "-N", "-n", ",".join(NODES), "-o", "%T").split()) == {"idle"}:
                return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"SLURM did not come up: {(folder / 'log' / 'slurmctld.log').read_text()[-2000:]}")
        time.sleep(0.2)


def _stop(folder: Path, environment: Mapping[str, str] | None) -> None:
    """End the jobs that a failed test may have left, and every daemon that left a pid file, at last by force."""
    if environment is not None:
        _end_jobs(environment)
    pids = [
        int(path.read_text())
        for path in [*folder.glob("run/*.pid"), folder / "munge" / "munged.pid"]
        if path.is_file() and path.read_text().strip()
    ]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.1)
        pids = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if environment is not None:
        _kill_marked(environment, variable=b"")  # processes that hold a step, and would wait for the controller


def _end_jobs(environment: Mapping[str, str]) -> None:
    """Cancel every job, and kill what then still runs of one: processes that have the cluster's configuration."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["scancel", "--signal=KILL", "--full", "--user=root"]
        subprocess.run(words, env=environment, capture_output=True, timeout=10, check=False)
    _kill_marked(environment, variable=b"SLURM_JOB_ID=")


def _kill_marked(environment: Mapping[str, str], *, variable: bytes) -> None:
    """Kill every process that was started with the cluster's configuration and a variable that begins so."""
    mark = f"SLURM_CONF={environment['SLURM_CONF']}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            if mark in variables and any(each.startswith(variable) for each in variables):
                os.kill(int(path.parent.name), signal.SIGKILL)
