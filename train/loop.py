"""The training loop: batches in, optimiser steps, metrics, evaluations, checkpoints.

Everything that decides what a step does is here and fits on a screen; what a step computes is in objective.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from eyas.heads.formats.write import working_layout, write_head
from eyas.heads.head import DraftHead
from eyas.train.batches import TrainingDocument, run_batches, training_document
from eyas.train.checkpoint import (
    TrainingState,
    head_directory,
    load_latest,
    prune_heads,
    save_checkpoint,
    saved_best_step,
)
from eyas.train.features.documents import Document, Documents
from eyas.train.heldout import heldout_statistics
from eyas.train.metrics import StepMetrics, Window
from eyas.train.noise import FeatureNoise
from eyas.train.objective import Losses, batch_loss, step_weights
from eyas.train.optim import Schedule, learning_rate_at, set_learning_rate
from eyas.train.preemption import StopRequest, stop_on_signals
from eyas.train.tracking import METRICS_NAME, Both, JsonLines, NoTracker, Tracker


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the loop does, step by step; steps are optimiser steps, shares are of all steps."""

    epochs: int
    batch_tokens: int
    ttt_steps: int
    ttt_warmup_share: float
    step_decay: float
    learning_rate: float
    warmup_share: float
    schedule: Schedule
    max_grad_norm: float | None
    max_grad_value: float | None
    noise: FeatureNoise
    evaluate_every: int
    checkpoint_every: int
    log_every: int
    chain_length: int
    seed: int


class HeadObjective(nn.Module):
    """Head and loss in one module, so that a distributed wrapper sees one forward call per step."""

    embedding_VH: Tensor
    target_readout_DH: Tensor

    def __init__(self, head: DraftHead, *, embedding_VH: Tensor, target_readout_DH: Tensor, losses: Losses) -> None:
        super().__init__()
        self.head = head
        self.losses = losses
        self.register_buffer("embedding_VH", embedding_VH, persistent=False)
        self.register_buffer("target_readout_DH", target_readout_DH, persistent=False)

    def forward(
        self, documents: Sequence[TrainingDocument], row_weights: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, and the sums of KL, hits and feature distances of each step."""
        result = batch_loss(
            self.head,
            documents,
            embedding_VH=self.embedding_VH,
            target_readout_DH=self.target_readout_DH,
            row_weights=row_weights,
            losses=self.losses,
        )
        return result.loss, result.kl_sums_K, result.hits_K, result.feature_sums_K


@dataclass
class Trainer:
    """One run in one process; `train` is called once."""

    accelerator: Accelerator
    objective: HeadObjective
    optimizer: torch.optim.Optimizer
    documents: Documents
    heldout: Sequence[Document]
    settings: LoopSettings
    run_dir: Path
    tracker: Tracker

    def __post_init__(self) -> None:
        self.state = load_latest(self.run_dir, module=self.objective, optimizer=self.optimizer)
        # The bare modules: accelerate replaces their forward, and the wrapped model shares their parameters.
        self.head, self.bare_optimizer = self.objective.head, self.optimizer
        self.model, self.optimizer = self.accelerator.prepare(self.objective, self.optimizer)
        self.is_main = self.accelerator.is_main_process
        if self.is_main:
            self.tracker = Both(JsonLines(self.run_dir / METRICS_NAME, resumed_step=self.state.step), self.tracker)
        else:
            self.tracker = NoTracker()

    def train(self) -> TrainingState:
        """Run to the last step and return the final state.

        Raises:
            KeyboardInterrupt: a signal asked to stop; the run was saved and continues from there when started again.
        """
        settings = self.settings
        batches = run_batches(
            self.documents.lengths,
            batch_tokens=settings.batch_tokens,
            seed=settings.seed,
            epochs=settings.epochs,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        total = len(batches)
        self.documents.start(batches, first=self.state.step)
        self.accelerator.wait_for_everyone()  # what one process had to mend in a shared cache is there for all
        with stop_on_signals() as stop, self._progress(total) as progress:
            window = Window()
            for batch in batches[self.state.step :]:
                documents = self._documents(batch)
                num_steps = 1 if self.state.step < settings.ttt_warmup_share * total else settings.ttt_steps
                window.add(self._step(documents, num_steps=num_steps, total=total), num_steps=num_steps)
                self.state.step += 1
                progress.update()
                last = self.state.step == total
                if self.state.step % settings.log_every == 0 or last:
                    progress.set_postfix(self._log(window, epoch=settings.epochs * self.state.step / total))
                    window = Window()
                if self.state.step % settings.evaluate_every == 0 or last:
                    self._evaluate()
                if self.state.step % settings.checkpoint_every == 0 or last:
                    self._save()
                if self._stop_agreed(stop):
                    self._stop(stop)
        self.tracker.finish()
        return self.state

    def _step(self, documents: list[TrainingDocument], *, num_steps: int, total: int) -> StepMetrics:
        """One optimiser step on this process's batch; rows are weighted over the batches of all processes."""
        settings = self.settings
        rows_K = torch.tensor(
            [sum(document.slots[step].shape[0] for document in documents) for step in range(num_steps)],
            device=self.accelerator.device,
        )
        rows_K = self._sum(rows_K)
        shares = step_weights(num_steps, decay=settings.step_decay)
        processes = self.accelerator.num_processes
        # Distributed averaging divides by the number of processes; a row must count the same wherever it is.
        weights = [share * processes / max(int(rows), 1) for share, rows in zip(shares, rows_K, strict=True)]
        rate = learning_rate_at(
            self.state.step,
            peak=settings.learning_rate,
            total_steps=total,
            warmup_steps=max(1, round(settings.warmup_share * total)),
            schedule=settings.schedule,
        )
        set_learning_rate(self.optimizer, rate)
        loss, kl_sums_K, hits_K, feature_sums_K = self.model(documents, weights)
        self.accelerator.backward(loss)
        norm = self._clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = torch.tensor(sum(document.num_tokens for document in documents), device=rows_K.device)
        return StepMetrics(
            rows_K=rows_K,
            kl_sums_K=self._sum(kl_sums_K.detach()),
            hits_K=self._sum(hits_K),
            feature_sums_K=self._sum(feature_sums_K),
            grad_norm=norm,
            learning_rate=rate,
            tokens=int(self._sum(tokens)),
        )

    def _clip_gradients(self) -> float:
        """Clip by value when asked to, then by global norm; the norm before the latter."""
        parameters = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
        if self.settings.max_grad_value is not None:
            self.accelerator.clip_grad_value_(parameters, self.settings.max_grad_value)
        limit = self.settings.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        return float(norm) if norm is not None else 0.0

    def _evaluate(self) -> None:
        """Held-out tau on the main process; a new best head is kept as a head directory."""
        self.accelerator.wait_for_everyone()
        if self.is_main:
            statistics = heldout_statistics(
                self.head,
                self.heldout,
                embedding_VH=self.objective.embedding_VH,
                target_readout_DH=self.objective.target_readout_DH,
                num_tokens=self.settings.chain_length,
                device=self.accelerator.device,
                autocast=torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None,
            )
            record: dict[str, Any] = {"step": self.state.step, "heldout/tau": statistics.tau}
            record |= {f"heldout/marginal_{i + 1}": rate for i, rate in enumerate(statistics.marginal)}
            self.tracker.log(record)
            if statistics.tau > self.state.best_tau:
                self.state.best_step, self.state.best_tau = self.state.step, statistics.tau
                write_head(
                    head_directory(self.run_dir, self.state.step),
                    self.head,
                    dtype=torch.float32,
                    to=working_layout(self.head.config),
                )
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        if self.is_main:
            save_checkpoint(self.run_dir, module=self.objective, optimizer=self.bare_optimizer, state=self.state)
            prune_heads(self.run_dir, keep={self.state.best_step, saved_best_step(self.run_dir)})
        self.accelerator.wait_for_everyone()

    def _log(self, window: Window, *, epoch: float) -> dict[str, str]:
        record = {"step": self.state.step, "epoch": round(epoch, 4), **window.record()}
        self.tracker.log(record)
        return {
            "kl": f"{record['kl_1']:.3f}",
            "acc": f"{record['accuracy_1']:.3f}",
            "tau": f"{self.state.best_tau:.3f}",
        }

    def _stop(self, stop: StopRequest) -> None:
        self._save()
        self.tracker.finish()
        raise KeyboardInterrupt(f"training stopped by signal {stop.signal_number}, saved at step {self.state.step}")

    def _stop_agreed(self, stop: StopRequest) -> bool:
        """True on every process as soon as one was signalled, so that all save the same step."""
        if self.accelerator.num_processes == 1:
            return stop.requested
        return bool(self._sum(torch.tensor(int(stop.requested), device=self.accelerator.device)) > 0)

    def _sum(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value, reduction="sum") if self.accelerator.num_processes > 1 else value  # type: ignore[return-value]

    def _documents(self, batch: list[int]) -> list[TrainingDocument]:
        settings, documents = self.settings, []
        for index, stored in zip(batch, self.documents.load(batch), strict=True):
            document = training_document(
                stored,
                source=self.head.feature_source,
                num_steps=settings.ttt_steps,
                device=self.accelerator.device,
            )
            states_TX = settings.noise.apply(
                document.states_TX, seed=settings.seed, step=self.state.step, document=index
            )
            documents.append(replace(document, states_TX=states_TX))
        return documents

    def _progress(self, total: int) -> tqdm:
        return tqdm(
            total=total,
            initial=self.state.step,
            unit="step",
            desc="train",
            disable=None if self.is_main else True,
        )
