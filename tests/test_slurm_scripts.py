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
NODE_GONE = "Task launch for StepId=1.0 failed on node n2: Communication connection failure"
"""As srun 22.05 says it of a node whose daemon was killed."""


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
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


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
    """Traps, set-up, the count of restarts and the requeue are the same text in all three."""
    begin, end = "# eyas: common to the three scripts\n", "# eyas: end of common\n"
    texts = [template_text(name) for name in TEMPLATES]
    assert len({text[text.index(begin) : text.index(end)] for text in texts}) == 1
    ends = {name: template_text(name).partition('echo "eyas: job')[2] for name in TEMPLATES}
    assert ends["pipeline"] == ends["score-array"] != "", "what follows a stage is the same too"


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
        "kill-on-invalid-dep": "no",
        "partition": "gpu",
        "gpus-per-node": "8",
        "time": "2:00:00",
    }
    block = script[script.index(BEGIN) + len(BEGIN) : script.index(END)]
    assert block.splitlines() == [
        "module load cuda/12.8 || fail 'the site asks for this, and it failed: module load cuda/12.8'",
        "export NCCL_SOCKET_IFNAME=ib0",
        "srun_options=(--container-image=/shared/eyas.sqsh --container-mounts=/shared:/shared,/data:/data "
        "--container-workdir=/shared)",
        "inside=()",
        "set -- '/shared/my recipe.yaml' train.epochs=3 '$(touch /tmp/never)'",
    ]


def test_containers_begin_in_the_jobs_folder_and_have_the_home_that_is_asked_for() -> None:
    apptainer = Container(kind="apptainer", image="/i.sif", mounts=("/a:/b",), mount_home=False)
    words = ["apptainer", "exec", "--nv", "--no-home", "--bind=/a:/b", "--pwd=/shared", "/i.sif"]
    assert apptainer.command(workdir="/shared") == words
    assert apptainer.srun_options(workdir="/shared") == []
    for home, option in ((True, "--container-mount-home"), (False, "--no-container-mount-home")):
        pyxis = Container(kind="pyxis", image="i", mount_home=home)
        assert pyxis.srun_options(workdir="/w") == ["--container-image=i", option, "--container-workdir=/w"]
        assert pyxis.command(workdir="/w") == []


def test_a_directive_that_sbatch_would_split_is_quoted() -> None:
    """As sbatch 22.05 reads it; a run directory with such a name is tested against it in test_slurm_real.py."""
    asked = directives(render(job(chdir="""/a disk's/"b"\\c $HOME""", resources=Resources(partition="gpu --uid=0"))))
    assert asked["chdir"] == '"' + r"""/a disk's/\"b\"\\c $HOME""" + '"'
    assert asked["partition"] == '"gpu --uid=0"'
    with pytest.raises(ValueError, match=r"--partition: 'gpu.n' cannot stand in an #SBATCH line"):
        render(job(resources=Resources(partition="gpu\n")))
    with pytest.raises(ValueError, match="environment: 'A B' is no name"):
        render(job(environment={"A B": "1"}))


class Trial:
    """A script with SLURM's commands shimmed: what it does, given what its step does."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        (self.run_dir / "train.partial").mkdir(parents=True)
        self.environment = slurm_shims.install(folder) | {
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "4",
            "RUN_DIR": str(self.run_dir),
        }
        self.environment.pop("OMP_NUM_THREADS", None)
        self.script = folder / "job.sbatch"
        values = {"arguments": [RECIPE], "environment": {"EYAS_RUN_DIR": str(self.run_dir)}, "chdir": str(folder)}
        self.script.write_text(render(job(**values | changes)))

    def step(self, text: str) -> None:
        """What srun runs; it may leave a marker in $MARKER."""
        Path(self.environment["SHIM_STEP"]).write_text(f"MARKER=$RUN_DIR/train.partial/REQUEUE\n{text}")

    def slurm_says(self, words: str, *, of: str = "41") -> None:
        """What `scontrol show job` says of the job."""
        Path(self.environment["SHIM_JOBS"], of).write_text(f"JobId=41 JobName=x {words} Reason=None\n")

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

    @property
    def srun_words(self) -> list[str]:
        """The words of the last srun."""
        return Path(self.environment["SHIM_SRUN"]).read_text().split("\0")[:-1]

    def launches(self, **variables: str) -> list[dict[str, Any]]:
        """What the launcher of each node would do: the words of srun run as SLURM would run them on both nodes."""
        self.step("env -0 > $RUN_DIR/environment")
        assert self.run(**variables)[0] == 0
        words = self.srun_words[self.srun_words.index("bash") :]
        exported = [line.partition("=") for line in (self.run_dir / "environment").read_text().split("\0")]
        environment = {name: value for name, _, value in exported if name.startswith(("PET_", "SLURM_", "EYAS_"))}
        (self.folder / "bin" / "eyas").write_text('#!/bin/bash\nprintf \'{"alone": "%s"}\\n\' "$*"\n')
        (self.folder / "bin" / "eyas").chmod(0o755)
        found = []
        for number, node in enumerate(("n1", "n2")[: int(environment["SLURM_NNODES"])]):
            own = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": node}
            values = self.environment | environment | own
            said = subprocess.run(words, env=values, capture_output=True, text=True, check=False)
            assert said.returncode == 0, said.stderr
            heard = json.loads(said.stdout.splitlines()[-1])
            found.append(heard if "alone" in heard else slurm_shims.met(**heard))
        return found


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def marker(name: str | None, step: int) -> str:
    """A line of shell that leaves the marker."""
    return f"cat > $MARKER <<'M'\n{json.dumps({'signal': name, 'step': step}, indent=2)}\nM\n"


def test_every_node_meets_at_the_first_ones_address(trial: Trial) -> None:
    """By torch's own reckoning: neither localhost nor a name that would have to resolve."""
    first, second = trial.launches()
    assert first == {
        "endpoint": "10.0.0.1:20041",
        "backend": "c10d",
        "run_id": "41",
        "is_host": "1",
        "local_addr": "10.0.0.1",
        "nodes": 2,
        "processes": 4,
        "words": ["eyas.train", "--only", RECIPE],
    }
    assert second == first | {"is_host": "0", "local_addr": "10.0.0.2"}
    assert trial.srun_words[:4] == ["--kill-on-bad-exit=1", "--wait=60", "--ntasks=2", "--ntasks-per-node=1"]
    assert trial.requeued == []


@pytest.mark.parametrize("name", ["zero2", "ddp"])
def test_an_accelerate_file_meets_there_too(trial: Trial, name: str) -> None:
    """DeepSpeed's own launcher would log in to the other nodes by ssh; `same_network` would leave no place to meet at."""
    launch = Path(__file__).parent.parent / "recipes" / "accelerate" / f"{name}.yaml"
    assert "same_network: true" in launch.read_text()
    for found in trial.launches(EYAS_LAUNCH=str(launch)):
        assert (found["endpoint"], found["backend"], found["nodes"]) == ("10.0.0.1:20041", "c10d", 2)


def test_a_deepspeed_file_meets_there_too(trial: Trial) -> None:
    launch = trial.folder / "zero2.json"
    launch.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}))
    for found in trial.launches(EYAS_LAUNCH=str(launch)):
        assert (found["endpoint"], found["backend"], found["nodes"]) == ("10.0.0.1:20041", "c10d", 2)


def test_on_one_node_jobs_do_not_share_a_port(trial: Trial) -> None:
    (found,) = trial.launches(SLURM_NNODES="1")
    assert found["endpoint"] not in ("", "127.0.0.1:29500")
    assert found["processes"] == 4


def test_one_process_needs_no_launcher(trial: Trial) -> None:
    assert trial.launches(SLURM_NNODES="1", SLURM_GPUS_ON_NODE="1") == [{"alone": f"train --only {RECIPE}"}]


def test_gpus_that_nobody_asked_for_are_not_left_idle(trial: Trial) -> None:
    shim = trial.folder / "bin" / "nvidia-smi"
    shim.write_text("#!/bin/bash\nprintf 'GPU 0: A\\nGPU 1: A\\n'\n")
    shim.chmod(0o755)
    trial.step("exit 0")
    code, said = trial.run(SLURM_GPUS_ON_NODE="")
    assert code == 1
    assert "the job asked for none: sbatch --gpus-per-node=N" in said
    assert trial.run(SLURM_GPUS_ON_NODE="", EYAS_PROCESSES="1")[0] == 0


@pytest.mark.parametrize(("cpus", "threads"), [("32", "8"), ("2", "1"), (None, "1")])
def test_the_processes_of_a_node_share_its_cores(trial: Trial, cpus: str | None, threads: str) -> None:
    trial.step('echo "$OMP_NUM_THREADS ${SRUN_CPUS_PER_TASK:-none}" > $RUN_DIR/threads')
    assert trial.run(**({} if cpus is None else {"SLURM_CPUS_PER_TASK": cpus}))[0] == 0
    assert (trial.run_dir / "threads").read_text().split() == [threads, cpus or "none"]


@pytest.mark.parametrize("status", [0, 1, 3])
def test_without_a_marker_the_status_is_passed_on(trial: Trial, status: int) -> None:
    (trial.run_dir / "train.partial" / "REQUEUE").write_text("{}")  # of an earlier end: it says nothing about this one
    trial.step(f"exit {status}")
    assert trial.run()[0] == status
    assert trial.requeued == []


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "41"), ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "40_3")],
    ids=["job", "array task"],
)
@pytest.mark.parametrize("by", ["SIGUSR2", "SIGTERM", None])
def test_the_marker_requeues_whatever_the_status(
    trial: Trial, variables: dict[str, str], name: str, by: str | None
) -> None:
    """SIGTERM is what a preempted job's processes get, and None what those get that only heard of it."""
    trial.slurm_says("JobState=RUNNING PreemptTime=2026-11-30T14:00:00", of=name)
    trial.step(marker(by, 17) + "exit 1")
    code, said = trial.run(**variables)
    assert (code, trial.requeued) == (0, [name]), said
    assert "saved at step 17; requeued" in said


@pytest.mark.parametrize("by", ["SIGUSR2", "SIGTERM", None])
def test_scancel_is_no_requeue(trial: Trial, by: str | None) -> None:
    trial.slurm_says("JobState=CANCELLED PreemptTime=None")
    trial.step(marker(by, 17) + "exit 1")
    code, said = trial.run()
    assert (code, trial.requeued) == (1, [])
    assert "saved at step 17, and the job is CANCELLED; not requeued" in said


@pytest.mark.parametrize(
    ("state", "lost", "nodes", "code", "words"),
    [
        ("RUNNING", NODE_GONE, "MIXED", 0, "eyas: a node was lost; requeued"),
        ("RUNNING", "Unable to create step: timed out", "ALLOCATED*", 0, "eyas: a node was lost; requeued"),
        ("RUNNING", "Unable to create step: Node failure", "MIXED", 0, "eyas: a node was lost; requeued"),
        ("RUNNING", "", "MIXED", 1, "training ended with status 1"),
        ("RUNNING", "Unable to contact slurm controller (connect failure)", "MIXED", 1, "training ended with status 1"),
        ("RUNNING", "Unable to create step: Memory required by task is not available", "MIXED", 1, "Memory required"),
        ("CANCELLED", NODE_GONE, "MIXED", 1, "training ended with status 1"),
    ],
)
def test_a_failure_because_a_node_is_lost_is_requeued(
    trial: Trial, state: str, lost: str, nodes: str, code: int, words: str
) -> None:
    """The processes on the other nodes miss it before SLURM does. A step that fails for another reason is no lost node."""
    trial.slurm_says(f"JobState={state} PreemptTime=None")
    trial.step("exit 1")
    ended, said = trial.run(SHIM_LOST=lost, SHIM_NODES=nodes)
    assert (ended, trial.requeued) == (code, ["41"] if code == 0 else []), said
    assert words in said


def test_a_preemption_of_an_earlier_life_says_nothing_about_this_one(trial: Trial) -> None:
    trial.slurm_says("JobState=RUNNING StartTime=2026-11-30T14:05:00 PreemptTime=2026-11-30T14:00:00")
    trial.step("exit 1")
    assert trial.run()[0] == 1
    assert trial.requeued == []
    trial.slurm_says("JobState=RUNNING StartTime=2026-11-30T14:05:00 PreemptTime=2026-11-30T14:06:00")
    assert trial.run()[0] == 0
    assert trial.requeued == ["41"]


def test_preempted_before_the_first_step_is_requeued(trial: Trial) -> None:
    trial.slurm_says("JobState=RUNNING PreemptTime=2026-11-30T14:00:00")
    trial.step("exit 1")
    assert trial.run()[0] == 0
    assert trial.requeued == ["41"]


@pytest.mark.parametrize("grows", ["train.partial/metrics.jsonl", "features.partial/extract.log", ".work/rows.jsonl"])
def test_restarts_without_progress_end(trial: Trial, grows: str) -> None:
    """Whoever requeues it. Files that grow with every start are no progress; a checkpoint is."""
    (trial.run_dir / grows).parent.mkdir(exist_ok=True)
    trial.step(f"echo more >> $RUN_DIR/{grows}; exit 1")
    codes = [trial.run(EYAS_STALLED="2", SLURM_RESTART_COUNT=str(count)) for count in range(3)]
    assert ["restarted 2 times without progress" in said for _, said in codes] == [False, False, True]
    checkpoint = trial.run_dir / "train.partial" / "checkpoints" / "step-00000200" / "weights.safetensors"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert "without progress" not in trial.run(EYAS_STALLED="2", SLURM_RESTART_COUNT="3")[1]


def test_a_task_beside_others_ends_after_a_number_of_restarts(tmp_path: Path) -> None:
    """What its siblings leave in the shared run directory would hide that it makes nothing itself."""
    task = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "1"}
    trial = Trial(tmp_path, template="score-array")
    trial.step("touch $RUN_DIR/of-another-task-$SLURM_RESTART_COUNT.jsonl; exit 1")
    ends = [trial.run(EYAS_RESTARTS="2", SLURM_RESTART_COUNT=str(count), **task)[1] for count in range(3)]
    assert ["restarted 2 times, which is the most for" in said for said in ends] == [False, False, True]
    assert "without progress" not in "".join(ends)
    # A combination of a sweep has a run directory of its own, in which progress is its own.
    alone = Trial(tmp_path / "sweep", environment={"EYAS_RUN_DIR": str(tmp_path / "sweep" / "run" / "{task}")})
    alone.step("exit 0")
    assert alone.run(EYAS_RESTARTS="2", SLURM_RESTART_COUNT="5", **task)[0] == 0


@pytest.mark.parametrize(
    ("template", "tell"), [("train", "USR2"), ("pipeline", "TERM"), ("score-array", "TERM")], ids=str
)
def test_a_signal_is_passed_on_until_the_step_ends(tmp_path: Path, template: Template, tell: str) -> None:
    """The first one comes while the processes are still importing and is lost on them; the second is taken."""
    trial = Trial(tmp_path, template=template, arguments=["export", RECIPE])
    told, ready = Path(trial.environment["SHIM_TOLD"]), trial.run_dir / "ready"
    os.mkfifo(told)
    os.mkfifo(ready)
    # Opened for both ways, so that a pipe whose writer is about to go is not read twice.
    trial.step(f"exec 3<> {told}; echo up > {ready}; read -r -u 3; read -r -u 3; " + marker("SIGUSR2", 5) + "exit 1")
    array = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}
    with trial.start(**array) as process:
        assert ready.read_text() == "up\n"
        os.kill(process.pid, signal.SIGUSR2)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert trial.log.count(f"scancel --signal={tell} 41_2") >= 2
    assert trial.requeued == ["41_2"]


def test_a_signal_during_the_set_up_is_not_lost(tmp_path: Path) -> None:
    trial = Trial(tmp_path, setup=["kill -USR2 $$", 'echo "$never_set"'])
    told = Path(trial.environment["SHIM_TOLD"])
    os.mkfifo(told)
    trial.step(f"read -r < {told}; " + marker("SIGUSR2", 1) + "exit 1")
    code, said = trial.run()
    assert (code, trial.requeued) == (0, ["41"]), said


def test_a_set_up_that_fails_ends_the_job(tmp_path: Path) -> None:
    trial = Trial(tmp_path, setup=["false", "true"])
    code, said = trial.run()
    assert code == 1
    assert "the site asks for this, and it failed: false" in said


@pytest.mark.parametrize("template", ["pipeline", "score-array"])
@pytest.mark.parametrize(
    ("status", "state", "code"),
    [
        (0, "JobState=RUNNING PreemptTime=2026-11-30T14:00:00", 0),
        (3, "JobState=RUNNING PreemptTime=None", 3),
        (143, "JobState=CANCELLED PreemptTime=None", 143),
        (143, "JobState=RUNNING PreemptTime=2026-11-30T14:00:00", 0),
    ],
    ids=["done", "failed", "cancelled", "preempted"],
)
def test_a_stage_is_requeued_only_when_it_was_stopped(
    tmp_path: Path, template: Template, status: int, state: str, code: int
) -> None:
    trial = Trial(tmp_path, template=template, arguments=["export", RECIPE])
    trial.slurm_says(state, of="41_2")
    trial.step(f"exit {status}")
    ended, said = trial.run(SLURM_ARRAY_JOB_ID="41", SLURM_ARRAY_TASK_ID="2")
    assert ended == code, said
    assert trial.requeued == (["41_2"] if (status, code) == (143, 0) else [])


def test_a_task_measures_the_arm_of_its_number_inside_the_container(tmp_path: Path) -> None:
    pyxis = Container(kind="pyxis", image="/i.sqsh")
    trial = Trial(tmp_path, template="score-array", container=pyxis)
    trial.step("exit 0")
    assert trial.run(SLURM_ARRAY_JOB_ID="41", SLURM_ARRAY_TASK_ID="2")[0] == 0
    assert trial.srun_words == [
        "--ntasks=1",
        "--nodes=1",
        "--container-image=/i.sqsh",
        f"--container-workdir={tmp_path}",
        *("eyas", "score", "--only", "--arm-number", "2", RECIPE),
    ]


def test_by_hand_the_run_directory_is_asked_for(tmp_path: Path) -> None:
    """Options of the command are none of the recipe's."""
    trial = Trial(tmp_path, template="pipeline", environment={}, arguments=["score", "--arm=k3", RECIPE, "seed=1"])
    trial.step(f'[ -f $RUN_DIR/asked ] || cp $SHIM_SRUN $RUN_DIR/asked; echo "{trial.run_dir}"')
    assert trial.run()[0] == 0
    assert (trial.run_dir / "asked").read_text().split("\0")[-6:-1] == ["eyas", "slurm", "where", RECIPE, "seed=1"]
    assert list((trial.run_dir / "slurm").glob("restarts-41"))


def test_no_address_is_no_localhost(trial: Trial) -> None:
    trial.step("exit 0")
    (trial.folder / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    code, said = trial.run()
    assert code == 1
    assert "no address of the first node" in said
    assert not any(line.startswith("srun") for line in trial.log)


@pytest.mark.parametrize("name", TEMPLATES)
def test_by_hand_a_script_says_what_it_needs(name: Template, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.sbatch"
    script.write_text(template_text(name))
    for arguments, variables in (([], {"SLURM_JOB_ID": "1"}), (["run", "recipe"], {})):
        result = subprocess.run(
            ["bash", str(script), *arguments],
            env=dict(os.environ) | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 1
        assert "sbatch" in result.stderr
