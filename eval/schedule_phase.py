"""The schedule: chosen from the grid, then measured as an arm of its own in starts of its own.

Chosen and measured on the same records it would look better than it is (its parts would be the luckiest arm of each
cell), so it is measured again, alternating with fresh starts of plain decoding and of the arms it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.eval.arms import PLAIN, SCHEDULE, Arm
from eyas.eval.cost.schedule import Schedule, choose_schedule
from eyas.eval.cost.schedule_check import RULES, passed, schedule_rows
from eyas.eval.cost.serving import SCHEDULE_FILE, write_schedule
from eyas.eval.grid import FIRST_OF_SCHEDULE, plan_turns, run_grid
from eyas.eval.partners import partners_of
from eyas.eval.records import AR, Protocol, StartRecord, arms_of, cells_by_arm, read_starts
from eyas.eval.sessions import Session
from eyas.heads.files import read_json
from eyas.heads.serving import on_cpu


def measure_schedule(
    session: Session, *, protocol: Protocol, starts_per_arm: int, say: Callable[[str], None]
) -> Arm | None:
    """Choose a schedule from the grid's records, write it down ready for use, and measure it where it drafts at all.

    Returns its arm, or None when there is nothing to measure.
    """
    base = session.heads[0].speculative_config
    assert base is not None, "a head has a speculative_config"
    grid = [start for start in read_starts(session.starts) if start.phase == "grid"]
    if not any(start.kind == "head" for start in grid):
        say("no start of the head finished, so there is no schedule to choose")
        return None
    schedule = choose_schedule(
        cells_by_arm(grid), arms_of(grid), partners=partners_of(grid), max_num_seqs=session.plan.max_num_seqs
    )
    plan = session.plan
    write_schedule(
        session.directory,
        schedule,
        base=base,
        target=plan.target_dir,
        max_model_len=plan.max_model_len,
        dtype=plan.dtype,
        enforce_eager=plan.enforce_eager,
        on_cpu=on_cpu(),
    )
    say(f"schedule: {schedule_words(schedule)}")
    arms = arms_of_schedule(schedule, fixed=session.heads, base=base) if schedule.pays else []
    turns = plan_turns(
        arms, protocol=protocol, starts_per_arm=starts_per_arm if arms else 0, first_start=FIRST_OF_SCHEDULE
    )
    run_grid(session.starts, plan=plan, turns=turns, launcher=session.launcher, phase="schedule")
    return arms[-1] if arms else None


def arms_of_schedule(schedule: Schedule, *, fixed: Sequence[Arm], base: dict[str, Any]) -> list[Arm]:
    """Plain decoding, the fixed draft lengths that the schedule chose somewhere, and the schedule."""
    chosen = {choice.arm for choice in schedule.choices}
    best = [arm for arm in fixed if arm.name in chosen]
    return [PLAIN, *best, Arm(SCHEDULE, "schedule", schedule.speculative_config(base))]


def schedule_words(schedule: Schedule) -> str:
    """The ranges in words."""
    if not schedule.pays:
        return "drafting pays at no batch size; serve without the head"
    ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last, _ in schedule.ranges]
    lengths = [length for _, _, length in schedule.ranges]
    return ", ".join(f"k = {length} at batch size {where}" for where, length in zip(ranges, lengths, strict=True))


def schedule_results(score_dir: Path, starts: Sequence[StartRecord], *, seed: int) -> dict[str, Any] | None:
    """What was chosen (schedule.json) and whether it keeps its promise, from the raw records; None without a schedule."""
    path = score_dir / SCHEDULE_FILE
    if not path.is_file():
        return None
    chosen = read_json(path)
    phase = [start for start in starts if start.phase == "schedule"]
    both = {start.arm for start in phase} >= {AR, SCHEDULE}
    cells = schedule_rows(cells_by_arm(phase), arms_of(phase), partners=partners_of(phase), seed=seed) if both else []
    why = (
        None
        if both
        else "no start of it finished"
        if chosen["pays"]
        else "it never drafts: plain decoding, measured above"
    )
    return chosen | {"rules": list(RULES), "cells": cells, "passed": passed(cells), "not_measured": why}
