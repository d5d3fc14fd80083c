"""`eyas slurm`: submit a recipe as jobs, see how they stand, and what a job script asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eyas.recipes.arguments import OverridesArgument, RecipeArgument

slurm_app = typer.Typer(no_args_is_help=True, help="Run recipes as SLURM jobs.")


@slurm_app.command("submit")
def submit(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Only this stage (may be given again): prepare, extract, train, export, score."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the training.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=0, help="GPUs of each node.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of each task.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each node, such as 200G.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 12:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    array: Annotated[
        str | None, typer.Option(help="Only these tasks of the stage's array, such as 3 or 0-7%4.")
    ] = None,
    extract_tasks: Annotated[int, typer.Option(min=1, help="Tasks that extract features side by side.")] = 1,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, help="Tasks of each array that run at the same time, at most.")
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(help="accelerate config file, or a DeepSpeed file (*.json), for the training; default DDP."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="What the nodes have (h100, ...): does a checkpoint fit into --time, by estimate?"),
    ] = None,
    site: Annotated[Path | None, typer.Option(help="Site file instead of ~/.config/eyas/slurm.yaml.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts and submit nothing.")] = False,
) -> None:
    """Submit the stages of a recipe as jobs that wait for one another; a recipe with `sweep` becomes an array."""
    from eyas.recipes.slurm_jobs import Options
    from eyas.recipes.slurm_submit import submit_recipe
    from eyas.slurm.site import Resources

    asked = Resources(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        mem=mem,
        time=time,
        partition=partition,
        account=account,
        qos=qos,
    )
    options = Options(
        resources=asked, extract_tasks=extract_tasks, array=array, launch=launch, at_once=at_once, hardware=hardware
    )
    submit_recipe(
        recipe,
        overrides=overrides or [],
        stages=stage or [],
        options=options,
        site_path=site,
        dry_run=dry_run,
        say=typer.echo,
    )


@slurm_app.command("status")
def status(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Show stage by stage: what stands, what runs where, steps, tokens a second, time left, last tau, restarts, logs."""
    from eyas.recipes.slurm_status import status_lines

    typer.echo("\n".join(status_lines(run_dir)))


@slurm_app.command("cancel")
def cancel(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Cancel every job of a run that waits or runs."""
    from eyas.recipes.slurm_record import known_jobs, submitted_entries
    from eyas.slurm.sbatch import cancel as cancel_jobs

    submitted_entries(run_dir)  # a mistyped directory has none
    jobs = [known.entry.job for known in known_jobs(run_dir) if any(state.live for state in known.states)]
    if jobs:
        cancel_jobs(jobs)
    typer.echo(f"cancelled {', '.join(jobs)}" if jobs else f"no job of {run_dir} waits or runs")


@slurm_app.command("retry")
def retry(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Run again what failed, single tasks of arrays alone, and let the jobs after it wait anew."""
    from eyas.recipes.slurm_retry import retry_jobs

    retry_jobs(run_dir, say=typer.echo)


@slurm_app.command("where")
def where(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Print the run directory of a recipe, for job scripts."""
    from eyas.recipes.load import load_recipe

    typer.echo(load_recipe(recipe, overrides=overrides or ()).run_directory.absolute())


@slurm_app.command("arms")
def arms(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Print the arms of a recipe, one a line, in the order of the tasks of slurm/score-array.sbatch."""
    from eyas.recipes.load import load_recipe

    typer.echo("\n".join(load_recipe(recipe, overrides=overrides or ()).score.arm_names))
