"""What a run leaves on disk while it trains: checkpoints to go on from, and the head of the best evaluation.

Both hold whole weights, gathered from wherever the processes keep them, so how many processes there are, and how they
share the weights, can change between two starts of a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.heads.drafting import ChainStatistics
from eyas.heads.formats.write import working_layout, write_head
from eyas.train.checkpoint import Checkpoints, TrainingState, head_directory
from eyas.train.ema import Averages
from eyas.train.evaluation import Evaluation
from eyas.train.parallel.engine import TrainingEngine
from eyas.train.rng import gather_rng, restore_rng


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Saves and restores one run; every process calls every method.

    Attributes:
        ema: averages of the weights, which are evaluated and kept instead of the weights where there are any.
        facts: values that every checkpoint repeats for its reader, such as versions and the recipe.
        say: takes a line that the user should read.
    """

    engine: TrainingEngine
    evaluation: Evaluation
    checkpoints: Checkpoints
    ema: Averages
    run_dir: Path
    facts: dict[str, Any]
    say: Callable[[str], None]

    def resume(self) -> TrainingState:
        """Put the newest intact checkpoint into place; a fresh state when there is none."""
        saved = self.checkpoints.newest()
        self._require_agreement(-1 if saved is None else saved.step)
        if saved is None:
            return TrainingState()
        if saved.ema is not None:
            self.engine.load(saved.ema, None)
            self.ema.reset(updates=saved.state.step - saved.state.skipped)
        self.engine.load(saved.weights, saved.optimizer)
        if not restore_rng(saved.rng, rank=self.engine.rank, world_size=self.engine.world_size):
            self.say(
                f"the checkpoint at step {saved.step} is of {saved.facts['world_size']} processes and goes on in "
                f"{self.engine.world_size}: the same conversations in the same order, equal to rounding"
            )
        return saved.state

    def _require_agreement(self, step: int) -> None:
        """
        Raises:
            ValueError: processes found different checkpoints.
        """
        total = int(self.engine.sum(torch.tensor(step)))
        if total != step * self.engine.world_size:
            raise ValueError(
                f"the processes of this run see different checkpoints in {self.run_dir}; set run_dir=... to a file system "
                "that all nodes share"
            )

    def evaluate(self, state: TrainingState) -> ChainStatistics:
        """Held-out acceptance of the present head; a new best one is kept as a head directory."""
        with self.ema.swapped(), self.engine.whole_head() as head:
            statistics = self.evaluation.statistics(head, engine=self.engine)
            state.evaluations += 1
            if statistics.tau > state.best_tau:
                state.best_step, state.best_tau = state.step, statistics.tau
                if self.engine.is_main:
                    directory = head_directory(self.run_dir, state.step)
                    shutil.rmtree(directory, ignore_errors=True)  # what a kill in the middle of this left there
                    write_head(directory, head, dtype=torch.float32, to=working_layout(head.config))
        return statistics

    def save(self, state: TrainingState) -> None:
        """Hand a checkpoint of this step to the writer; training goes on while it is written."""
        if self.engine.is_main:
            self.checkpoints.wait()  # before there are copies of the next one
        weights, optimizer = self.engine.weights(), self.engine.optimizer_state()
        averages = None
        if self.ema.active:
            with self.ema.swapped():
                averages = self.engine.weights()
        rng = gather_rng(self.engine)
        if self.engine.is_main:
            self.checkpoints.save(
                weights=weights, optimizer=optimizer, ema=averages, state=state, rng=rng, facts=self.facts
            )

    def wait(self) -> None:
        """Until all that was saved is on disk, for every process."""
        if self.engine.is_main:
            self.checkpoints.wait()
        self.engine.barrier()
