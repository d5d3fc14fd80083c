"""SLURM's commands as small scripts on PATH: what a job script and `eyas slurm` say to them is written down."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

SBATCH = """#!/bin/bash
echo "sbatch $*" >> "$SHIM_LOG"
if [ -n "${SHIM_REFUSAL:-}" ]; then echo "sbatch: error: $SHIM_REFUSAL" >&2; exit 1; fi
echo "$(( 100 + $(grep -c ^sbatch "$SHIM_LOG") ))"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$SHIM_LOG"
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node") for node in 1 2; do echo "NodeName=n$node Arch=x86_64 NodeAddr=10.0.0.$node NodeHostName=host Port=6818 State=${SHIM_NODES:-MIXED} X"; done ;;
  "show job") cat "$SHIM_JOBS/$3" 2>/dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; } ;;
  "requeue "*) : ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$SHIM_LOG"
[ -p "$SHIM_TOLD" ] && echo told > "$SHIM_TOLD"
exit 0
"""
SACCT = """#!/bin/bash
cat "$SHIM_JOBS/accounted-$2" 2>/dev/null || { echo "Slurm accounting storage is disabled" >&2; exit 1; }
"""
SRUN = """#!/bin/bash
echo "srun $*" >> "$SHIM_LOG"
if [ "${!#}" = true ]; then [ -z "${SHIM_LOST:-}" ] || { echo "srun: error: $SHIM_LOST" >&2; exit 233; }; exit 0; fi
printf '%s\\0' "$@" > "$SHIM_SRUN"
exec bash "$SHIM_STEP"
"""
ACCELERATE = f"""#!{sys.executable} -SE
import json, os, sys
print(json.dumps(dict(words=sys.argv[1:], environment=dict(os.environ))))
"""
SLEEP = """#!/bin/bash
exec /bin/sleep 0.1
"""
COMMANDS = {
    "sbatch": SBATCH,
    "scontrol": SCONTROL,
    "scancel": SCANCEL,
    "sacct": SACCT,
    "srun": SRUN,
    "accelerate": ACCELERATE,
    "sleep": SLEEP,
}


def install(folder: Path) -> dict[str, str]:
    """Write the commands below `folder`; returns the environment in which they are found.

    SHIM_LOG is what they were told, SHIM_STEP the script that srun runs, SHIM_SRUN the words of the last srun, SHIM_JOBS
    has a file per job for `scontrol show job`, SHIM_LOST (where set) are srun's words when a step only tries the nodes and fails,
    SHIM_NODES the state of both nodes, SHIM_TOLD may be a named pipe that scancel writes to.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, text in COMMANDS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "jobs").mkdir()
    (folder / "log").touch()
    return dict(os.environ) | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SHIM_LOG": str(folder / "log"),
        "SHIM_STEP": str(folder / "step.sh"),
        "SHIM_SRUN": str(folder / "srun"),
        "SHIM_JOBS": str(folder / "jobs"),
        "SHIM_TOLD": str(folder / "told"),
    }


def met(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Where torch's launcher would meet the other nodes: the real `accelerate launch`, as far as the launcher's start."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed import run

    found: list[dict[str, Any]] = []

    def say(arguments: Namespace) -> None:
        config, _, last = run.config_from_args(arguments)
        found.append(
            {
                "endpoint": config.rdzv_endpoint,
                "backend": config.rdzv_backend,
                "run_id": config.run_id,
                "is_host": config.rdzv_configs.get("is_host"),
                "local_addr": config.local_addr,
                "nodes": config.max_nodes,
                "processes": config.nproc_per_node,
                "words": list(last[-3:]),
            }
        )

    assert words[0] == "launch", words
    with patch.dict(os.environ, environment, clear=True), patch.object(run, "run", say):
        launch_command(launch_command_parser().parse_args(words[1:]))
    return found[0]
