"""Submitting recipes: the chain, what is written, what is refused before a job waits in vain."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from eyas.heads.files import read_json
from eyas.recipes.schema import Recipe
from eyas.recipes.score_stage import only_arm
from eyas.recipes.slurm_checks import check_paths
from eyas.recipes.slurm_jobs import STAGES, plan_chain
from eyas.slurm.site import Site
from tests.slurm_runs import eyas, options, recipe_settings, shared_folder, stands, told


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
        "extract": (1, 1),  # transformers on one device; more would idle
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


def test_a_schedule_is_measured_on_one_node(shared: Path) -> None:
    """It is chosen from all arms' speeds. Without one, or where tasks are named, every arm has a node of its own."""
    scheduled = ("score.schedule=true", "--stage", "score")
    eyas("slurm", "submit", str(shared / "tiny.yaml"), *scheduled)
    script = (shared / "run" / "slurm" / "000-score.sbatch").read_text()
    assert f"set -- score --only {shared}/run/slurm/recipe.yaml\n" in script
    assert "#SBATCH --array" not in script
    stands(shared / "run" / "score", "2999-01-01T00:00:00+00:00")
    assert "101 score: COMPLETED" in eyas("slurm", "status", str(shared / "run"))  # SLURM has forgotten it
    said = eyas("slurm", "submit", str(shared / "tiny.yaml"), *scheduled, "--array", "0-1")
    assert said.startswith(
        "score: the tasks that --array names measure each arm alone, so score.schedule is NOT measured"
    )
    assert "#SBATCH --array=0-1\n" in (shared / "run" / "slurm" / "001-score.sbatch").read_text()


def test_online_features_have_no_job() -> None:
    recipe = Recipe.model_validate(recipe_settings(Path("/shared"), features={"mode": "online"}))
    links = plan_chain(recipe, Path("/r"), stages=STAGES, site=Site(), options=options())
    assert [link.stage for link in links] == ["prepare", "train", "export", "score"]


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


def test_a_dry_run_finds_what_needs_no_slurm(shared: Path) -> None:
    """Files may well be elsewhere than on the machine that shows the scripts; the rest is refused as it would be."""
    dry = ("slurm", "submit", str(shared / "tiny.yaml"), "--dry-run")
    assert "--time 'tomorrow' is no time limit" in eyas(*dry, "--time", "tomorrow", code=2)
    said = eyas(*dry, "--launch", "nosuch.json")
    assert said.startswith("# would be refused on this machine: --launch: nosuch.json does not exist")
    assert said.count("#!/usr/bin/env bash") == 5


def test_what_cannot_stand_in_a_later_script_is_said_before_the_first_job(shared: Path) -> None:
    site = yaml.safe_load((shared / "site.yaml").read_text()) | {"stages": {"score": {"partition": "gpu\nx"}}}
    (shared / "site.yaml").write_text(yaml.safe_dump(site))
    assert "cannot stand in an #SBATCH line" in eyas("slurm", "submit", str(shared / "tiny.yaml"), code=2)
    assert told(shared) == []


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
