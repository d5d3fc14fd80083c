"""The schedule: chosen from the grid, then measured as an arm of its own in starts of its own.

Chosen and measured on the same records it would look better than it is (its parts would be the luckiest arm of each
cell), so it is measured again, alternating with fresh starts of plain decoding, of the arms it is made of, and of every
draft length that was the fastest of some cell: what it is promised not to be slower than has to run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from eyas.eval.arms import PLAIN, SCHEDULE, Arm
from eyas.eval.cost.fixed_lengths import fastest_arms, fixed_ratios
from eyas.eval.cost.schedule import Schedule, choose_schedule
from eyas.eval.cost.schedule_check import RULES, passed, schedule_rows
from eyas.eval.cost.serving import SCHEDULE_FILE, write_schedule
from eyas.eval.grid import FIRST_OF_SCHEDULE, plan_turns, run_grid
from eyas.eval.partners import partners_of
from eyas.eval.records import AR, Protocol, StartRecord, arms_of, cells_by_arm, read_starts
from eyas.eval.serve_options import served_engine
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
    cells, arms, partners = cells_by_arm(grid), arms_of(grid), partners_of(grid)
    schedule = choose_schedule(cells, arms, partners=partners, max_num_seqs=session.plan.max_num_seqs)
    write_schedule(
        session.directory,
        schedule,
        base=base,
        engine=served_engine(session.plan, measured=grid),
        environment=session.launcher.environment,
        on_cpu=on_cpu(),
    )
    say(f"schedule: {schedule_words(schedule)}")
    fastest = fastest_arms(fixed_ratios(cells, arms, partners=partners))
    beside = arms_of_schedule(schedule, fixed=session.heads, fastest=fastest, base=base) if schedule.pays else []
    turns = plan_turns(
        beside, protocol=protocol, starts_per_arm=starts_per_arm if beside else 0, first_start=FIRST_OF_SCHEDULE
    )
    run_grid(session.starts, plan=session.plan, turns=turns, launcher=session.launcher, phase="schedule")
    return beside[-1] if beside else None


def arms_of_schedule(
    schedule: Schedule, *, fixed: Sequence[Arm], fastest: AbstractSet[str], base: dict[str, Any]
) -> list[Arm]:
    """Plain decoding, the fixed draft lengths that the schedule chose or that are in `fastest`, and the schedule."""
    wanted = fastest | {choice.arm for choice in schedule.choices}
    return [
        PLAIN,
        *(arm for arm in fixed if arm.name in wanted),
        Arm(SCHEDULE, "schedule", schedule.speculative_config(base)),
    ]


def schedule_words(schedule: Schedule) -> str:
    """The ranges in words."""
    if not schedule.pays:
        return "drafting pays at no batch size; serve without the head"
    ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last, _ in schedule.ranges]
    lengths = [length for _, _, length in schedule.ranges]
    return ", ".join(f"k = {length} at batch size {where}" for where, length in zip(ranges, lengths, strict=True))


def schedule_results(score_dir: Path, starts: Sequence[StartRecord], *, seed: int) -> dict[str, Any] | None:
    """What was chosen and served (schedule.json) and whether it keeps its promise; None without a schedule.

    The choice is made once more from the grid's raw records: `choices` are those, and `recomputed_ranges` (None where the
    grid has no cell to choose from) beside `ranges` say whether what was measured is what the records lead to.
    """
    path = score_dir / SCHEDULE_FILE
    if not path.is_file():
        return None
    chosen = read_json(path)
    grid, phase = ([start for start in starts if start.phase == name] for name in ("grid", "schedule"))
    both = {start.arm for start in phase} >= {AR, SCHEDULE}
    cells = _phase_rows(phase, grid=grid, seed=seed) if both else []
    why = (
        None
        if both
        else "no start of it finished"
        if chosen["pays"]
        else "it never drafts: plain decoding, measured above"
    )
    again = _chosen_again(grid, max_num_seqs=chosen["max_num_seqs"])
    return (
        chosen
        | {"recomputed_ranges": None if again is None else again["ranges"]}
        | ({} if again is None else {"choices": again["choices"]})
        | {"rules": list(RULES), "cells": cells, "passed": passed(cells), "not_measured": why}
    )


def _phase_rows(phase: Sequence[StartRecord], *, grid: Sequence[StartRecord], seed: int) -> list[dict[str, Any]]:
    ratios = fixed_ratios(cells_by_arm(grid), arms_of(grid), partners=partners_of(grid))
    return schedule_rows(cells_by_arm(phase), arms_of(phase), grid=ratios, partners=partners_of(phase), seed=seed)


def _chosen_again(grid: Sequence[StartRecord], *, max_num_seqs: int) -> dict[str, Any] | None:
    cells, arms, partners = cells_by_arm(grid), arms_of(grid), partners_of(grid)
    if not fixed_ratios(cells, arms, partners=partners):
        return None
    return choose_schedule(cells, arms, partners=partners, max_num_seqs=max_num_seqs).to_json()
