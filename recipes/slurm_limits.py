"""Time limits that no job could use, said before a job waits for them: by the speed that was measured, or an estimate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.recipes.schema import Recipe
from eyas.recipes.slurm_jobs import Link
from eyas.recipes.slurm_record import read_entries
from eyas.recipes.sweep import sweep_points, without_sweep
from eyas.train.tracking import METRICS_NAME, read_metrics

if TYPE_CHECKING:
    from eyas.recipes.hardware import Hardware

START_SECONDS = 120
"""What a job takes, at least, before its first step: imports, weights, the features' index."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens a second that a training may reach: what is expected, and what cannot be passed. `of` says of what.

    Attributes:
        all_answers: `expected` is what is expected were all tokens answers, the slowest that data can be.
    """

    expected: float
    at_most: float
    of: str
    all_answers: bool = False

    @property
    def estimated(self) -> bool:
        return self.expected < self.at_most


def check_hardware(hardware: str | None) -> None:
    """Refuse hardware that has no name here.

    Raises:
        ValueError: there is none of that name.
    """
    from eyas.recipes.hardware import HERE, find_hardware

    if hardware not in (None, HERE):  # what is here would be measured
        find_hardware(hardware, dtype="float32")


def check_limits(links: Sequence[Link], recipe: Recipe, *, signal_seconds: int, hardware: str | None, say: Say) -> None:
    """Refuse time limits that no job could use: told to stop as it starts, or before its first checkpoint.

    Args:
        hardware: what the nodes have, as `eyas plan --hardware` calls it; None = not told.

    Raises:
        ValueError: a limit is no time, or too short.
    """
    for link in links:
        time = link.job.resources.time
        if time is None:
            if hardware is not None and link.job.template == "train":
                say(
                    f"{link.stage}: no --time is given, and the partition's own limit is not looked at: nothing is estimated"
                )
            continue
        if seconds_of(time) <= signal_seconds:
            raise ValueError(
                f"{link.stage}: --time {time} leaves nothing: the job is told to stop {signal_seconds} s before its end "
                "(signal_seconds); ask for more time or signal later"
            )
        if link.job.template == "train":
            left = _time_left(time, signal_seconds=signal_seconds)
            _check_training(link, recipe, left=left, hardware=hardware, say=say)


def _time_left(time: str, *, signal_seconds: int) -> float:
    """Seconds of training in a job of that limit."""
    left = seconds_of(time) - signal_seconds - START_SECONDS
    if left <= 0:
        raise ValueError(
            f"--time {time} leaves nothing: the job is told to stop {signal_seconds} s before its end (signal_seconds), and "
            f"its start takes about {START_SECONDS} s; ask for more time or signal later"
        )
    return left


def _check_training(link: Link, recipe: Recipe, *, left: float, hardware: str | None, say: Say) -> None:
    recipes = [point.recipe for point in sweep_points(recipe)] if recipe.sweep else [recipe]
    speeds = _measured(recipe, recipes, processes=link.processes)
    if speeds is None:
        estimated = _estimated(recipe, hardware=hardware, devices=link.processes)
        if isinstance(estimated, str):
            say(
                f"{link.stage}: whether a checkpoint fits into --time {link.job.resources.time} is not checked: {estimated}"
            )
            return
        speeds = [estimated] * len(recipes)
    for each, speed in zip(recipes, speeds, strict=True):
        check_interval(each, left=left, speed=speed)
    say_interval(link.stage, recipes, left=left, speeds=speeds, say=say)


def check_interval(recipe: Recipe, *, left: float, speed: Speed) -> None:
    """Refuse a time in which a training could not come to its first checkpoint, even as fast as it can ever be.

    Args:
        left: seconds of training.

    Raises:
        ValueError: it is too short.
    """
    steps, interval = recipe.train.checkpoint_every, _interval(recipe, speed.at_most)
    if left < interval:
        of = f"{speed.of} at their peak" if speed.estimated else speed.of
        raise ValueError(
            f"--time leaves {left:.0f} s of training, and train.checkpoint_every={steps} steps take {interval:.0f} s or more "
            f"({speed.at_most:,.0f} tokens/s, {of}): a job that dies would lose all of it. Ask for more time, or "
            "checkpoint more often"
        )


def say_interval(stage: str, recipes: Sequence[Recipe], *, left: float, speeds: Sequence[Speed], say: Say) -> None:
    """What is expected of the slowest combination, where that is an estimate and no measurement."""
    longest, speed = max(
        ((_interval(recipe, speed.expected), speed) for recipe, speed in zip(recipes, speeds, strict=True)),
        key=lambda pair: pair[0],
    )
    if not speed.estimated:
        return
    bound = "at most " if speed.all_answers else ""
    slow = ", were all tokens answers" if speed.all_answers else ""
    short = "may NOT fit" if speed.all_answers else "does NOT fit"
    verdict = "fits" if longest <= left else f"{short}: ask for more time, or lower train.checkpoint_every"
    say(
        f"{stage}: by estimate {bound}{longest:.0f} s from checkpoint to checkpoint ({speed.expected:,.0f} tokens/s, "
        f"{speed.of}{slow}), --time leaves {left if left == math.inf else round(left)} s: {verdict}"
    )


def _interval(recipe: Recipe, tokens_per_second: float) -> float:
    return recipe.train.checkpoint_every * recipe.train.batch_tokens / tokens_per_second


def _measured(recipe: Recipe, recipes: Sequence[Recipe], *, processes: int) -> list[Speed] | None:
    """Each recipe's own speed; None when nothing was trained.

    One that has not trained is taken to be as slow as the slowest of those that have. Speed is taken to grow with the
    processes asked for, which is the best that can be.
    """
    rates = [measured_rate(each.run_directory) for each in recipes]
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    before = [entry.processes for entry in read_entries(recipe.run_directory.absolute()) if entry.stage == "train"]
    scale = processes / before[-1] if before else 1.0
    found = [(rate or min(known)) * scale for rate in rates]
    return [Speed(expected=rate, at_most=rate, of="as this run was measured") for rate in found]


def _estimated(recipe: Recipe, *, hardware: str | None, devices: int) -> Speed | str:
    """The speed by `eyas plan`'s arithmetic, of a sweep without what it changes; or why there is none."""
    if hardware is None:
        return (
            f"nothing was trained in {recipe.run_directory.absolute()} yet; name the nodes' hardware to have it estimated "
            "(--hardware h100, or in the site file)"
        )
    from eyas.recipes.hardware import find_hardware

    found = find_hardware(hardware, dtype=recipe.features.dtype)
    try:
        speed = _planned_speed(without_sweep(recipe), hardware=found, devices=devices)
    except (ValueError, OSError) as error:
        return f"nothing was trained yet, and for an estimate the target is not known here ({error})"
    if speed is None:
        return "nothing was trained yet, and for an estimate the tokens are not known before `eyas prepare`"
    return speed


def _planned_speed(recipe: Recipe, *, hardware: Hardware, devices: int) -> Speed | None:
    """Tokens a second at the assumed shares of the hardware's peak and at the peak itself; None without known tokens.

    Where only a limit of the tokens is known, any share of them may be answers, which cost most: expected is the speed
    were all of them answers, and at most that were none.
    """
    from eyas.recipes import estimate
    from eyas.recipes.estimate_tokens import estimate_tokens
    from eyas.recipes.plan_facts import TARGET_WHILE_TRAINING, PlanFacts
    from eyas.recipes.run import plan_run
    from eyas.recipes.target_size import read_target_size

    run, features = plan_run(recipe), recipe.features
    size = read_target_size(run.target_dir, dtype=features.dtype, trust_remote_code=recipe.target.trust_remote_code)
    found = estimate_tokens(run, tokens=None, answer_share=None)
    if found is None:
        return None
    total = found.tokens.total
    fewest = replace(found, tokens=estimate.Tokens(total=total, answers=0)) if found.at_most else found
    hours, least_hours = (
        PlanFacts(run=run, size=size, found=each).hours(hardware=hardware, devices=devices) for each in (found, fewest)
    )
    shares = {"train": estimate.TRAIN_SHARE}
    if features.mode == "online" and features.where == "inline":  # the target takes its turn on the same devices
        shares[TARGET_WHILE_TRAINING] = estimate.EXTRACT_SHARE
    tokens = total * recipe.train.epochs
    expected = sum(hours[name] for name in shares) * estimate.HOUR
    least = sum(least_hours[name] * share for name, share in shares.items()) * estimate.HOUR
    return Speed(
        expected=tokens / expected,
        at_most=tokens / least,
        of=f"{devices} x {hardware.name}",
        all_answers=found.at_most,
    )


def seconds_of(time: str) -> float:
    """Seconds of a time limit in one of sbatch's forms: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s, or none (UNLIMITED, 0).

    Raises:
        ValueError: it is none of them.
    """
    if time.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise ValueError(f"--time {time!r} is no time limit; write minutes, hours:minutes:seconds or days-hours")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    assert first is not None
    if days is not None:
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = (first * 60 + (second or 0)) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    return seconds or math.inf  # sbatch takes 0 for no limit


def measured_rate(run_dir: Path) -> float | None:
    """Tokens a second by the newest record of a run's training; None before it has trained."""
    for name in ("train.partial", "train"):
        records = read_metrics(run_dir / name / METRICS_NAME)
        rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
        if rates and rates[-1] > 0:
            return rates[-1]
    return None
