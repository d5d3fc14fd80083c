"""What a cluster wants to be told on every job: partition, account, modules, container. Kept in a file of the user.

    # ~/.config/eyas/slurm.yaml
    partition: gpu
    account: nlp
    gpus_per_node: 8
    cpus_per_task: 32
    time: "12:00:00"
    hardware: h100                 # as `eyas plan` calls it
    setup: [module load cuda/12.8, source /shared/eyas/bin/activate]
    environment: {NCCL_SOCKET_IFNAME: ib0}
    container: {kind: pyxis, image: /shared/eyas.sqsh, mounts: ["/shared:/shared"]}
    shared_paths: [/scratch]
    stages:
      prepare: {partition: cpu, time: "1:00:00"}
      train: {nodes: 2}

`setup` lines are commands of the shell: they run in the job as they stand, on the user's own behalf, and end it when they
fail. Everything else is quoted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Resources(_Closed):
    """What one job asks for. None leaves it to the template and to the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodes: int | None = Field(default=None, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=0)
    cpus_per_task: int | None = Field(default=None, ge=1)
    mem: str | None = None
    time: str | None = None

    def over(self, other: Resources) -> Resources:
        """These where they are given, and `other`'s where they are not."""
        return Resources.model_validate(other.model_dump() | self.model_dump(exclude_none=True))


class Container(_Closed):
    """Where eyas is installed, when that is an image: started by srun (pyxis) or by apptainer on the node.

    What runs inside begins in the job's own folder, which must be among the mounts. `mount_home` says whether the user's
    home is; None leaves that to the cluster.
    """

    kind: Literal["pyxis", "apptainer"]
    image: str = Field(min_length=1)
    mounts: tuple[str, ...] = Field(default=(), strict=False)
    mount_home: bool | None = None

    def srun_options(self, *, workdir: str) -> list[str]:
        """Options of srun."""
        if self.kind != "pyxis":
            return []
        mounts = [f"--container-mounts={','.join(self.mounts)}"] if self.mounts else []
        home = {None: [], True: ["--container-mount-home"], False: ["--no-container-mount-home"]}[self.mount_home]
        return [f"--container-image={self.image}", *mounts, *home, f"--container-workdir={workdir}"]

    def command(self, *, workdir: str) -> list[str]:
        """Words before the command that runs inside."""
        if self.kind != "apptainer":
            return []
        binds = [f"--bind={mount}" for mount in self.mounts]
        home = ["--no-home"] if self.mount_home is False else []
        return ["apptainer", "exec", "--nv", *home, *binds, f"--pwd={workdir}", self.image]


class Site(Resources):
    """The defaults of a cluster. `stages` has what single stages need instead."""

    setup: tuple[str, ...] = Field(default=(), strict=False)
    environment: dict[str, str] = Field(default_factory=dict)
    container: Container | None = None
    shared_paths: tuple[str, ...] = Field(default=(), strict=False)
    signal: Literal["USR1", "USR2"] = "USR2"
    signal_seconds: int = Field(default=300, ge=1)
    launch: str | None = None
    hardware: str | None = None
    stages: dict[Literal["prepare", "extract", "train", "export", "score", "report", "sweep"], Resources] = Field(
        default_factory=dict
    )

    def resources(self, stage: str) -> Resources:
        """What a job of `stage` asks for on this cluster."""
        general = Resources.model_validate({name: getattr(self, name) for name in Resources.model_fields})
        own = {str(name): resources for name, resources in self.stages.items()}
        return own.get(stage, Resources()).over(general)


def site_path() -> Path:
    """The user's site file: $EYAS_SLURM, or slurm.yaml in eyas's configuration folder."""
    named = os.environ.get("EYAS_SLURM")
    if named:
        return Path(named).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "eyas" / "slurm.yaml"


def read_site(path: Path | None = None) -> Site:
    """The site file at `path`, or the user's own; without one, nothing is asked for beyond the templates.

    Raises:
        ValueError: a named file is missing, or a file is no YAML or says what is not known; every error in one line.
    """
    found = path or site_path()
    if not found.is_file():
        if path is None and "EYAS_SLURM" not in os.environ:
            return Site()
        raise ValueError(f"the site file {found} does not exist; write one, or leave it out")
    try:
        values: Any = yaml.safe_load(found.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{found}: not valid YAML ({' '.join(str(error).split())})") from error
    try:
        return Site.model_validate(values)
    except ValidationError as error:
        lines = [_words(detail["loc"], detail["type"], detail["msg"]) for detail in error.errors(include_url=False)]
        raise ValueError(f"{found}: {'; '.join(lines)}") from error


def _words(place: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in place) or "the file"
    if kind == "extra_forbidden":
        names = sorted([*Site.model_fields] if len(place) == 1 else [*Resources.model_fields])
        return f"{key}: unknown key; known are {', '.join(names)}"
    return f"{key}: {message[0].lower()}{message[1:]}"
