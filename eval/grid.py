"""The experiment: which arms start in which order, and running them so that a failure costs its own cells only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.eval.arms import PLAIN, TWIN, Arm, arm_plan
from eyas.eval.launch import Launcher, is_finished
from eyas.eval.plan import StartPlan
from eyas.eval.records import AR, AR_TWIN, Phase, Protocol
from eyas.heads.files import read_json

PATIENCE = 2
"""Failed starts after which an arm is not started again in this call: a hanging arm would cost its time limit every time."""

MOST_STARTS = 500
"""Processes that a phase can have: the numbers of its starts, which also sort its files."""

FIRST_OF_SCHEDULE = MOST_STARTS
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

    def plans(self, plan: StartPlan, *, phase: Phase) -> list[StartPlan]:
        """What its starts do: `plan` with each arm put in, and beside which other one it runs."""
        names = [arm.name for arm in self.arms]
        beside = [None] if len(names) == 1 else names[::-1]
        return [
            replace(arm_plan(plan, arm, start=self.start + place, round=self.round, phase=phase), beside=beside[place])
            for place, arm in enumerate(self.arms)
        ]


def order_of_starts(arms: Sequence[Arm], *, starts_per_arm: int) -> list[Arm]:
    """Forwards, backwards, forwards, ...: ar k3 k1 | k1 k3 ar | ...

    A machine that slows down steadily during an even number of rounds harms every arm alike.
    """
    rounds = [list(arms) if number % 2 == 0 else list(reversed(arms)) for number in range(starts_per_arm)]
    return [arm for one_round in rounds for arm in one_round]


def plan_turns(arms: Sequence[Arm], *, protocol: Protocol, starts_per_arm: int, first_start: int = 0) -> list[Turn]:
    """The order of a phase, in rounds.

    Side by side every pair is a round of its own: each arm but AR gets pairs with AR, and either is loaded first in turn.
    As many pairs are AR beside its twin, which says how far apart two engines come to lie that do the same.

    Raises:
        ValueError: more processes than a phase can have.
    """
    require_numbers(max(1, len(arms)), protocol=protocol, starts_per_arm=starts_per_arm)
    if protocol == "starts":
        order = order_of_starts(arms, starts_per_arm=starts_per_arm)
        return [Turn((arm,), first_start + number, number // len(arms)) for number, arm in enumerate(order)]
    others = [*(arm for arm in arms if arm.name != AR), *([TWIN] if arms else [])]
    pairs = order_of_starts(others, starts_per_arm=starts_per_arm)
    turns = []
    for number, arm in enumerate(pairs):
        pair = (PLAIN, arm) if (number // len(others)) % 2 == 0 else (arm, PLAIN)
        turns.append(Turn(pair, first_start + 2 * number, number))
    return turns


def most_starts_per_arm(arms: int, *, protocol: Protocol) -> int:
    """How often each of `arms` (AR among them) can start in a phase; side by side there are as many pairs, with the twin."""
    return MOST_STARTS // (arms if protocol == "starts" else 2 * arms)


def require_numbers(arms: int, *, protocol: Protocol, starts_per_arm: int) -> None:
    """Refuse more starts of each of `arms` than can be numbered.

    Raises:
        ValueError: says how many can.
    """
    most = most_starts_per_arm(arms, protocol=protocol)
    if starts_per_arm > most:
        raise ValueError(
            f"{starts_per_arm} starts of each of {arms} arms are more than the {MOST_STARTS} processes that a session "
            f"numbers; set score.starts_per_arm to {most} at most, or measure fewer arms"
        )


def run_grid(
    directory: Path, *, plan: StartPlan, turns: Sequence[Turn], launcher: Launcher, phase: Phase = "grid"
) -> int:
    """Run every start of a phase's order, and of that phase nothing else stays in `directory`; returns whole starts."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_other_starts(directory, turns, phase=phase)
    return run_turns(directory, plan=plan, turns=turns, launcher=launcher, phase=phase)


def run_turns(
    directory: Path, *, plan: StartPlan, turns: Sequence[Turn], launcher: Launcher, phase: Phase = "grid"
) -> int:
    """Run every start of `turns` with `plan`'s engine settings and cells; returns the number of whole starts.

    Starts that are whole are skipped. A start that crashes or runs out of time is recorded and keeps the blocks that it had
    finished; an arm that fails `PATIENCE` times is not tried again in this call.
    """
    directory.mkdir(parents=True, exist_ok=True)
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
    stems, plans = turn.stems(directory), turn.plans(plan, phase=phase)
    if len(plans) == 1:
        return launcher.run(plans[0], stems[0])
    return launcher.run_pair((plans[0], plans[1]), (stems[0], stems[1]))


def finished_rounds(directory: Path, *, plan: StartPlan, arms: Sequence[Arm]) -> int:
    """How many times every arm of the grid has started and finished, in the order of the grid."""
    turns = plan_turns(
        arms, protocol=plan.protocol, starts_per_arm=most_starts_per_arm(len(arms), protocol=plan.protocol)
    )
    done = 0
    for turn in turns:
        if not all(map(is_finished, turn.plans(plan, phase="grid"), turn.stems(directory))):
            break
        done += 1
    return done // len(plan_turns(arms, protocol=plan.protocol, starts_per_arm=1))


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
        ValueError: no start of AR, or none of any arm to compare with it, left a record; names a log.
    """
    failures = read_failures(directory)
    measured = {path.stem.partition("-")[2] for path in directory.glob("*.jsonl")}
    sides = {"plain decoding (AR)": lambda name: name == AR, "the other arms": lambda name: name not in (AR, AR_TWIN)}
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
