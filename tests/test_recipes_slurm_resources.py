"""What jobs ask for: by the site, the stage and the command line, and beside what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_jobs import plan_chain
from eyas.slurm.site import Resources, Site, read_site
from tests.slurm_runs import eyas, options, recipe_settings, shared_folder, told


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return shared_folder(tmp_path, monkeypatch)


def test_data_that_the_target_writes_needs_its_gpu() -> None:
    recipe = Recipe.model_validate(
        recipe_settings(Path("/shared"), data={"conversations": "c.jsonl", "regenerate": True})
    )
    site = Site.model_validate(
        {"gpus_per_node": 8, "stages": {"prepare": {"partition": "cpu"}, "extract": {"partition": "gpu"}}}
    )
    (link,) = plan_chain(recipe, Path("/r"), stages=["prepare"], site=site, options=options())
    assert (link.job.resources.gpus_per_node, link.job.resources.partition) == (1, "gpu")
    assert (link.job.name, link.job.output) == ("tiny-prepare", "/shared/run/slurm/prepare-%j.out")


@pytest.mark.parametrize(
    ("sections", "gpus"),
    [
        ({"data": {"generation": {"tensor_parallel_size": 4}}}, (4, 1)),
        ({"data": {"generation": {"servers": {"urls": ["http://a/v1"]}}}}, (0, 1)),
        ({"features": {"backend": "vllm", "tensor_parallel_size": 2}}, (1, 2)),
        ({"features": {"device_map": "auto"}}, (1, 8)),
    ],
)
def test_a_job_of_one_engine_asks_for_its_gpus_and_no_more(sections: dict[str, Any], gpus: tuple[int, int]) -> None:
    data = {"conversations": "c.jsonl", "regenerate": True, **sections.get("data", {})}
    recipe = Recipe.model_validate(recipe_settings(Path("/shared"), **{**sections, "data": data}))
    site = Site.model_validate({"gpus_per_node": 8})
    links = plan_chain(recipe, Path("/r"), stages=["prepare", "extract"], site=site, options=options(extract_tasks=8))
    asked = {link.stage: link.job.resources.gpus_per_node for link in links}
    assert (asked["prepare"], asked["extract"]) == gpus


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.regenerate=true", "data.generation.tensor_parallel_size=8"],
            "prepare: data.generation.tensor_parallel_size=8",
        ),
        (["features.backend=vllm", "features.tensor_parallel_size=8"], "extract: features.tensor_parallel_size=8"),
        (["score.tensor_parallel_size=8"], "score: score.tensor_parallel_size=8"),
    ],
)
def test_fewer_gpus_than_the_target_is_split_over(shared: Path, words: list[str], message: str) -> None:
    submit = ("slurm", "submit", str(shared / "tiny.yaml"), *words, "--cpus-per-task", "64")
    assert f"{message}, and the job asks for 4 GPUs" in eyas(*submit, "--gpus-per-node", "4", code=2)
    assert told(shared) == []
    assert eyas(*submit, "--gpus-per-node", "8").startswith("prepare: job")


def test_gpus_with_hardly_a_core_are_remarked_upon(shared: Path) -> None:
    submit = ("slurm", "submit", str(shared / "tiny.yaml"), "--stage", "train", "--gpus-per-node", "8", "--dry-run")
    assert eyas(*submit).startswith("# train: 8 GPUs of a node and cpus_per_task=1, so")
    assert eyas(*submit, "--cpus-per-task", "8").startswith("# train: 8 GPUs of a node and cpus_per_task=8, so")
    assert eyas(*submit, "--cpus-per-task", "16").startswith("# ---- train")


def test_the_command_line_beats_the_stage_and_the_stage_the_site() -> None:
    site = Site.model_validate(
        {"partition": "a", "time": "1", "qos": "q", "stages": {"train": {"time": "2", "partition": "b"}}}
    )
    found = Resources(partition="c").over(site.resources("train"))
    assert (found.partition, found.time, found.qos) == ("c", "2", "q")


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
