"""Submitting a recipe: check, write the scripts into the run directory, hand them to sbatch, record what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

from eyas.heads.files import write_text
from eyas.recipes.load import dump_recipe, load_recipe
from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_checks import check_before, check_not_held, check_paths, named_paths
from eyas.recipes.slurm_jobs import STAGES, Link, Options, plan_chain, plan_sweep, with_dependency
from eyas.recipes.slurm_limits import check_hardware, check_limits
from eyas.recipes.slurm_record import RECORD, Entry, submit_entry, submitting
from eyas.recipes.slurm_resources import check_resources
from eyas.recipes.sweep import RECIPE, point_directory, sweep_points, without_sweep
from eyas.slurm.sbatch import require_slurm, tasks_of
from eyas.slurm.script import render
from eyas.slurm.site import Site, read_site

Say = Callable[[str], None]


def submit_recipe(
    reference: str,
    *,
    overrides: Sequence[str],
    stages: Sequence[str],
    options: Options,
    site_path: Path | None,
    dry_run: bool,
    say: Say,
) -> dict[str, str]:
    """Submit `stages` of a recipe (none = all of them) as a chain; returns the id of each job by its name.

    The recipe with its overrides is written beside the scripts, and that is what the jobs read: the file it came from
    may change while they wait.

    Raises:
        ValueError: anything that would make a job fail for a reason known now, or sbatch refused.
    """
    recipe, site = load_recipe(reference, overrides=overrides), read_site(site_path)
    recipe = recipe.model_copy(update={"run_dir": str(recipe.run_directory.absolute())})  # the jobs may start elsewhere
    wanted = _stages(stages, options=options)
    if recipe.sweep and stages and not {*stages} <= {"prepare", "extract", "train"}:
        chosen = quote(str(point_directory(recipe, "N") / RECIPE))
        raise ValueError(
            "a sweep ends with training and a table; export and score the combination that you choose: "
            f"`eyas slurm submit {chosen} --stage export --stage score`"
        )
    run_dir = recipe.run_directory
    _check_name(run_dir)
    hardware = options.hardware or site.hardware
    check_hardware(hardware)
    folder = run_dir / RECORD.parent
    links = _links(recipe, folder=folder, stages=wanted, site=site, options=options)
    scripts = [render(link.job) for link in links]  # what cannot stand in a script is refused before the first job
    if not dry_run:
        require_slurm()
    note = _commented(say) if dry_run else say
    _check(recipe, reference, launch=options.launch or site.launch, site=site, refuse=not dry_run, say=note)
    check_resources(links, recipe, say=note)
    check_limits(links, recipe, signal_seconds=site.signal_seconds, hardware=hardware, say=note)
    if dry_run:
        for link, script in zip(links, scripts, strict=True):
            say(f"# ---- {link.stage}{f', after {link.after}' if link.after else ''}\n{script}")
        return {}
    with submitting(run_dir):
        check_not_held(run_dir)
        check_before(recipe, first=wanted[0])
        _write_recipes(recipe, folder=folder)
        ids = _submit(links, run_dir=run_dir, say=say)
    say(f"logs and scripts: {folder}; see `eyas slurm status {quote(str(run_dir))}`")
    return ids


def _commented(say: Say) -> Say:
    """Says a line as a comment of the shell, among scripts."""
    return lambda line: say(f"# {line}")


def _submit(links: Sequence[Link], *, run_dir: Path, say: Say) -> dict[str, str]:
    ids: dict[str, str] = {}
    for link in links:
        ids[link.stage] = _submit_one(link, ids=ids, run_dir=run_dir)
        say(f"{link.stage}: job {ids[link.stage]}{f', after {ids[link.after]}' if link.after else ''}")
    return ids


def _stages(asked: Sequence[str], *, options: Options) -> list[str]:
    unknown = [stage for stage in asked if stage not in STAGES]
    if unknown:
        raise ValueError(f"--stage {unknown[0]}: there is no such stage; there are {', '.join(STAGES)}")
    if options.array is not None and list(asked) not in (["extract"], ["score"], ["train"]):
        raise ValueError(
            "--array chooses tasks of one stage: name it with --stage extract, --stage score, or --stage train"
        )
    if options.array is not None:
        tasks_of(options.array)  # refuses what is no list of tasks
    return [stage for stage in STAGES if not asked or stage in asked]


def _links(recipe: Recipe, *, folder: Path, stages: Sequence[str], site: Site, options: Options) -> list[Link]:
    if recipe.sweep:
        sweep_points(recipe)  # a combination that the schema refuses is said now
        return plan_sweep(recipe, folder, stages=stages, site=site, options=options)
    if options.array is not None and stages == ["train"]:
        raise ValueError("--array: the recipe has no sweep, so its training is one job; leave --array out")
    return plan_chain(recipe, folder / "recipe.yaml", stages=stages, site=site, options=options)


def _check_name(run_dir: Path) -> None:
    """Blanks and quotes are quoted; what SLURM and the scripts fill in is refused."""
    for sign in ("%", "\\", "{task}"):
        if sign in str(run_dir):
            raise ValueError(
                f"run_dir: '{sign}' in '{run_dir}' means something else in the names of SLURM's logs; choose another name"
            )


def _check(recipe: Recipe, reference: str, *, launch: str | None, site: Site, refuse: bool, say: Say) -> None:
    """Whether all that the jobs read is there, on disks that their nodes see; said only, where nothing is submitted."""
    try:
        _check_files(recipe, reference, launch=launch, site=site)
    except ValueError as error:
        if refuse:
            raise
        say(f"would be refused on this machine: {error}")


def _check_files(recipe: Recipe, reference: str, *, launch: str | None, site: Site) -> None:
    recipes = [recipe, *(point.recipe for point in sweep_points(recipe))] if recipe.sweep else [recipe]
    named = {path for each in recipes for path in named_paths(each, launch=launch, site=site)}
    given = [Path(reference)] if Path(reference).is_file() else []
    check_paths([*given, recipe.run_directory, Path.cwd(), *sorted(named)], shared=site.shared_paths)


def _write_recipes(recipe: Recipe, *, folder: Path) -> None:
    write_text(folder / "recipe.yaml", dump_recipe(without_sweep(recipe)))
    if recipe.sweep:
        write_text(folder / "sweep.yaml", dump_recipe(recipe))
    else:
        (folder / "sweep.yaml").unlink(missing_ok=True)


def _submit_one(link: Link, *, ids: dict[str, str], run_dir: Path) -> str:
    job = with_dependency(link, ids=ids)
    entry = Entry(
        stage=link.stage,
        name=job.name,
        output=job.output,
        array=job.array,
        dependency=job.dependency,
        after=link.after if job.dependency else None,
        processes=link.processes,
    )
    return submit_entry(run_dir, entry, script=render(job)).job
