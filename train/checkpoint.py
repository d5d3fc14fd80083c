"""Checkpoints of a training run: what it needs to go on to the bit, and the heads that they refer to.

    checkpoints/step-00000200/   weights, optimizer, ema (if any), rng .safetensors; state.json; files.json
    checkpoints/latest.json      the newest checkpoint and the best head, for readers; nothing here trusts it
    heads/step-00000200/         a head directory, kept for the best step of every checkpoint

Only the head's trained parameters are in them, whole and in float32, by name: the target's pieces are frozen and
shared. checkpoint_files.py has the guarantees about kills, power cuts and bad disks.

Writing happens in a background thread while training goes on. `save` takes its tensors over: the caller hands in copies
(as TrainingEngine.weights and optimizer_state give them) that nothing changes afterwards. So a head whose weights and
optimiser state are S bytes needs S more on the CPU while a checkpoint is written, and never twice that: a second save
waits for the first.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.heads.differences import differences
from eyas.heads.files import read_json, write_json
from eyas.heads.formats.files import stored_names
from eyas.train.checkpoint_files import (
    RECORD,
    BrokenCheckpoint,
    check_directory,
    clear_broken,
    clear_leftovers,
    remove_directory,
    set_aside,
    step_name,
    step_of,
    whole_directories,
    write_directory,
)

LATEST = "latest.json"


@dataclass
class TrainingState:
    """Where a run stands. Steps are optimiser steps.

    Attributes:
        step: steps done, which is also the cursor in the order of batches.
        best_step, best_tau: of the best evaluation so far; step -1 before the first one.
        evaluations: held-out evaluations done. since_best: those since the best one, and since the TTT warm-up.
        skipped: steps left out because their gradient was not finite. spikes: losses far above those before them.
        tokens, slots: trained on so far, over all processes; slots count every TTT step.
        wandb_id: of the wandb run, for a run directory that lost its own record of it; None where there is none.
    """

    step: int = 0
    best_step: int = -1
    best_tau: float = 0.0
    evaluations: int = 0
    since_best: int = 0
    skipped: int = 0
    spikes: int = 0
    tokens: int = 0
    slots: int = 0
    wandb_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was found whole. Tensors are read each time they are asked for."""

    directory: Path
    state: TrainingState
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.state.step

    @property
    def weights(self) -> dict[str, Tensor]:
        """Trained parameters by name."""
        return load_file(self.directory / "weights.safetensors")

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """Optimiser state, "<parameter>/<name>"."""
        return load_file(self.directory / "optimizer.safetensors")

    @property
    def ema(self) -> dict[str, Tensor] | None:
        """Averages of the weights by parameter name; None when the run keeps none."""
        path = self.directory / "ema.safetensors"
        return load_file(path) if path.is_file() else None

    @property
    def rng(self) -> dict[str, Tensor]:
        """Random state of every process (rng.py)."""
        return load_file(self.directory / "rng.safetensors")


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: Path, *, settings: dict[str, Any], keep: int, say: Callable[[str], None]) -> None:
        """
        Args:
            settings: JSON values that a checkpoint must agree with to be continued; not the number of processes.
            keep: newest checkpoints that stay on disk.
            say: takes a line that the user should read.
        """
        assert keep >= 1, keep
        self._run_dir, self._parent = run_dir, run_dir / "checkpoints"
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._keep, self._say = keep, say
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: bytes | None = None

    def newest(self) -> Saved | None:
        """The newest whole checkpoint; None when there is none. Broken ones are named and set aside.

        Every process may call it at the same time, before anything is saved.

        Raises:
            ValueError: the checkpoint was made with other settings; names them.
        """
        clear_leftovers(self._parent)
        broken = 0
        for directory in reversed(whole_directories(self._parent)):
            try:
                saved = self._open(directory)
            except BrokenCheckpoint as reason:
                aside = set_aside(directory)
                self._say(
                    f"checkpoint {directory} is broken: {reason}; set aside as {aside.name}, taking the one before"
                )
                broken += 1
                continue
            self._prune(saved.step)  # a kill may have come between writing the last one and this
            return saved
        if broken:
            self._say(f"no whole checkpoint is left in {self._parent}; training starts from the beginning")
        return None

    def save(
        self,
        *,
        weights: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        ema: dict[str, Tensor] | None,
        state: TrainingState,
        rng: dict[str, Tensor],
        facts: dict[str, Any],
    ) -> None:
        """Begin to write a checkpoint and return; the tensors are on the CPU and belong to this object from now on.

        Waits for the checkpoint before, if that is not on disk yet. A state that this object has saved is not written
        again.

        Raises:
            OSError: the checkpoint before could not be written, for example because the disk is full.
        """
        self.wait()
        values = {"state": asdict(state), "settings": self._settings, "facts": facts}
        content = f"{json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()
        if content == self._written:
            return
        tensors = {"weights": weights, "optimizer": optimizer, "rng": rng} | ({} if ema is None else {"ema": ema})
        # No daemon: a process that ends by an error still finishes the checkpoint that it began.
        self._writer = threading.Thread(
            target=self._write, args=(state.step, tensors, content), name="eyas-checkpoint", daemon=False
        )
        self._writer.start()

    def wait(self) -> None:
        """Until all that was saved is on disk.

        Raises:
            OSError: the disk is full or failed; the checkpoints before are untouched.
            RuntimeError: something else kept the checkpoint from being written.
        """
        if self._writer is None:
            return
        self._writer.join()
        self._writer, error, self._error = None, self._error, None
        if isinstance(error, OSError):
            raise error
        if error is not None:
            raise RuntimeError(f"a checkpoint in {self._parent} could not be written: {error}") from error

    def _write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], record: bytes) -> None:
        """Write, publish and prune; runs in the background thread."""
        final = self._parent / step_name(step)
        try:
            write_directory(final, tensors=tensors, record=record)
            self._written = record
            best_step = json.loads(record)["state"]["best_step"]
            best = None if best_step < 0 else f"heads/{step_name(best_step)}"
            write_json(
                self._parent / LATEST, {"step": step, "checkpoint": f"checkpoints/{final.name}", "best_head": best}
            )
            clear_broken(self._parent)
            self._prune(step)
        except BaseException as error:
            self._error = error
            shutil.rmtree(final.with_suffix(".tmp"), ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Drop checkpoints but the newest ones, and heads up to this step that none of those refers to."""
        directories = whole_directories(self._parent)
        for directory in directories[: -self._keep]:
            remove_directory(directory)
        referred = {_best_step(path) for path in directories[-self._keep :]}
        for head in whole_directories(self._run_dir / "heads"):
            # Later heads belong to evaluations that no checkpoint knows of yet.
            if step_of(head) <= step and step_of(head) not in referred:
                shutil.rmtree(head, ignore_errors=True)

    def _open(self, directory: Path) -> Saved:
        check_directory(directory)
        record = read_json(directory / RECORD)
        require_same_settings(record["settings"], self._settings, directory=directory)
        state = TrainingState(**record["state"])
        if state.best_step >= 0:
            _require_head(head_directory(self._run_dir, state.best_step))
        return Saved(directory=directory, state=state, facts=record["facts"])


def require_same_settings(saved: dict[str, Any], current: dict[str, Any], *, directory: Path) -> None:
    """
    Raises:
        ValueError: the settings differ; lists the fields with both values, and the mend.
    """
    fields = differences(saved, current)
    if fields:
        raise ValueError(
            f"checkpoint {directory} was made with other settings: {fields}; set them back to continue it, or set "
            "run_dir=... to train from the beginning elsewhere"
        )


def _require_head(directory: Path) -> None:
    """
    Raises:
        BrokenCheckpoint: there is no head, or one whose files were cut.
    """
    name = f"its best head, heads/{directory.name},"
    if not directory.is_dir():
        raise BrokenCheckpoint(f"{name} is missing")
    try:
        names = stored_names(directory)
    except (SafetensorError, OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{name} cannot be read ({error})") from error
    if not names:
        raise BrokenCheckpoint(f"{name} has no weights")


def head_directory(run_dir: Path, step: int) -> Path:
    """Where the head of an evaluated step is kept."""
    return run_dir / "heads" / step_name(step)


def _best_step(directory: Path) -> int | None:
    """Best step that a checkpoint refers to; None when an older one, which nobody has checked, is broken."""
    try:
        return read_json(directory / RECORD)["state"]["best_step"]
    except (ValueError, KeyError, TypeError):
        return None
