"""How a run under SLURM stands: its stages, its jobs, the training's steps, speed and end, and where the logs are."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from eyas.heads.files import read_json
from eyas.recipes.run import stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_checks import RECORD
from eyas.slurm.sbatch import JobState, job_states

MANIFEST = "manifest.json"


def status_lines(run_dir: Path) -> list[str]:
    """What `eyas slurm status` prints.

    Raises:
        ValueError: the directory is no run of eyas.
    """
    recipe = _recipe_of(run_dir)
    lines = [f"{recipe.name}: {run_dir}"]
    for stage in stage_names(recipe, last="score"):
        lines.append(f"  {stage:<11}{_stage_state(run_dir, stage)}")
    lines += [f"  {line}" for line in _training(run_dir, recipe)]
    jobs = read_json(run_dir / RECORD)["jobs"] if (run_dir / RECORD).is_file() else []
    if not jobs:
        return [*lines, "no jobs were submitted for this run (`eyas slurm submit`)"]
    lines.append("jobs:")
    for entry in jobs:
        lines += [f"  {line}" for line in _job_lines(entry)]
    return lines


def _recipe_of(run_dir: Path) -> Recipe:
    for path in (run_dir / "recipe.yaml", run_dir / "slurm" / "recipe.yaml"):
        if path.is_file():
            return Recipe.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    raise ValueError(f"{run_dir} is no run directory of eyas (it has no recipe.yaml); name the run_dir of a recipe")


def _stage_state(run_dir: Path, stage: str) -> str:
    """By what lies there; whether it is stale only the pipeline knows."""
    folder = run_dir / ("features" if stage == "extract" else stage)
    if (folder / MANIFEST).is_file():
        return (
            f"stands ({read_json(folder / MANIFEST)['seconds']:.0f} s, {read_json(folder / MANIFEST)['finished_at']})"
        )
    return "under way" if folder.with_name(f"{folder.name}.partial").is_dir() else "not begun"


def _training(run_dir: Path, recipe: Recipe) -> list[str]:
    """Steps, speed, time left and held-out tau of a training that is under way."""
    folder = run_dir / "train.partial"
    records = _records(folder / "metrics.jsonl")
    if not records:
        return []
    last = next((record for record in reversed(records) if "tokens_per_second" in record), records[-1])
    taus = [record["heldout/tau"] for record in records if "heldout/tau" in record]
    epoch, step = last.get("epoch", 0.0), last["step"]
    total = round(step * recipe.train.epochs / epoch) if epoch else None
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
    marker = folder / "REQUEUE"
    if marker.is_file():
        words.append(f"stopped at step {read_json(marker)['step']} by {read_json(marker)['signal']}, to be continued")
    return [", ".join(words)]


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be half written


def _job_lines(entry: dict[str, Any]) -> list[str]:
    states = job_states(entry["job"])
    if not states:
        return [f"{entry['job']} {entry['stage']}: ended long ago, or another cluster's; log {entry['output']}"]
    return [_job_line(entry, state) for state in states]


def _job_line(entry: dict[str, Any], state: JobState) -> str:
    parts = [f"{state.job} {entry['stage']}: {state.state}"]
    if state.reason not in ("None", ""):
        parts.append(state.reason)
    if state.nodes not in ("(null)", ""):
        parts.append(f"on {state.nodes}")
    parts += [f"{state.elapsed}", f"{state.restarts} restarts"] if state.state != "PENDING" else []
    job, _, task = state.job.partition("_")
    log = entry["output"].replace("%j", job).replace("%A", job).replace("%a", task or "*")
    return f"{', '.join(parts)}; log {log}"
