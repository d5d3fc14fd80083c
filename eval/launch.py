"""Running one start as a child process: time limit, log, resume, and a clean end on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from eyas.eval.plan import StartPlan
from eyas.heads.files import read_json, write_json

WORKER = (sys.executable, "-m", "eyas.eval.engine")
GRACE_SECONDS = 10
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
        """Run `plan`, or skip it when `stem`.jsonl already holds its result. Returns whether a result is there.

        Writes stem.plan.json, stem.log (the child's stderr), and either stem.jsonl with stem.json or
        stem.failed.json. A failure costs this start only.
        """
        result, failure = stem.with_suffix(".jsonl"), stem.with_suffix(".failed.json")
        plan_path = stem.with_suffix(".plan.json")
        if result.is_file() and plan_path.is_file() and read_json(plan_path) == plan.to_json():
            return True
        for stale in (result, result.with_suffix(".json"), failure):
            stale.unlink(missing_ok=True)
        write_json(plan_path, plan.to_json())
        try:
            reason = self._execute(plan_path, result, stem.with_suffix(".log"))
        finally:
            result.with_name(result.name + ".partial").unlink(missing_ok=True)
        if reason is None and not result.is_file():
            reason = "ended without writing its result"
        if reason is None:
            return True
        tail = stem.with_suffix(".log").read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        write_json(failure, {"arm": plan.arm, "start": plan.start, "reason": reason, "log_tail": tail})
        self.relay(f"{plan.start:03d} {plan.arm:<4} failed: {reason}; see {stem.with_suffix('.log')}\n")
        return False

    def _execute(self, plan_path: Path, result: Path, log_path: Path) -> str | None:
        """Run the child to its end; None, or why it failed."""
        with log_path.open("w", encoding="utf-8") as log:
            # A session of its own: Ctrl-C reaches only this process, which then ends the child and all its children.
            child = subprocess.Popen(
                [*self.command, str(plan_path), str(result)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
                start_new_session=True,
            )
            assert child.stdout is not None
            reader = threading.Thread(target=self._relay_lines, args=(child.stdout,), daemon=True)
            reader.start()
            try:
                code = child.wait(timeout=self.timeout_s)
            except subprocess.TimeoutExpired:
                return f"timed out after {self.timeout_s:g} s"
            finally:
                end_process_group(child)
                reader.join(timeout=GRACE_SECONDS)
        return None if code == 0 else f"exit code {code}"

    def _relay_lines(self, stream: IO[str]) -> None:
        for line in stream:
            self.relay(line)


def end_process_group(child: subprocess.Popen[str]) -> None:
    """Ask the child's process group to end, wait, then kill it. Does nothing to a child that ended by itself."""
    if child.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE_SECONDS)
            return
