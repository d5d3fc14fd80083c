"""What the jobs ask for beside what they need: GPUs that the target is split over, cores for the processes of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_jobs import Link, answering_gpus

Say = Callable[[str], None]

CORES_PER_GPU = 2
"""Below it, a process has no core left to read and pack ahead of its GPU."""


def check_resources(links: Sequence[Link], recipe: Recipe, *, say: Say) -> None:
    """Refuse jobs with fewer GPUs than the target is split over, and say what would be slow or is left out.

    Raises:
        ValueError: a job asks for too few GPUs.
    """
    for link in links:
        _check_gpus(link, recipe)
    _say_cores(links, say=say)
    if recipe.score.schedule and any(link.stage == "score" and link.job.array is not None for link in links):
        say(
            "score: the tasks that --array names measure each arm alone, so score.schedule is NOT measured and there is no common "
            "report; without --array one job measures all of it"
        )


def _check_gpus(link: Link, recipe: Recipe) -> None:
    gpus = link.job.resources.gpus_per_node
    key, needed = _split(link.stage, recipe)
    if gpus is not None and needed > max(gpus, 1):
        raise ValueError(
            f"{link.stage}: {key}={needed}, and the job asks for {gpus} GPUs; ask for as many (--gpus-per-node {needed}, or in "
            "the site file), or split the target over fewer"
        )


def _split(stage: str, recipe: Recipe) -> tuple[str, int]:
    """Key and number of the GPUs that a job's target is split over; 1 where none is loaded or only one device is used."""
    if stage == "prepare":
        return "data.generation.tensor_parallel_size", answering_gpus(recipe)
    if stage in ("extract", "link"):
        return "features.tensor_parallel_size", recipe.features.tensor_parallel_size
    if stage == "score":
        return "score.tensor_parallel_size", recipe.score.tensor_parallel_size
    return "", 1


def _say_cores(links: Sequence[Link], *, say: Say) -> None:
    """One line on all jobs whose GPUs have few cores; a task that asks for none is given one, unless the site has another default."""
    few = {
        link.stage: (gpus, cores)
        for link in links
        if (gpus := link.job.resources.gpus_per_node or 0)
        and (cores := link.job.resources.cpus_per_task or 1) < CORES_PER_GPU * gpus
    }
    if few:
        gpus, cores = max(few.values(), key=lambda pair: pair[0] / pair[1])
        say(
            f"{', '.join(few)}: {gpus} GPUs of a node and cpus_per_task={cores}, so the GPUs may wait for what reads and packs; "
            "give --cpus-per-task (SLURM's own default is 1), and --mem where the default is small"
        )
