"""A template filled in: its #SBATCH lines, the site's set-up, and the settings that by hand come from the environment."""

from __future__ import annotations

import importlib.resources
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eyas.slurm.site import Container, Resources

Template = Literal["train", "pipeline", "score-array"]

BEGIN, END = "# eyas: site\n", "# eyas: end of site\n"
_DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)(?:=(.*))?$")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job: its template, what it asks for, and what it is told.

    Attributes:
        name: of the job, as squeue shows it. output: file of its log, with SLURM's patterns.
        arguments: of the script. environment: settings of the script and of the site.
        array: such as "0-7%4". dependency: such as "afterok:123". chdir: where it runs.
        signal: sent to the script `signal_seconds` before the time limit.
        setup: commands of the shell that the site wants, run first; one that fails ends the job.
    """

    template: Template
    name: str
    resources: Resources
    output: str
    chdir: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()
    container: Container | None = None
    array: str | None = None
    dependency: str | None = None
    signal: str = "USR2"
    signal_seconds: int = 300


def template_text(name: Template) -> str:
    """A shipped template."""
    return (importlib.resources.files("eyas.slurm") / f"{name}.sbatch").read_text(encoding="utf-8")


def render(job: Job) -> str:
    """The script of a job, complete: it can be read, kept and submitted again.

    Raises:
        ValueError: a value cannot stand in an #SBATCH line, or the environment has a name that is none.
    """
    header, body = _split(template_text(job.template))
    directives = _directives(header) | _asked(job)
    lines = [
        f"#SBATCH --{name}{'' if value is None else f'={_quoted(name, value)}'}" for name, value in directives.items()
    ]
    comment = [line for line in header.splitlines() if not _DIRECTIVE.match(line)]
    top, rest = body.split(BEGIN)
    _, bottom = rest.split(END)
    return "\n".join([*comment, *lines]) + "\n" + top + BEGIN + _site_block(job) + END + bottom


def _split(text: str) -> tuple[str, str]:
    """The comment with the #SBATCH lines, and the script."""
    lines = text.splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if _DIRECTIVE.match(line.rstrip("\n")))
    return "".join(lines[: last + 1]), "".join(lines[last + 1 :])


def _directives(header: str) -> dict[str, str | None]:
    found = (_DIRECTIVE.match(line) for line in header.splitlines())
    return {match[1]: match[2] for match in found if match}


def _asked(job: Job) -> dict[str, str | None]:
    """Directives of the job; those that ask for nothing are left out."""
    wanted: dict[str, str | int | None] = {
        "job-name": job.name,
        "output": job.output,
        "chdir": job.chdir,
        "signal": f"B:{job.signal}@{job.signal_seconds}",
        "array": job.array,
        "dependency": job.dependency,
        "kill-on-invalid-dep": "no" if job.dependency else None,  # `eyas slurm retry` mends what the job waits for
        "partition": job.resources.partition,
        "account": job.resources.account,
        "qos": job.resources.qos,
        "constraint": job.resources.constraint,
        "reservation": job.resources.reservation,
        "nodes": job.resources.nodes,
        "gpus-per-node": job.resources.gpus_per_node or None,
        "cpus-per-task": job.resources.cpus_per_task,
        "mem": job.resources.mem,
        "time": job.resources.time,
    }
    return {name: str(value) for name, value in wanted.items() if value is not None}


def _quoted(name: str, value: str) -> str:
    """A value as sbatch reads it: blanks stand in double quotes, in which only a quote and a backslash need another."""
    if not value or not value.isprintable():
        raise ValueError(
            f"--{name}: {value!r} cannot stand in an #SBATCH line; it is empty or has characters without a shape"
        )
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _site_block(job: Job) -> str:
    for name in job.environment:
        if not _NAME.fullmatch(name):
            raise ValueError(f"environment: {name!r} is no name of a variable")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    options = job.container.srun_options(workdir=job.chdir) if job.container else []
    words = job.container.command(workdir=job.chdir) if job.container else []
    setup = [f"{line} || fail {shlex.quote(f'the site asks for this, and it failed: {line}')}" for line in job.setup]
    lines = [*setup, *exports, f"srun_options=({shlex.join(options)})", f"inside=({shlex.join(words)})"]
    # sbatch hands arguments on only where the script is submitted with them; in the file they survive a copy.
    return "\n".join([*lines, f"set -- {shlex.join(job.arguments)}"]) + "\n"
