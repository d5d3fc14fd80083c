"""A schedule as files to serve with: schedule.json, speculative_config.json and the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.eval.cost.schedule import Schedule
from eyas.heads.files import write_json

SCHEDULE_FILE = "schedule.json"
CONFIG_FILE = "speculative_config.json"
SERVER_MODULE = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")
"""How to start a server of the CPU build, whose `vllm` command fails (facts/vllm.md)."""


def serve_command(
    target: str,
    *,
    speculative_config: Mapping[str, Any] | None,
    max_num_seqs: int,
    max_model_len: int,
    dtype: str,
    enforce_eager: bool,
    on_cpu: bool = False,
) -> list[str]:
    """The command, word by word, that serves as was measured; no speculative configuration is plain decoding."""
    words = [*(SERVER_MODULE if on_cpu else ("vllm", "serve")), target]
    words += ["--dtype", dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    words += ["--enforce-eager"] if enforce_eager else []
    if speculative_config is not None:
        words += ["--speculative-config", json.dumps(speculative_config)]
    return words


def write_schedule(
    directory: Path,
    schedule: Schedule,
    *,
    base: Mapping[str, Any],
    target: str,
    max_model_len: int,
    dtype: str,
    enforce_eager: bool,
    on_cpu: bool = False,
) -> dict[str, Any]:
    """Write speculative_config.json and schedule.json (ranges, choices, command); returns what schedule.json holds.

    Where nothing pays, speculative_config.json still holds a valid configuration (k = 0 everywhere), but the command
    serves without a head: that is faster than a head that never drafts.

    Args:
        base: the `speculative_config` of any of the head's fixed draft lengths.
    """
    config = schedule.speculative_config(base)
    command = serve_command(
        target,
        speculative_config=config if schedule.pays else None,
        max_num_seqs=schedule.max_num_seqs,
        max_model_len=max_model_len,
        dtype=dtype,
        enforce_eager=enforce_eager,
        on_cpu=on_cpu,
    )
    content = schedule.to_json() | {
        "speculative_config": config,
        "serve_command": command,
        "serve_command_line": shlex.join(command),
    }
    write_json(directory / CONFIG_FILE, config)
    write_json(directory / SCHEDULE_FILE, content)
    return content
