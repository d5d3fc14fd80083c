"""The experiment: which arms start in which order, and running them so that a failure costs its own cells only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.eval.arms import PLAIN, Arm, arm_plan
from eyas.eval.launch import Launcher
from eyas.eval.plan import StartPlan
from eyas.eval.records import AR, Phase, Protocol
from eyas.heads.files import read_json

PATIENCE = 2
"""Failed starts after which an arm is not started again in this call: a hanging arm would cost its time limit every time."""

FIRST_OF_SCHEDULE = 500
"""Number of the first start of the phase that measures the schedule; the grid's starts have smaller numbers."""


@dataclass(frozen=True)
class Turn:
    """One step of the order: one arm, or two that are loaded at the same time."""

    arms: tuple[Arm, ...]
    start: int
    round: int

    def stems(self, directory: Path) -> list[Path]:
        """Where the records of its starts lie, without their suffixes."""
        return [directory / f"{self.start + place:03d}-{arm.name}" for place, arm in enumerate(self.arms)]


def order_of_starts(arms: Sequence[Arm], *, starts_per_arm: int) -> list[Arm]:
    """Forwards, backwards, forwards, ...: ar k3 k1 | k1 k3 ar | ...

    A machine that slows down steadily during an even number of rounds harms every arm alike.
    """
    rounds = [list(arms) if number % 2 == 0 else list(reversed(arms)) for number in range(starts_per_arm)]
    return [arm for one_round in rounds for arm in one_round]


def plan_turns(arms: Sequence[Arm], *, protocol: Protocol, starts_per_arm: int, first_start: int = 0) -> list[Turn]:
    """The order of a phase, in rounds.

    Side by side every pair is a round of its own: each arm but AR gets pairs with AR, and either is loaded first in turn.
    """
    if protocol == "starts":
        order = order_of_starts(arms, starts_per_arm=starts_per_arm)
        return [Turn((arm,), first_start + number, number // len(arms)) for number, arm in enumerate(order)]
    others = [arm for arm in arms if arm.name != AR]
    pairs = order_of_starts(others, starts_per_arm=starts_per_arm)
    turns = []
    for number, arm in enumerate(pairs):
        pair = (PLAIN, arm) if (number // len(others)) % 2 == 0 else (arm, PLAIN)
        turns.append(Turn(pair, first_start + 2 * number, number))
    return turns


def run_grid(
    directory: Path, *, plan: StartPlan, turns: Sequence[Turn], launcher: Launcher, phase: Phase = "grid"
) -> int:
    """Run every start of `turns` with `plan`'s engine settings and cells; returns the number of whole starts.

    Starts that are whole are skipped. A start that crashes or runs out of time is recorded and keeps the blocks that it had
    finished; an arm that fails `PATIENCE` times is not tried again in this call.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_other_starts(directory, turns, phase=phase)
    failures: Counter[str] = Counter()
    whole = 0
    for turn in turns:
        name = turn.arms[-1].name if turn.arms[0].name == AR else turn.arms[0].name
        if failures[AR] >= PATIENCE and not any(directory.glob(f"*-{AR}.jsonl")):
            break  # nothing to compare with
        if failures[name] >= PATIENCE:
            launcher.relay(f"{turn.start:03d} {name:<4} not started: it failed {PATIENCE} times\n")
            continue
        if _run_turn(directory, turn, plan=plan, launcher=launcher, phase=phase):
            whole += len(turn.arms)
        else:
            failures[name] += 1
    return whole


def _run_turn(directory: Path, turn: Turn, *, plan: StartPlan, launcher: Launcher, phase: Phase) -> bool:
    stems = turn.stems(directory)
    plans = [
        arm_plan(plan, arm, start=turn.start + place, round=turn.round, phase=phase)
        for place, arm in enumerate(turn.arms)
    ]
    if len(plans) == 1:
        return launcher.run(plans[0], stems[0])
    first, second = plans
    pair = replace(first, beside=second.arm), replace(second, beside=first.arm)
    return launcher.run_pair(pair, (stems[0], stems[1]))


def remove_other_starts(directory: Path, turns: Sequence[Turn], *, phase: Phase) -> None:
    """Files of a phase's starts that are not in its order, left by an earlier session, would enter the report."""
    kept = {stem.name for turn in turns for stem in turn.stems(directory)}
    in_phase = _phase_of_numbers(phase)
    for path in directory.iterdir():
        name = path.name.split(".")[0]
        number = name.partition("-")[0]
        if name not in kept and (not number.isdigit() or in_phase(int(number))):
            path.unlink()


def _phase_of_numbers(phase: Phase) -> Callable[[int], bool]:
    if phase == "grid":
        return lambda number: number < FIRST_OF_SCHEDULE
    return lambda number: number >= FIRST_OF_SCHEDULE


def require_both_sides(directory: Path) -> None:
    """Refuse to compare when one side has no record at all.

    Raises:
        ValueError: no start of AR, or none of any other arm, left a record; names a log.
    """
    failures = read_failures(directory)
    measured = {path.stem.partition("-")[2] for path in directory.glob("*.jsonl")}
    sides = {"plain decoding (AR)": lambda name: name == AR, "the other arms": lambda name: name != AR}
    for side, belongs in sides.items():
        failed = [failure for failure in failures if belongs(failure["arm"])]
        if failed and not any(belongs(name) for name in measured):
            log = directory / f"{failed[-1]['start']:03d}-{failed[-1]['arm']}.log"
            raise ValueError(
                f"every start of {side} failed, so there is nothing to compare; the reason stands at the end of "
                f"{log}"
                ' ("timed out" in the .failed.json beside it: raise score.timeout_s)'
            )


def read_failures(directory: Path) -> list[dict[str, Any]]:
    """The recorded failures of a directory of starts."""
    return [read_json(path) for path in sorted(directory.glob("*.failed.json"))]
