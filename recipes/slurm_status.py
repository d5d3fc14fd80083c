"""How a run under SLURM stands: its stages, its jobs, the training's steps, speed and end, and where the logs are."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from eyas.heads.files import read_json
from eyas.recipes.run import stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_record import Entry, Known, arm_directory, known_jobs, read_entries, recipe_of
from eyas.recipes.stage import MANIFEST
from eyas.recipes.sweep import FOLDER, point_directory, sweep_points, without_sweep
from eyas.slurm.sbatch import FORGOTTEN, JobState
from eyas.train.tracking import METRICS_NAME, read_metrics


def status_lines(run_dir: Path) -> list[str]:
    """What `eyas slurm status` prints.

    Raises:
        ValueError: the directory is no run of eyas.
    """
    recipe = recipe_of(run_dir)
    run_dir = run_dir.absolute()
    lines = [f"{recipe.name}: {run_dir}"]
    for stage in _stages(recipe):
        lines.append(f"  {stage:<11}{_stage_state(run_dir, stage)}")
        if stage == "score":
            lines += [f"    {line}" for line in _arms(run_dir, recipe)]
    lines += [f"  {line}" for line in (_sweep(run_dir, recipe) if recipe.sweep else _training(run_dir, recipe))]
    return lines + _jobs(run_dir)


def _stages(recipe: Recipe) -> list[str]:
    """Stages of the run itself: a sweep's heads have runs of their own."""
    if not recipe.sweep:
        return stage_names(recipe, last="score")
    return stage_names(without_sweep(recipe), last="prepare" if recipe.features.mode == "online" else "extract")


def _stage_state(run_dir: Path, stage: str) -> str:
    return _directory_state(run_dir / ("features" if stage == "extract" else stage))


def _directory_state(folder: Path) -> str:
    """By what lies there; whether it is stale only the pipeline knows."""
    if (folder / MANIFEST).is_file():
        manifest = read_json(folder / MANIFEST)
        return f"stands ({manifest['seconds']:.0f} s, {manifest['finished_at']})"
    return "under way" if folder.with_name(f"{folder.name}.partial").is_dir() else "not begun"


def _arms(run_dir: Path, recipe: Recipe) -> list[str]:
    """Arms that tasks measure alone, each in a directory of its own, once one has begun."""
    folders = {arm: arm_directory(run_dir, recipe, arm) for arm in recipe.score.arm_names}
    states = {arm: (_directory_state(folder), folder) for arm, folder in folders.items()}
    if all(state == "not begun" for state, _ in states.values()):
        return []
    return [
        f"arm {arm}: {state}{f', {folder}' if state.startswith('stands') else ''}"
        for arm, (state, folder) in states.items()
    ]


def _sweep(run_dir: Path, recipe: Recipe) -> list[str]:
    """Each combination's training, and the table."""
    lines = []
    moved = recipe.model_copy(update={"run_dir": str(run_dir)})
    for point in sweep_points(moved):
        folder = point_directory(moved, point.number)
        lines.append(f"{FOLDER}/{point.number} {point.label}: {_stage_state(folder, 'train')}")
        lines += [f"  {line}" for line in _training(folder, point.recipe)]
    table = run_dir / FOLDER / "sweep.md"
    return [*lines, f"table: {table if table.is_file() else 'not written yet'}"]


def _training(run_dir: Path, recipe: Recipe) -> list[str]:
    """Steps, speed, time left and held-out tau of a training that is under way or done."""
    finished = not (run_dir / "train.partial").is_dir()
    folder = run_dir / ("train" if finished else "train.partial")
    records = read_metrics(folder / METRICS_NAME)
    if not records:
        return []
    last = next((record for record in reversed(records) if "tokens_per_second" in record), records[-1])
    taus = [record["heldout/tau"] for record in records if "heldout/tau" in record]
    epoch, step = last.get("epoch", 0.0), last["step"]
    total = round(step * recipe.train.epochs / epoch) if epoch and not finished else None
    words = [
        f"training: step {step}{f' of about {total}' if total else ''}, epoch {epoch:.2f} of {recipe.train.epochs}"
    ]
    rate = last.get("tokens_per_second")
    if rate:
        words.append(f"{rate:,.0f} tokens/s")
        if total:
            words.append(f"about {timedelta(seconds=round((total - step) * recipe.train.batch_tokens / rate))} left")
    if taus:
        words.append(f"last held-out tau {taus[-1]:.3f}")
    if finished and (folder / "heldout.json").is_file():
        words.append(f"tau of the head kept {read_json(folder / 'heldout.json')['heldout_tau']:.3f}")
    marker = folder / "REQUEUE"
    if marker.is_file():
        left = read_json(marker)
        by = f" by {left['signal']}" if left.get("signal") else ""
        words.append(f"stopped at step {left['step']}{by}, to be continued")
    return [", ".join(words)]


def _jobs(run_dir: Path) -> list[str]:
    if not read_entries(run_dir):
        return ["no jobs were submitted for this run (`eyas slurm submit`)"]
    try:
        known = known_jobs(run_dir)
    except ValueError as error:
        return ["jobs:", f"  {error}"]
    return ["jobs:", *(f"  {line}" for each in known for line in _job_lines(each))]


def _job_lines(known: Known) -> list[str]:
    return [_job_line(known.entry, state) for state in known.states]


def _job_line(entry: Entry, state: JobState) -> str:
    words = "SLURM has forgotten it and its result is not there" if state.state == FORGOTTEN else state.state
    parts = [f"{state.job} {entry.stage}: {words}"]
    if state.reason not in ("None", ""):
        parts.append(state.reason)
    if state.nodes not in ("(null)", ""):
        parts.append(f"on {state.nodes}")
    if state.elapsed and state.state != "PENDING":
        parts.append(state.elapsed)
    if state.restarts:
        parts.append(f"{state.restarts} restart{'s' if state.restarts > 1 else ''}")
    job, _, task = state.job.partition(";")[0].partition("_")
    log = entry.output.replace("%j", job).replace("%A", job).replace("%a", task if task.isdigit() else "*")
    return f"{', '.join(parts)}; log {log}"
