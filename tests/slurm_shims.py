"""SLURM's commands as small scripts on PATH: what a job script and `eyas slurm` say to them is written down."""

from __future__ import annotations

import os
from pathlib import Path

SBATCH = """#!/bin/bash
echo "sbatch $*" >> "$SHIM_LOG"
if [ -n "${SHIM_REFUSAL:-}" ]; then echo "sbatch: error: $SHIM_REFUSAL" >&2; exit 1; fi
echo "$(( 100 + $(grep -c ^sbatch "$SHIM_LOG") ))"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$SHIM_LOG"
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node") echo "NodeName=$3 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=host Port=6818" ;;
  "show job") cat "$SHIM_JOBS/$3" 2>/dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; } ;;
  "requeue "*) : ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$SHIM_LOG"
[ -p "$SHIM_TOLD" ] && echo told > "$SHIM_TOLD"
exit 0
"""
SRUN = """#!/bin/bash
echo "srun $*" >> "$SHIM_LOG"
exec bash "$SHIM_STEP"
"""


def install(folder: Path) -> dict[str, str]:
    """Write the commands below `folder`; returns the environment in which they are found.

    SHIM_LOG is what they were told, SHIM_STEP the script that srun runs, SHIM_JOBS has a file per job for `scontrol show
    job`, SHIM_TOLD may be a named pipe that scancel writes to.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": SCANCEL, "srun": SRUN}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "jobs").mkdir()
    (folder / "log").touch()
    return dict(os.environ) | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SHIM_LOG": str(folder / "log"),
        "SHIM_STEP": str(folder / "step.sh"),
        "SHIM_JOBS": str(folder / "jobs"),
        "SHIM_TOLD": str(folder / "told"),
    }
