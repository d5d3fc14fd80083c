"""A schedule as files to serve with: schedule.json, speculative_config.json and the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.eval.cost.schedule import Schedule
from eyas.eval.serve_options import ServedEngine, engine_options, environment_to_serve
from eyas.heads.files import write_json

SCHEDULE_FILE = "schedule.json"
CONFIG_FILE = "speculative_config.json"
SERVER_MODULE = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")
"""How to start a server of the CPU build, whose `vllm` command fails."""


def serve_command(engine: ServedEngine, *, on_cpu: bool) -> list[str]:
    """The command, word by word, that serves as was measured; no speculative configuration is plain decoding."""
    program = SERVER_MODULE if on_cpu else ("vllm", "serve")
    return [*program, engine.target_dir, *engine_options(engine, on_cpu=on_cpu)]


def command_line(command: Sequence[str], *, environment: Mapping[str, str]) -> str:
    """One line for a shell: variables, then the command."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*variables, shlex.join(command)])


def write_schedule(
    directory: Path,
    schedule: Schedule,
    *,
    base: Mapping[str, Any],
    engine: ServedEngine,
    environment: Mapping[str, str],
    on_cpu: bool,
) -> dict[str, Any]:
    """Write speculative_config.json and schedule.json (ranges, choices, command); returns what schedule.json holds.

    Where nothing pays, speculative_config.json still holds a valid configuration (k = 0 everywhere), but the command
    serves without a head: that is faster than a head that never drafts.

    Args:
        base: the `speculative_config` of any of the head's fixed draft lengths.
        engine: as the grid ran it, without a speculative configuration.
        environment: of the grid's engines.
    """
    config = schedule.speculative_config(base)
    served = replace(engine, max_num_seqs=schedule.max_num_seqs, speculative_config=config if schedule.pays else None)
    command, variables = serve_command(served, on_cpu=on_cpu), environment_to_serve(environment, on_cpu=on_cpu)
    content = schedule.to_json() | {
        "speculative_config": config,
        "serve_environment": variables,
        "serve_command": command,
        "serve_command_line": command_line(command, environment=variables),
    }
    write_json(directory / CONFIG_FILE, config)
    write_json(directory / SCHEDULE_FILE, content)
    return content
