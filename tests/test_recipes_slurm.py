"""Submitting recipes: the chain, what is refused before a job waits in vain, the record, the status."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from eyas.heads.files import read_json
from eyas.recipes.run_lock import run_lock
from eyas.recipes.schema import Recipe
from eyas.recipes.score_stage import only_arm
from eyas.recipes.slurm_checks import check_paths
from eyas.recipes.slurm_jobs import STAGES, plan_chain
from eyas.slurm.sbatch import job_states
from eyas.slurm.site import Resources, Site, read_site
from tests.slurm_runs import eyas, job_line, options, recipe_settings, shared_folder, slurm_says, told


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return shared_folder(tmp_path, monkeypatch)


def test_the_chain_of_a_recipe() -> None:
    recipe = Recipe.model_validate(recipe_settings(Path("/shared")))
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
    assert jobs["train"].environment == {"EYAS_RUN_DIR": "/shared/run", "EYAS_LAUNCH": str(Path("z2.json").absolute())}
    assert "EYAS_LAUNCH" not in jobs["score"].environment


def test_data_that_the_target_writes_needs_its_gpu() -> None:
    recipe = Recipe.model_validate(
        recipe_settings(Path("/shared"), data={"conversations": "c.jsonl", "regenerate": True})
    )
    (link,) = plan_chain(recipe, Path("/r"), stages=["prepare"], site=Site(gpus_per_node=2), options=options())
    assert link.job.resources.gpus_per_node == 2


def test_online_features_have_no_job() -> None:
    recipe = Recipe.model_validate(recipe_settings(Path("/shared"), features={"mode": "online"}))
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
    assert not (shared / "run" / "slurm").exists()


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
        (["--stage", "export", "--time", "5"], "export: --time 5 leaves nothing: the job is told to stop 300 s before"),
        (["--stage", "score", "--array", "0-"], "names no tasks"),
        (["--launch", "nosuch.json"], "--launch: nosuch.json does not exist"),
        (["init.head=/nowhere/head"], "init.head: /nowhere/head does not exist"),
        (["target.model=/nowhere/model"], "target.model: /nowhere/model does not exist"),
        (["data.conversations=/nowhere/c.jsonl"], "no file /nowhere/c.jsonl"),
        (["--partition", "gpu\nx"], "cannot stand in an #SBATCH line"),
        (["run_dir=/shared/50%j"], "run_dir: '%' in '/shared/50%j' means something else in the names of SLURM's logs"),
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


def test_cancel_ends_arrays_as_a_whole(shared: Path) -> None:
    """Tasks that wait behind a limit are one line of scontrol, which scancel does not read."""
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export", "--stage", "score", "--at-once", "1")
    slurm_says(shared, "101", job_line(101, "COMPLETED", name="tiny-export"))
    tasks = [job_line(102, "PENDING", name="tiny-score", array=102, task="1-2%1")]
    slurm_says(shared, "102", job_line(103, "RUNNING", name="tiny-score", array=102, task="0"), *tasks)
    assert eyas("slurm", "cancel", str(shared / "run")).splitlines() == ["cancelled 102"]
    assert told(shared)[-1] == "scancel 102"


def test_an_interrupt_leaves_no_job_that_nobody_knows(shared: Path) -> None:
    """Ctrl-C while sbatch has the job and has not said its number."""
    (shared / "shims" / "bin" / "sbatch").write_text("#!/bin/bash\nkill -INT $PPID\necho 7\n")
    assert "Traceback" not in eyas("slurm", "submit", str(shared / "tiny.yaml"), code=130)
    assert [job["job"] for job in read_json(shared / "run" / "slurm" / "jobs.json")["jobs"]] == ["7"]


def test_a_mistyped_run_directory_has_no_jobs(shared: Path) -> None:
    for command in ("cancel", "retry"):
        said = eyas("slurm", command, str(shared / "rum"), code=2)
        assert f"no jobs were submitted for {shared / 'rum'}" in said


@pytest.mark.parametrize(
    ("stage", "missing", "words"),
    [
        ("train", "features", "has no extract stage yet, which it reads; submit it as well (--stage extract)"),
        ("train", "collect", "has no collect stage yet, which it reads; submit it as well (--stage prepare)"),
        ("export", "train", "has no train stage yet"),
        ("score", "export", "has no export stage yet"),
    ],
)
def test_a_stage_whose_input_nothing_makes_is_refused(shared: Path, stage: str, missing: str, words: str) -> None:
    """Its job makes that stage only, and would end at once when its turn comes."""
    shutil.rmtree(shared / "run" / missing)
    assert words in eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", stage, code=2)
    assert told(shared) == []
    eyas("slurm", "submit", str(shared / "tiny.yaml"))


def test_a_live_job_holds_the_run_directory(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "RUNNING"))
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export", code=2)
    assert "is held by job 101 (RUNNING)" in said
    slurm_says(shared, "101", job_line(101, "COMPLETED"))
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "export")


def test_where_slurm_cannot_be_asked_nothing_is_submitted(shared: Path) -> None:
    """A controller that is down has forgotten nothing: two jobs in one run directory would spoil it."""
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    scontrol = shared / "shims" / "bin" / "scontrol"
    scontrol.write_text("#!/bin/bash\necho 'Unable to contact slurm controller (connect failure)' >&2\nexit 1\n")
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", code=2)
    assert "the state of job 101 is not known: Unable to contact slurm controller" in said
    assert "is not known" in eyas("slurm", "status", str(shared / "run"))


def test_a_job_of_another_name_is_not_ours(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "RUNNING", name="somebody-elses"))
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")


def test_what_ended_well_is_not_asked_about_again(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train")
    slurm_says(shared, "101", job_line(101, "COMPLETED"))
    for _ in range(2):
        assert "101 train: COMPLETED" in eyas("slurm", "status", str(shared / "run"))
    assert told(shared).count("scontrol show job 101 -o") == 1


def test_jobs_of_another_cluster_are_asked_about_there(shared: Path) -> None:
    sbatch = shared / "shims" / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho '7;far'\n")
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--stage", "export")
    assert "#SBATCH --dependency=afterok:7\n" in (shared / "run" / "slurm" / "001-export.sbatch").read_text()
    slurm_says(shared, "7", job_line(7, "RUNNING"))
    assert "7;far train: RUNNING" in eyas("slurm", "status", str(shared / "run"))
    eyas("slurm", "cancel", str(shared / "run"))
    assert told(shared)[-1].startswith("scancel 7")
    assert told(shared)[-1].endswith("--clusters=far")
    assert "scontrol show job 7 -o --clusters=far" in told(shared)


def test_a_job_submitted_by_hand_holds_the_run_directory(shared: Path) -> None:
    (shared / "run" / ".lock").write_text("id 17 on n1, SLURM job 55")
    slurm_says(shared, "55", job_line(55, "RUNNING", name="by-hand"))
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), code=2)
    assert "is in use by another eyas process (id 17 on n1, SLURM job 55)" in said
    slurm_says(shared, "55", job_line(55, "FAILED", name="by-hand"))
    eyas("slurm", "submit", str(shared / "tiny.yaml"))


def test_a_process_without_slurm_holds_it_too(shared: Path) -> None:
    with run_lock(shared / "run"):
        assert "is in use by another eyas process (id" in eyas("slurm", "submit", str(shared / "tiny.yaml"), code=2)
    eyas("slurm", "submit", str(shared / "tiny.yaml"))


def test_scripts_are_for_the_user_alone_and_survive_what_they_wait_for(shared: Path) -> None:
    eyas("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--stage", "export")
    script = shared / "run" / "slurm" / "001-export.sbatch"
    assert script.stat().st_mode & 0o777 == 0o600  # the site's environment may hold keys
    assert "#SBATCH --kill-on-invalid-dep=no\n" in script.read_text()


def test_node_local_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="lies in /dev/shm, which is another disk on every node"):
        check_paths([Path("/dev/shm/recipe.yaml")], shared=())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(ValueError, match="which is another disk on every node"):
        check_paths([tmp_path / "run"], shared=())
    check_paths([tmp_path / "run"], shared=[str(tmp_path)])


def test_so_are_data_on_them(shared: Path) -> None:
    (shared / "site.yaml").write_text(
        yaml.safe_dump({"shared_paths": [str(shared / "run"), str(shared / "tiny.yaml")]})
    )
    assert "which is another disk on every node" in eyas("slurm", "submit", str(shared / "tiny.yaml"), code=2)


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
        job_line(9, "RUNNING", array=7, task="1"),
        job_line(7, "PENDING", array=7, task="2-5%1"),
    ]
    slurm_says(shared, "7", *lines)
    assert [(state.job, state.state, state.live) for state in job_states("7")] == [
        ("7_1", "RUNNING", True),
        ("7_2-5%1", "PENDING", True),
    ]
    assert [state.tasks for state in job_states("7")] == [["1"], ["2", "3", "4", "5"]]
    assert job_states("8") == []


def test_arms_by_number_and_alone(shared: Path) -> None:
    assert eyas("slurm", "arms", str(shared / "tiny.yaml")).split() == ["k3", "k1", "ngram"]
    recipe = Recipe.model_validate(recipe_settings(shared))
    assert recipe.score.arm_names == ["k3", "k1", "ngram"]
    one = only_arm(recipe, "k1").score
    assert (one.draft_lengths, dict(one.arms), one.schedule) == ((1,), {}, False)
    other = only_arm(recipe, "ngram").score
    assert (other.draft_lengths, list(other.arms)) == ((), ["ngram"])
    with pytest.raises(ValueError, match="it has k3, k1, ngram"):
        only_arm(recipe, "k2")


def test_where_prints_the_run_directory(shared: Path) -> None:
    assert eyas("slurm", "where", str(shared / "tiny.yaml"), "run_dir=/a/b").strip() == "/a/b"
