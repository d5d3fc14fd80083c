"""Running starts as child processes: time limit, log, resume, and what is kept of a start that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eyas.eval.child import Child, started_child
from eyas.eval.paired import PARTNER_FAILED, drive_pair
from eyas.eval.plan import StartPlan
from eyas.eval.salvage import forget_earlier, remove_records, set_aside, settle
from eyas.heads.files import read_json, write_json

WORKER = (sys.executable, "-m", "eyas.eval.engine")
LOG_TAIL_LINES = 30
INTERRUPTED = "interrupted"
KILLED = "killed while it ran"


def relay_to_stdout(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


@dataclass(frozen=True)
class Launcher:
    """How starts are run: the child's environment and time limit, where its progress lines go, what is executed."""

    environment: dict[str, str]
    timeout_s: float
    relay: Callable[[str], None] = relay_to_stdout
    command: Sequence[str] = WORKER

    def run(self, plan: StartPlan, stem: Path) -> bool:
        """Run `plan`, or skip it when `stem`.jsonl already holds its whole result. Returns whether it is whole.

        Writes stem.plan.json, stem.log (the child's stderr) and stem.jsonl with stem.json. A failure or an interruption is
        recorded in stem.failed.json and costs this start only: the blocks that it had finished stay in stem.jsonl, or those
        of an earlier attempt where they are more.
        """
        if is_finished(plan, stem):
            return True
        _begin(plan, stem, keep=_is_planned(plan, stem))
        try:
            with self._started(stem) as child:
                reason = child.wait(timeout_s=self.timeout_s)
        except BaseException:
            self._conclude(plan, stem, reason=INTERRUPTED)
            raise
        return self._conclude(plan, stem, reason=_reason(reason, stem))

    def run_pair(self, plans: tuple[StartPlan, StartPlan], stems: tuple[Path, Path]) -> bool:
        """Run two starts at the same time, their blocks alternating; returns whether both results are whole.

        A pair of which one fails is void as a whole: a block without its partner is no comparison.
        """
        if all(is_finished(plan, stem) for plan, stem in zip(plans, stems, strict=True)):
            return True
        for plan, stem in zip(plans, stems, strict=True):
            _begin(plan, stem, keep=False)
        starters = partial(self._started, stems[0], "--wait"), partial(self._started, stems[1], "--wait")
        try:
            blocks = len(plans[0].cells) * plans[0].blocks
            reasons = drive_pair(starters, blocks=blocks, timeout_s=2 * self.timeout_s)
        except BaseException:
            self._conclude_pair(plans, stems, reasons=(INTERRUPTED, INTERRUPTED))
            raise
        one, other = (_reason(reason, stem) for reason, stem in zip(reasons, stems, strict=True))
        return self._conclude_pair(plans, stems, reasons=(one, other))

    def _conclude_pair(
        self, plans: tuple[StartPlan, StartPlan], stems: tuple[Path, Path], *, reasons: tuple[str | None, str | None]
    ) -> bool:
        if any(reasons):
            for stem in stems:
                remove_records(stem)
        whole = [
            self._conclude(plan, stem, reason=(reason or PARTNER_FAILED) if any(reasons) else None)
            for plan, stem, reason in zip(plans, stems, reasons, strict=True)
        ]
        return all(whole)

    def _started(self, stem: Path, *options: str) -> AbstractContextManager[Child]:
        return started_child(
            [*self.command, str(stem.with_suffix(".plan.json")), str(stem.with_suffix(".jsonl")), *options],
            environment=self.environment,
            log_path=stem.with_suffix(".log"),
            relay=self.relay,
        )

    def _conclude(self, plan: StartPlan, stem: Path, *, reason: str | None) -> bool:
        """Record a failure, if it was one, and keep what had been measured by then."""
        if reason is None:
            forget_earlier(stem)
            stem.with_suffix(".failed.json").unlink()
            return True
        _record_failure(plan, stem, reason=reason, kept_blocks=settle(stem))
        self.relay(f"{plan.start:03d} {plan.arm:<4} failed: {reason}; see {stem.with_suffix('.log')}\n")
        return False


def is_finished(plan: StartPlan, stem: Path) -> bool:
    """Whether the whole result of exactly this plan lies at `stem`."""
    if stem.with_suffix(".failed.json").exists() or not stem.with_suffix(".jsonl").is_file():
        return False
    return _is_planned(plan, stem)


def _is_planned(plan: StartPlan, stem: Path) -> bool:
    """Whether the last attempt at `stem` was at exactly this plan."""
    plan_path = stem.with_suffix(".plan.json")
    return plan_path.is_file() and read_json(plan_path) == plan.to_json()


def _begin(plan: StartPlan, stem: Path, *, keep: bool) -> None:
    """Make room for an attempt. Until it has ended it counts as failed, so that a kill at any moment leaves no half start.

    `keep`: what earlier attempts had measured is kept for the case that this one gets less far.
    """
    stem.with_suffix(".log").unlink(missing_ok=True)
    _record_failure(plan, stem, reason=KILLED, kept_blocks=0)
    if keep:
        set_aside(stem)
    else:
        remove_records(stem)
    write_json(stem.with_suffix(".plan.json"), plan.to_json())


def _record_failure(plan: StartPlan, stem: Path, *, reason: str, kept_blocks: int) -> None:
    failure = {"arm": plan.arm, "start": plan.start, "reason": reason, "kept_blocks": kept_blocks}
    write_json(stem.with_suffix(".failed.json"), failure | {"log_tail": _tail(stem)})


def _reason(reason: str | None, stem: Path) -> str | None:
    """Why a start failed; ending well without a result is a failure too."""
    if reason is None and not stem.with_suffix(".jsonl").is_file():
        return "ended without writing its result"
    return reason


def _tail(stem: Path) -> list[str]:
    """The end of the child's log; nothing of a child that never started."""
    log = stem.with_suffix(".log")
    return log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:] if log.is_file() else []
