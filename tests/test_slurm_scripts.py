"""The job scripts: shellcheck, what a filled-in one says, and what the training script does with markers and signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyas.slurm.script import BEGIN, END, Job, Template, render, template_text
from eyas.slurm.site import Container, Resources
from tests import slurm_shims

TEMPLATES: tuple[Template, ...] = ("train", "pipeline", "score-array")
RECIPE = "/shared/my recipe.yaml"


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "template": "train",
        "name": "tiny-train",
        "resources": Resources(nodes=2, gpus_per_node=8, partition="gpu", time="2:00:00"),
        "output": "/shared/run/slurm/train-%j.out",
        "chdir": "/shared",
        "arguments": [RECIPE, "train.epochs=3", "$(touch /tmp/never)"],
    }
    return Job(**values | changes)


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.partition("=")[::2] for line in lines)


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed (apt-get install shellcheck)"
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_and_rendered_scripts_pass_shellcheck(name: Template, tmp_path: Path) -> None:
    script = tmp_path / "rendered.sbatch"
    container = Container(kind="apptainer", image="/shared/my image.sif", mounts=("/a b:/c",))
    script.write_text(render(job(template=name, container=container, setup=["module load cuda/12.8"])))
    subprocess.run(["shellcheck", "--shell=bash", "-"], input=template_text(name), text=True, check=True)
    # The argument that would be expanded by a careless script is only remarked upon.
    subprocess.run(["shellcheck", "--shell=bash", "--severity=warning", str(script)], check=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_a_script_that_sbatch_takes_as_it_is(name: Template) -> None:
    text = template_text(name)
    asked = directives(text)
    assert text.startswith("#!/usr/bin/env bash\n")
    assert asked["requeue"] == ""
    assert asked["open-mode"] == "append"
    assert asked["signal"] == "B:USR2@300"
    assert asked["ntasks-per-node"] == "1"
    assert text.count(BEGIN) == text.count(END) == 1


def test_the_templates_share_their_words() -> None:
    """Trap, array-aware name and site block are the same text in all three."""
    texts = [template_text(name) for name in TEMPLATES]
    for begin, end in [
        ("set -- ", "fail()"),
        ('if [ -n "${EYAS_SETUP', "fi\n"),
        ("on_signal() {", "trap on_signal USR1 USR2\n"),
        ("job=$SLURM_JOB_ID", "]"),
    ]:
        parts = {text[text.index(begin) : text.index(end, text.index(begin))] for text in texts}
        assert len(parts) == 1, parts


def test_a_rendered_script_says_what_was_asked() -> None:
    script = render(
        job(
            array="0-3%2",
            dependency="afterok:41",
            environment={"NCCL_SOCKET_IFNAME": "ib0"},
            setup=["module load cuda/12.8"],
            container=Container(kind="pyxis", image="/shared/eyas.sqsh", mounts=("/shared:/shared", "/data:/data")),
            signal="USR1",
            signal_seconds=120,
        )
    )
    assert directives(script) == {
        "job-name": "tiny-train",
        "nodes": "2",
        "ntasks-per-node": "1",
        "signal": "B:USR1@120",
        "requeue": "",
        "open-mode": "append",
        "output": "/shared/run/slurm/train-%j.out",
        "chdir": "/shared",
        "array": "0-3%2",
        "dependency": "afterok:41",
        "partition": "gpu",
        "gpus-per-node": "8",
        "time": "2:00:00",
    }
    block = script[script.index(BEGIN) + len(BEGIN) : script.index(END)]
    assert block.splitlines() == [
        "module load cuda/12.8",
        "export NCCL_SOCKET_IFNAME=ib0",
        "srun_options=(--container-image=/shared/eyas.sqsh --container-mounts=/shared:/shared,/data:/data --no-container-mount-home)",
        "inside=()",
        "set -- '/shared/my recipe.yaml' train.epochs=3 '$(touch /tmp/never)'",
    ]


def test_a_directive_that_sbatch_would_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--partition: 'gpu --uid=0' cannot stand in an #SBATCH line"):
        render(job(resources=Resources(partition="gpu --uid=0")))
    with pytest.raises(ValueError, match="environment: 'A B' is no name"):
        render(job(environment={"A B": "1"}))


class Trial:
    """The training script with SLURM's commands shimmed: what it does, given what its step does."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        (self.run_dir / "train.partial").mkdir(parents=True)
        self.environment = slurm_shims.install(folder) | {
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "4",
            "RUN_DIR": str(self.run_dir),
        }
        self.script = folder / "train.sbatch"
        self.script.write_text(
            render(job(arguments=[RECIPE], environment={"EYAS_RUN_DIR": str(self.run_dir)}, chdir=str(folder)))
        )

    def step(self, text: str) -> None:
        """What srun runs; it may leave a marker in $MARKER."""
        Path(self.environment["SHIM_STEP"]).write_text(f"MARKER=$RUN_DIR/train.partial/REQUEUE\n{text}")

    def start(self, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.script)],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, **variables: str) -> tuple[int, str]:
        with self.start(**variables) as process:
            said = process.communicate(timeout=60)[0]
        return process.returncode, said

    @property
    def log(self) -> list[str]:
        return Path(self.environment["SHIM_LOG"]).read_text().splitlines()

    @property
    def requeued(self) -> list[str]:
        return [line.removeprefix("scontrol requeue ") for line in self.log if line.startswith("scontrol requeue ")]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def marker(name: str | None, step: int) -> str:
    """A line of shell that leaves the marker."""
    return f"cat > $MARKER <<'M'\n{json.dumps({'signal': name, 'step': step}, indent=2)}\nM\n"


def test_the_launch_names_every_node_and_the_first_ones_address(trial: Trial) -> None:
    trial.step("exit 0")
    assert trial.run() == (
        0,
        f"eyas: job 41, restart 0, 2 nodes x 4, rendezvous 10.0.0.7:20041, {trial.run_dir}\neyas: training ended with status 0\n",
    )
    launched = next(line for line in trial.log if line.startswith("srun "))
    assert launched.startswith("srun --kill-on-bad-exit=1 --wait=60 --ntasks=2 --ntasks-per-node=1 bash -c ")
    everything = Path(trial.environment["SHIM_LOG"]).read_text()
    for part in (
        "--num_machines 2 --num_processes 8",
        "--rdzv_backend c10d",
        "--main_process_ip 10.0.0.7",
        "--main_process_port 20041",
    ):
        assert part in everything
    assert trial.requeued == []


@pytest.mark.parametrize("status", [0, 1, 3])
def test_without_a_marker_the_status_is_passed_on(trial: Trial, status: int) -> None:
    trial.step(f"exit {status}")
    assert trial.run()[0] == status
    assert trial.requeued == []


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "41"), ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "40_3")],
    ids=["job", "array task"],
)
def test_the_marker_requeues_whatever_the_status(trial: Trial, variables: dict[str, str], name: str) -> None:
    trial.step(marker("SIGUSR2", 17) + "exit 1")
    code, said = trial.run(**variables)
    assert (code, trial.requeued) == (0, [name]), said
    assert "saved at step 17; requeued" in said


def test_scancel_is_no_requeue(trial: Trial) -> None:
    trial.step(marker("SIGTERM", 17) + "exit 1")
    code, said = trial.run()
    assert (code, trial.requeued) == (0, [])
    assert "ended by scancel or preemption" in said


def test_restarts_without_a_step_in_between_end(trial: Trial) -> None:
    trial.step(marker("SIGUSR2", 17) + "exit 1")
    codes = [trial.run(EYAS_STALLED="2")[0] for _ in range(3)]
    assert codes == [0, 0, 1]
    assert trial.requeued == ["41", "41"]
    trial.step(marker("SIGUSR2", 18) + "exit 1")  # it came further: the count begins anew
    assert trial.run(EYAS_STALLED="2")[0] == 0


def test_a_signal_to_the_script_is_passed_on_until_the_step_ends(trial: Trial) -> None:
    """The first one comes while the processes are still importing and is lost on them; the second is taken."""
    told, ready = Path(trial.environment["SHIM_TOLD"]), trial.run_dir / "ready"
    os.mkfifo(told)
    os.mkfifo(ready)
    trial.step(f"echo up > {ready}; read -r < {told}; read -r < {told}; " + marker("SIGUSR2", 5) + "exit 1")
    with trial.start() as process:
        assert ready.read_text() == "up\n"
        os.kill(process.pid, signal.SIGUSR2)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert trial.log.count("scancel --signal=USR2 41.0") >= 2
    assert trial.requeued == ["41"]


def test_no_address_is_no_localhost(trial: Trial) -> None:
    trial.step("exit 0")
    scontrol = Path(trial.environment["PATH"].partition(":")[0]) / "scontrol"
    scontrol.write_text("#!/bin/bash\nexit 1\n")
    code, said = trial.run()
    assert code == 1
    assert "no address of the first node" in said
    assert not any(line.startswith("srun") for line in trial.log)


@pytest.mark.parametrize("name", TEMPLATES)
def test_by_hand_a_script_says_what_it_needs(name: Template, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.sbatch"
    script.write_text(template_text(name))
    for arguments in ([], ["run", "recipe"]):
        result = subprocess.run(["bash", str(script), *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 1
        assert "sbatch" in result.stderr
