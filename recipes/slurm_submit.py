"""Submitting a recipe: check, write the scripts into the run directory, hand them to sbatch, record what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.heads.files import read_json, write_json, write_text
from eyas.recipes.load import dump_recipe, load_recipe
from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_checks import RECORD, check_no_live_job, check_paths, check_time, measured_step_seconds
from eyas.recipes.slurm_jobs import STAGES, Link, Options, plan_chain, plan_sweep, with_dependency
from eyas.recipes.sweep import sweep_points, without_sweep
from eyas.slurm.sbatch import require_slurm
from eyas.slurm.sbatch import submit as sbatch
from eyas.slurm.script import Job, render
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
    wanted = _stages(stages, options=options)
    run_dir = recipe.run_directory.absolute()
    folder = run_dir / RECORD.parent
    links = _links(recipe, folder=folder, stages=wanted, site=site, options=options)
    if dry_run:
        for link in links:
            say(f"# ---- {link.stage}{f', after {link.after}' if link.after else ''}\n{render(link.job)}")
        return {}
    require_slurm()
    _check(recipe, reference, run_dir=run_dir, links=links, site=site)
    folder.mkdir(parents=True, exist_ok=True)
    _write_recipes(recipe, folder=folder)
    ids: dict[str, str] = {}
    for link in links:
        ids[link.stage] = _submit_one(link, ids=ids, folder=folder)
        say(f"{link.stage}: job {ids[link.stage]}{f', after {ids[link.after]}' if link.after else ''}")
    say(f"logs and scripts: {folder}; see `eyas slurm status {run_dir}`")
    return ids


def _stages(asked: Sequence[str], *, options: Options) -> list[str]:
    unknown = [stage for stage in asked if stage not in STAGES]
    if unknown:
        raise ValueError(f"--stage {unknown[0]}: there is no such stage; there are {', '.join(STAGES)}")
    if options.array is not None and list(asked) not in (["extract"], ["score"], ["train"]):
        raise ValueError(
            "--array chooses tasks of one stage: name it with --stage extract, --stage score, or --stage train"
        )
    return [stage for stage in STAGES if not asked or stage in asked]


def _links(recipe: Recipe, *, folder: Path, stages: Sequence[str], site: Site, options: Options) -> list[Link]:
    if recipe.sweep:
        sweep_points(recipe)  # a combination that the schema refuses is said now
        return plan_sweep(recipe, folder, stages=stages, site=site, options=options)
    if options.array is not None and stages == ["train"]:
        raise ValueError("--array: the recipe has no sweep, so its training is one job; leave --array out")
    return plan_chain(recipe, folder / "recipe.yaml", stages=stages, site=site, options=options)


def _check(recipe: Recipe, reference: str, *, run_dir: Path, links: Sequence[Link], site: Site) -> None:
    named = Path(reference)
    check_paths([*([named] if named.is_file() else []), run_dir], shared=site.shared_paths)
    check_no_live_job(run_dir)
    for link in links:
        if link.job.template == "train":
            check_time(
                recipe,
                time=link.job.resources.time,
                signal_seconds=site.signal_seconds,
                step_seconds=measured_step_seconds(run_dir, batch_tokens=recipe.train.batch_tokens),
            )


def _write_recipes(recipe: Recipe, *, folder: Path) -> None:
    write_text(folder / "recipe.yaml", dump_recipe(without_sweep(recipe)))
    if recipe.sweep:
        write_text(folder / "sweep.yaml", dump_recipe(recipe))


def _submit_one(link: Link, *, ids: dict[str, str], folder: Path) -> str:
    """Write the script, submit it, record its id at once: a kill in between leaves no job that nobody knows."""
    job = with_dependency(link, ids=ids)
    record: dict[str, Any] = read_json(folder / RECORD.name) if (folder / RECORD.name).is_file() else {"jobs": []}
    script = folder / f"{len(record['jobs']):03d}-{link.stage}.sbatch"
    write_text(script, render(job))
    job_id = sbatch(script)
    record["jobs"].append(_entry(link.stage, job, job_id=job_id, script=script))
    write_json(folder / RECORD.name, record)
    return job_id


def _entry(stage: str, job: Job, *, job_id: str, script: Path) -> dict[str, Any]:
    return {
        "job": job_id,
        "stage": stage,
        "script": str(script),
        "array": job.array,
        "dependency": job.dependency,
        "output": job.output,
        "submitted": datetime.now(UTC).isoformat(timespec="seconds"),
    }
