"""The jobs of a recipe: which stages run where, after what, and with what each asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eyas.recipes.schema import Recipe
from eyas.recipes.sweep import RECIPE, makes_data, point_directory
from eyas.slurm.sbatch import plain_id
from eyas.slurm.script import Job, Template
from eyas.slurm.site import Resources, Site

STAGES = ("prepare", "extract", "train", "export", "score")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A job of a chain and the one that must have ended before it (None = nothing), well or, for `afterany`, however."""

    stage: str
    job: Job
    after: str | None
    condition: Literal["afterok", "afterany"] = "afterok"

    @property
    def processes(self) -> int:
        """GPUs of the job, or its nodes where it asks for none."""
        return (self.job.resources.nodes or 1) * (self.job.resources.gpus_per_node or 1)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for: resources of every job it submits, tasks of the arrays, the launch of the training.

    `array` is of the stage that is submitted alone, to run single tasks again; `at_once` limits the tasks of each array
    that run at the same time. `hardware` is what the nodes have, for an estimate of the time that training takes.
    """

    resources: Resources
    extract_tasks: int
    array: str | None
    launch: str | None
    at_once: int | None = None
    hardware: str | None = None

    def tasks(self, count: int) -> str:
        """An array of `count` tasks, or the tasks of it that were asked for."""
        array = self.array or f"0-{count - 1}"
        return array if self.at_once is None or "%" in array else f"{array}%{self.at_once}"


def plan_chain(recipe: Recipe, recipe_path: Path, *, stages: Sequence[str], site: Site, options: Options) -> list[Link]:
    """The jobs of `stages`, in order, each after the one before it.

    Args:
        recipe_path: the file that the jobs read: on a disk that their nodes see.
    """
    links: list[Link] = []
    for stage in stages:
        for name, job in _jobs(recipe, recipe_path, stage=stage, site=site, options=options).items():
            links.append(Link(stage=name, job=job, after=links[-1].stage if links else None))
    return links


def plan_sweep(recipe: Recipe, folder: Path, *, stages: Sequence[str], site: Site, options: Options) -> list[Link]:
    """The jobs of a sweep: data and features once, every combination as a task of one array, then the table.

    Args:
        folder: with recipe.yaml (the recipe without its sweep) and sweep.yaml.
    """
    links = plan_chain(
        recipe,
        folder / "recipe.yaml",
        stages=[each for each in stages if each in ("prepare", "extract")],
        site=site,
        options=options,
    )
    if "train" not in stages:
        return links
    make = _Maker(recipe=recipe, site=site, options=options)
    whole, count = str(folder / "sweep.yaml"), math.prod(len(values) for values in recipe.sweep.values())
    run_dir = str(point_directory(recipe, "{task}"))
    jobs = {
        # What a combination does not share is made in this job, which then needs what an extraction needs.
        "link": make("pipeline", "extract" if makes_data(recipe) else "sweep", ["sweep", "--link", whole], name="link"),
        "train": make("train", "train", [f"{run_dir}/{RECIPE}"], array=options.tasks(count), run_dir=run_dir),
        "table": make("pipeline", "sweep", ["sweep", "--table", whole], name="table"),
    }
    for name, job in jobs.items():
        # The table is written however the trainings end: a head that diverged stands in it as not trained.
        condition = "afterany" if name == "table" else "afterok"
        links.append(Link(stage=name, job=job, after=links[-1].stage if links else None, condition=condition))
    return links


def with_dependency(link: Link, *, ids: Mapping[str, str]) -> Job:
    """The job of a link, once the jobs before it have ids."""
    if link.after is None or link.after not in ids:
        return link.job
    return replace(link.job, dependency=f"{link.condition}:{plain_id(ids[link.after])}")


def generates_data(recipe: Recipe) -> bool:
    """Whether the target itself writes prompts or answers before the token ids are made."""
    return recipe.data.regenerate or bool(recipe.data.self_prompts.count)


def answering_gpus(recipe: Recipe) -> int:
    """GPUs that the data stages can use: those of one engine, where the target writes and no server does it."""
    generation = recipe.data.generation
    return generation.tensor_parallel_size if generates_data(recipe) and not generation.servers.urls else 0


def extracting_gpus(recipe: Recipe) -> int | None:
    """GPUs that one extraction can use: those of its engine, or all of the node that transformers spreads over (None)."""
    return None if recipe.features.device_map == "auto" else recipe.features.tensor_parallel_size


def _jobs(recipe: Recipe, recipe_path: Path, *, stage: str, site: Site, options: Options) -> dict[str, Job]:
    """The jobs of one stage by name."""
    path = str(recipe_path)
    make = _Maker(recipe=recipe, site=site, options=options)
    if stage == "prepare":
        gpus = answering_gpus(recipe)
        # A target that writes its data here needs what an extraction needs.
        like = "extract" if gpus else stage
        return {stage: make("pipeline", like, ["prepare", path], most=gpus, name=stage)}
    if stage == "extract":
        if recipe.features.mode == "online":
            return {}
        tasks = options.extract_tasks
        if tasks == 1 and options.array is None:
            return {stage: make("pipeline", stage, ["extract", path], most=extracting_gpus(recipe))}
        # The tasks leave shards; the job after them finds all there and seals the stage.
        array, most = options.tasks(tasks), extracting_gpus(recipe)
        parts = make("pipeline", stage, ["extract", "--part", path], array=array, most=most)
        return {stage: parts, "seal": make("pipeline", stage, ["extract", "--only", path], most=0, name="seal")}
    if stage == "train":
        return {stage: make("train", stage, [path])}
    if stage == "export":
        return {stage: make("pipeline", stage, ["export", "--only", path], most=0)}
    assert stage == "score", stage
    if recipe.score.schedule and options.array is None:
        # The schedule is chosen from all arms' speeds, and no two nodes are equally fast.
        return {stage: make("pipeline", stage, ["score", "--only", path])}
    arms = recipe.score.arm_names
    return {stage: make("score-array", stage, [path], array=options.tasks(len(arms)))}


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes jobs of one recipe on one site, which ask for no more GPUs than they can use (`most`; None = all)."""

    recipe: Recipe
    site: Site
    options: Options

    def __call__(
        self,
        template: Template,
        stage: str,
        arguments: Sequence[str],
        *,
        array: str | None = None,
        most: int | None = None,
        name: str | None = None,
        run_dir: str | None = None,
    ) -> Job:
        folder = self.recipe.run_directory.absolute() / "slurm"
        resources = self.options.resources.over(self.site.resources(stage))
        if stage != "train":
            resources = resources.model_copy(update={"nodes": 1})
        gpus = 0 if stage == "sweep" or most == 0 else resources.gpus_per_node
        if gpus is not None and most is not None:
            gpus = min(gpus, most)
        resources = resources.model_copy(update={"gpus_per_node": gpus})
        launch = self.options.launch or self.site.launch
        environment = dict(self.site.environment) | {"EYAS_RUN_DIR": run_dir or str(folder.parent)}
        if template == "train" and launch is not None:
            environment["EYAS_LAUNCH"] = str(Path(launch).expanduser().absolute())
        log = "%A_%a" if array else "%j"
        return Job(
            template=template,
            name=f"{self.recipe.name}-{name or stage}",
            resources=resources,
            output=str(folder / f"{name or stage}-{log}.out"),
            chdir=str(Path.cwd()),
            arguments=arguments,
            environment=environment,
            setup=self.site.setup,
            container=self.site.container,
            array=array,
            signal=self.site.signal,
            signal_seconds=self.site.signal_seconds,
        )
