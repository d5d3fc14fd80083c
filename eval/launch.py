"""Running starts as child processes: time limit, log, resume, and what is kept of a start that fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from eyas.eval.child import Child, started_child
from eyas.eval.paired import PARTNER_FAILED, drive_pair
from eyas.eval.plan import StartPlan
from eyas.heads.files import read_json, write_json, write_text

WORKER = (sys.executable, "-m", "eyas.eval.engine")
LOG_TAIL_LINES = 30


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

        Writes stem.plan.json, stem.log (the child's stderr) and stem.jsonl with stem.json. A failure is recorded in
        stem.failed.json and costs this start only: the blocks that it had finished stay in stem.jsonl.
        """
        if is_finished(plan, stem):
            return True
        _begin(plan, stem)
        try:
            with self._started(stem) as child:
                reason = child.wait(timeout_s=self.timeout_s)
        except BaseException:
            _partial(stem).unlink(missing_ok=True)
            raise
        return self._conclude(plan, stem, reason=_reason(reason, stem))

    def run_pair(self, plans: tuple[StartPlan, StartPlan], stems: tuple[Path, Path]) -> bool:
        """Run two starts at the same time, their blocks alternating; returns whether both results are whole.

        A pair of which one fails is void as a whole: a block without its partner is no comparison.
        """
        if all(is_finished(plan, stem) for plan, stem in zip(plans, stems, strict=True)):
            return True
        for plan, stem in zip(plans, stems, strict=True):
            _begin(plan, stem)
        try:
            with self._started(stems[0], "--wait") as one, self._started(stems[1], "--wait") as other:
                blocks = len(plans[0].cells) * plans[0].blocks
                reasons = drive_pair((one, other), blocks=blocks, timeout_s=2 * self.timeout_s)
        except BaseException:
            _discard(stems)
            raise
        found = [_reason(reason, stem) for reason, stem in zip(reasons, stems, strict=True)]
        if any(found):
            _discard(stems)
            found = [reason or PARTNER_FAILED for reason in found]
        whole = [
            self._conclude(plan, stem, reason=reason) for plan, stem, reason in zip(plans, stems, found, strict=True)
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
            return True
        kept = _salvage(_partial(stem), stem.with_suffix(".jsonl"))
        tail = stem.with_suffix(".log").read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        failure = {"arm": plan.arm, "start": plan.start, "reason": reason, "kept_blocks": kept, "log_tail": tail}
        write_json(stem.with_suffix(".failed.json"), failure)
        self.relay(f"{plan.start:03d} {plan.arm:<4} failed: {reason}; see {stem.with_suffix('.log')}\n")
        return False


def is_finished(plan: StartPlan, stem: Path) -> bool:
    """Whether the whole result of exactly this plan lies at `stem`."""
    plan_path = stem.with_suffix(".plan.json")
    if stem.with_suffix(".failed.json").exists() or not stem.with_suffix(".jsonl").is_file():
        return False
    return plan_path.is_file() and read_json(plan_path) == plan.to_json()


def _begin(plan: StartPlan, stem: Path) -> None:
    """Remove what an earlier attempt left and write the plan."""
    for suffix in (".jsonl", ".json", ".failed.json"):
        stem.with_suffix(suffix).unlink(missing_ok=True)
    _partial(stem).unlink(missing_ok=True)
    write_json(stem.with_suffix(".plan.json"), plan.to_json())


def _reason(reason: str | None, stem: Path) -> str | None:
    """Why a start failed; ending well without a result is a failure too."""
    if reason is None and not stem.with_suffix(".jsonl").is_file():
        return "ended without writing its result"
    return reason


def _discard(stems: Sequence[Path]) -> None:
    for stem in stems:
        _partial(stem).unlink(missing_ok=True)
        stem.with_suffix(".jsonl").unlink(missing_ok=True)


def _partial(stem: Path) -> Path:
    return stem.with_suffix(".jsonl.partial")


def _salvage(partial: Path, result: Path) -> int:
    """Make the finished blocks of a failed start its result; returns how many there are."""
    blocks = finished_blocks(partial)
    partial.unlink(missing_ok=True)
    if blocks and result.with_suffix(".json").is_file():
        write_text(result, "".join("".join(block) for block in blocks))
        return len(blocks)
    result.unlink(missing_ok=True)
    result.with_suffix(".json").unlink(missing_ok=True)
    return 0


def finished_blocks(partial: Path) -> list[list[str]]:
    """The lines of each block that is complete in a file of records, the block's own line last; a torn end is left out."""
    blocks: list[list[str]] = []
    lines: list[str] = []
    for line in partial.read_text(encoding="utf-8").splitlines(keepends=True) if partial.is_file() else ():
        lines.append(line)
        with suppress(json.JSONDecodeError):
            if line.endswith("\n") and json.loads(line)["kind"] == "cell":
                blocks.append(lines)
                lines = []
    return blocks
