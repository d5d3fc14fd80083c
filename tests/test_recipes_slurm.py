"""Submitting recipes: the chain, what is refused before a job waits in vain, the record, the status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eyas.heads.files import read_json, write_json
from eyas.recipes.cli import app
from eyas.recipes.schema import Recipe
from eyas.recipes.score_stage import only_arm
from eyas.recipes.slurm_checks import check_paths, check_time, measured_step_seconds, seconds_of
from eyas.recipes.slurm_jobs import STAGES, Options, arm_names, plan_chain
from eyas.slurm.sbatch import job_states
from eyas.slurm.site import Resources, Site, read_site
from tests import slurm_shims

JOB_LINE = "JobId={job} JobName=x JobState={state} Reason={reason} NodeList=n1 RunTime=00:01:02 Restarts=2{more}\n"


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "target": {"model": str(folder / "target")},
        "data": {"conversations": str(folder / "chats.jsonl")},
        "score": {"draft_lengths": [3, 1], "arms": {"ngram": {"method": "ngram", "num_speculative_tokens": 3}}},
    } | changes


def options(**changes: Any) -> Options:
    return Options(**{"resources": Resources(), "extract_tasks": 1, "array": None, "launch": None} | changes)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the site file calls shared, with a recipe, and SLURM's commands shimmed."""
    for name, value in slurm_shims.install(tmp_path / "shims").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings(tmp_path)))
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"shared_paths": [str(tmp_path)], "partition": "gpu"}))
    monkeypatch.setenv("EYAS_SLURM", str(tmp_path / "site.yaml"))
    return tmp_path


def eyas(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def told(shared: Path) -> list[str]:
    return (shared / "shims" / "log").read_text().splitlines()


def test_the_chain_of_a_recipe() -> None:
    recipe = Recipe.model_validate(settings(Path("/shared")))
    site = Site.model_validate(
        {"gpus_per_node": 8, "time": "4:00:00", "stages": {"train": {"nodes": 4}, "prepare": {"partition": "cpu"}}}
    )
    links = plan_chain(
        recipe, Path("/shared/r.yaml"), stages=STAGES, site=site, options=options(extract_tasks=8, launch="z2.json")
    )
    assert [(link.stage, link.after) for link in links] == [
        ("prepare", None),
        ("extract", "prepare"),
        ("seal", "extract"),
        ("train", "seal"),
        ("export", "train"),
        ("score", "export"),
    ]
    jobs = {link.stage: link.job for link in links}
    assert {name: (job.resources.nodes, job.resources.gpus_per_node) for name, job in jobs.items()} == {
        "prepare": (1, 0),
        "extract": (1, 8),
        "seal": (1, 0),
        "train": (4, 8),
        "export": (1, 0),
        "score": (1, 8),
    }
    assert jobs["prepare"].resources.partition == "cpu"
    assert (jobs["extract"].array, jobs["score"].array) == ("0-7", "0-2")
    assert list(jobs["extract"].arguments) == ["extract", "--part", "/shared/r.yaml"]
    assert jobs["train"].environment == {"EYAS_RUN_DIR": "/shared/run", "EYAS_LAUNCH": "z2.json"}
    assert "EYAS_LAUNCH" not in jobs["score"].environment


def test_data_that_the_target_writes_needs_its_gpu() -> None:
    recipe = Recipe.model_validate(settings(Path("/shared"), data={"conversations": "c.jsonl", "regenerate": True}))
    (link,) = plan_chain(recipe, Path("/r"), stages=["prepare"], site=Site(gpus_per_node=2), options=options())
    assert link.job.resources.gpus_per_node == 2


def test_online_features_have_no_job() -> None:
    recipe = Recipe.model_validate(settings(Path("/shared"), features={"mode": "online"}))
    links = plan_chain(recipe, Path("/r"), stages=STAGES, site=Site(), options=options())
    assert [link.stage for link in links] == ["prepare", "train", "export", "score"]


def test_the_command_line_beats_the_stage_and_the_stage_the_site() -> None:
    site = Site.model_validate(
        {"partition": "a", "time": "1", "qos": "q", "stages": {"train": {"time": "2", "partition": "b"}}}
    )
    found = Resources(partition="c").over(site.resources("train"))
    assert (found.partition, found.time, found.qos) == ("c", "2", "q")


def test_submitting_writes_scripts_a_record_and_dependencies(shared: Path) -> None:
    said = eyas(
        "slurm", "submit", str(shared / "tiny.yaml"), "seed=7", "--stage", "train", "--stage", "export", "--nodes", "2"
    )
    folder = shared / "run" / "slurm"
    assert said.splitlines()[:2] == ["train: job 101", "export: job 102, after 101"]
    assert told(shared) == [
        f"sbatch --parsable {folder}/000-train.sbatch",
        f"sbatch --parsable {folder}/001-export.sbatch",
    ]
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["seed"] == 7
    second = (folder / "001-export.sbatch").read_text()
    assert "#SBATCH --dependency=afterok:101\n" in second
    assert "#SBATCH --partition=gpu\n" in second
    assert [(job["job"], job["stage"], job["dependency"]) for job in read_json(folder / "jobs.json")["jobs"]] == [
        ("101", "train", None),
        ("102", "export", "afterok:101"),
    ]


def test_a_dry_run_submits_and_writes_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--dry-run")
    assert said.count("#!/usr/bin/env bash") == 5
    assert told(shared) == []
    assert not (shared / "run").exists()


def test_a_refusal_passes_sbatchs_words_on_and_keeps_what_was_submitted(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    monkeypatch.setenv("SHIM_REFUSAL", "invalid partition specified: nowhere")
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export", code=2)
    assert "sbatch refused" in said
    assert "invalid partition specified: nowhere" in said
    assert len(read_json(shared / "run" / "slurm" / "jobs.json")["jobs"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "tarin"], "there is no such stage"),
        (["--array", "3"], "--array chooses tasks of one stage"),
        (["--stage", "train", "--array", "3"], "has no sweep"),
        (["--time", "tomorrow"], "is no time limit"),
        (["--stage", "train", "--time", "6"], "leaves nothing"),
        (["--partition", "gpu x"], "cannot stand in an #SBATCH line"),
        (["--site", "nowhere.yaml"], "the site file nowhere.yaml does not exist"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_said_before_anything_is_submitted(shared: Path, words: list[str], message: str) -> None:
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), *words, code=2)
    assert message in said
    assert not any(line.startswith("sbatch") for line in told(shared))


def test_without_sbatch_it_says_where_to_go(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "sbatch is not on PATH" in eyas("slurm", "submit", str(shared / "tiny.yaml"), code=2)


def test_a_live_job_holds_the_run_directory(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    jobs = shared / "shims" / "jobs"
    (jobs / "101").write_text(JOB_LINE.format(job=101, state="RUNNING", reason="None", more=""))
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export", code=2)
    assert "is held by job 101 (RUNNING)" in said
    (jobs / "101").write_text(JOB_LINE.format(job=101, state="COMPLETED", reason="None", more=""))
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export")


def test_node_local_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="lies in /dev/shm, which is another disk on every node"):
        check_paths([Path("/dev/shm/recipe.yaml")], shared=())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(ValueError, match="which is another disk on every node"):
        check_paths([tmp_path / "run"], shared=())
    check_paths([tmp_path / "run"], shared=[str(tmp_path)])


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("1-02:30:05", 95405)],
)
def test_time_limits(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_a_limit_shorter_than_a_checkpoint_interval(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(settings(tmp_path, train={"checkpoint_every": 1000, "batch_tokens": 4000}))
    folder = tmp_path / "run" / "train.partial"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 10, "tokens_per_second": 2000.0}) + "\n")
    step = measured_step_seconds(tmp_path / "run", batch_tokens=recipe.train.batch_tokens)
    assert step == 2.0
    with pytest.raises(
        ValueError, match=r"leaves 1380 s of training, and train.checkpoint_every=1000 steps take about 2000 s"
    ):
        check_time(recipe, time="30", signal_seconds=300, step_seconds=step)
    check_time(recipe, time="1:00:00", signal_seconds=300, step_seconds=step)
    check_time(recipe, time="30", signal_seconds=300, step_seconds=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitoin: gpu", "partitoin: unknown key; known are account"),
        ("nodes: many", "nodes: input should be a valid integer"),
        ("stages: {trian: {nodes: 2}}", "stages.trian"),
        ("- a", "the file"),
        ("a: [", "not valid YAML"),
        ("container: {kind: docker, image: x}", "container.kind"),
    ],
)
def test_a_wrong_site_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "slurm.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"slurm\.yaml") as error:
        read_site(path)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_states_of_an_array(shared: Path) -> None:
    lines = [
        JOB_LINE.format(job=9, state="RUNNING", reason="None", more=" ArrayJobId=7 ArrayTaskId=1"),
        JOB_LINE.format(job=7, state="PENDING", reason="Resources", more=" ArrayJobId=7 ArrayTaskId=2-5"),
    ]
    (shared / "shims" / "jobs" / "7").write_text("".join(lines))
    assert [(state.job, state.state, state.live) for state in job_states("7")] == [
        ("7_1", "RUNNING", True),
        ("7_2-5", "PENDING", True),
    ]
    assert job_states("8") == []


def test_status_shows_stage_steps_rate_time_left_and_logs(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "train.epochs=4", "train.batch_tokens=1000", "--stage", "train")
    run = shared / "run"
    (run / "train.partial").mkdir()
    records = [
        {"step": 50, "epoch": 1.0, "tokens_per_second": 500.0},
        {"step": 50, "heldout/tau": 1.75},
    ]
    (run / "train.partial" / "metrics.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in records) + '{"step": 6'
    )
    write_json(run / "train.partial" / "REQUEUE", {"signal": "SIGUSR2", "step": 50, "time": "now"})
    (shared / "shims" / "jobs" / "101").write_text(
        JOB_LINE.format(job=101, state="PENDING", reason="BeginTime", more="")
    )
    said = eyas("slurm", "status", str(run))
    assert "train      under way" in said
    # 150 of 200 steps are left, of 1000 tokens at 500 a second.
    assert "step 50 of about 200, epoch 1.00 of 4, 500 tokens/s, about 0:05:00 left, last held-out tau 1.750" in said
    assert "stopped at step 50 by SIGUSR2, to be continued" in said
    assert f"101 train: PENDING, BeginTime, on n1; log {run}/slurm/train-101.out" in said
    assert "is no run directory" in eyas("slurm", "status", str(shared), code=2)


def test_arms_by_number_and_alone(shared: Path) -> None:
    assert eyas("slurm", "arms", str(shared / "tiny.yaml")).split() == ["k3", "k1", "ngram"]
    recipe = Recipe.model_validate(settings(shared))
    assert arm_names(recipe) == ["k3", "k1", "ngram"]
    one = only_arm(recipe, "k1").score
    assert (one.draft_lengths, dict(one.arms), one.schedule) == ((1,), {}, False)
    other = only_arm(recipe, "ngram").score
    assert (other.draft_lengths, list(other.arms)) == ((), ["ngram"])
    with pytest.raises(ValueError, match="it has k3, k1, ngram"):
        only_arm(recipe, "k2")


def test_where_prints_the_run_directory(shared: Path) -> None:
    assert eyas("slurm", "where", str(shared / "tiny.yaml"), "run_dir=/a/b").strip() == "/a/b"
