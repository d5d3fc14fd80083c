"""The training loop: packs in, optimiser steps, metrics, evaluations, checkpoints.

Everything that decides what a step does is here and fits on a screen. What a step computes is in objective.py, how
several processes do it together in parallel/, which documents it trains on in order.py, and what stays on disk in
keeping.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from eyas.heads.head import FeatureSource
from eyas.train.checkpoint import TrainingState
from eyas.train.ema import Averages
from eyas.train.features.documents import Documents
from eyas.train.guards import EarlyStop, NonFiniteGuard, SpikeGuard, explain_out_of_memory
from eyas.train.keeping import Keeper
from eyas.train.metrics import Window
from eyas.train.objective import step_weights
from eyas.train.order import Pack, RunOrder
from eyas.train.pack import TrainingPack, training_pack
from eyas.train.parallel.engine import TrainingEngine
from eyas.train.preemption import Preempted, StopRequest, mark_for_requeue
from eyas.train.prefetch import Prefetcher
from eyas.train.settings import LoopSettings
from eyas.train.tracking import Tracker


@dataclass
class Trainer:
    """One run, in every process; `train` is called once.

    Attributes:
        embedding_VH: the target's embedding on the CPU; None when the head has its own.
        pack_flops: floating-point operations of a pack over some TTT steps.
        stop: whether a signal asked this process to stop.
        prefetch: packs that are made ready while another one trains; 0 makes each when it is needed.
        say: takes a line that the user should read.
    """

    engine: TrainingEngine
    order: RunOrder
    documents: Documents
    source: FeatureSource
    embedding_VH: Tensor | None
    keeper: Keeper
    ema: Averages
    tracker: Tracker
    window: Window
    settings: LoopSettings
    run_dir: Path
    pack_flops: Callable[[TrainingPack, int], float]
    draft_vocab_size: int
    prefetch: int
    stop: StopRequest
    say: Callable[[str], None]
    state: TrainingState

    def __post_init__(self) -> None:
        self.total = len(self.order)
        self.nonfinite = NonFiniteGuard(limit=self.settings.max_skipped_steps, say=self.say)
        self.spikes = SpikeGuard()
        warmed_up = self.settings.warmed_up_at(total=self.total)
        self.early_stop = EarlyStop(patience=self.settings.stop_after_evaluations, first=warmed_up)

    def train(self) -> TrainingState:
        """Run to the last step and return the final state.

        Raises:
            Preempted: a signal asked to stop; the run was saved and goes on from there when it is started again.
            ValueError: a step does not fit memory, or losses are not finite again and again.
        """
        ranks = {"rank": self.engine.rank, "world_size": self.engine.world_size}
        self.documents.start(self.order.all_packs(**ranks), first=self.order.packs_before(self.state.step, **ranks))
        self.engine.barrier()  # what one process had to mend in a shared cache is there for all
        with self._progress() as progress, self._prepared() as prepared:
            packs = iter(prepared)
            # A run that stopped for want of progress, and was killed before its end, has ended as well.
            ended = self.state.step == self.total or self.early_stop.stalled(self.state)
            self.window.begin()
            while not ended:
                self._step(packs)
                progress.update()
                ended = self._after_step(progress)
                if self._stop_agreed():
                    self._stop()
        self.keeper.wait()
        return self.state

    def _step(self, packs: Iterator[TrainingPack]) -> None:
        """One optimiser step over this process's packs of the global batch."""
        step, settings = self.state.step, self.settings
        if settings.steps_change_at(step, total=self.total):
            self.spikes.forget()
        mine = self.order.packs(step, rank=self.engine.rank, world_size=self.engine.world_size)
        num_steps = settings.ttt_steps_at(step, total=self.total)
        rows_K = self.order.rows(step)[:num_steps]
        weights = self._row_weights(rows_K)
        rate = settings.rate_at(step, total=self.total)
        self.engine.set_learning_rate(rate)
        for place, planned in enumerate(mine):
            last = place == len(mine) - 1
            pack = next(packs)
            rows = [slots_S.shape[0] for slots_S in pack.slots[:num_steps]]
            explained = self._explained(tokens=pack.num_tokens, rows=rows, documents=len(pack.lengths))
            with explained, self.engine.accumulate(last=last):
                pack = pack.to(self.engine.device, non_blocking=True)
                loss, sums = self.engine.model(pack, weights if planned.counted else [0.0] * num_steps)
                self.engine.backward(loss, last=last)
            if planned.counted:
                self.window.add_pack(loss.detach(), sums, flops=self.pack_flops(pack, num_steps))
        norm, finite = self._update(rows_K)
        tokens = self.order.tokens(step)
        self.window.add_step(rows_K=rows_K, tokens=tokens, grad_norm=norm, learning_rate=rate, skipped=not finite)
        self.state.step += 1
        self.state.tokens += tokens
        self.state.slots += sum(rows_K)

    def _update(self, rows_K: list[int]) -> tuple[float, bool]:
        """Take the step that gradients were made for, or leave it out; their norm, and whether it was taken."""
        step = self.state.step
        documents = self.order.documents(step)
        # The first step makes the optimiser's state.
        with self._explained(tokens=self.order.tokens(step), rows=rows_K, documents=len(documents)):
            norm = self.engine.clip()
            finite = self.nonfinite.accepts(norm, step=step, documents=documents, state=self.state)
            if finite:
                self.engine.step()
                self.ema.update()
            else:
                self.engine.drop()
        return norm, finite

    def _row_weights(self, rows_K: list[int]) -> list[float]:
        """What a row of each TTT step counts: its step's share, divided by the rows of that step in the global batch.

        Gradients are averaged over processes, and a row must count the same wherever it is.
        """
        shares = step_weights(len(rows_K), decay=self.settings.step_decay)
        return [share * self.engine.world_size / max(rows, 1) for share, rows in zip(shares, rows_K, strict=True)]

    def _after_step(self, progress: tqdm) -> bool:
        """Log, evaluate and save where they are due; whether the run has ended."""
        settings, step = self.settings, self.state.step
        last = step == self.total
        if step % settings.log_every == 0 or last:
            progress.set_postfix(self._log())
        if step % settings.evaluate_every == 0 or last:
            self._evaluate()
        stalled = self.early_stop.stalled(self.state)
        if stalled and not last:
            self.say(
                f"stopped at step {step} of {self.total}: {settings.stop_after_evaluations} evaluations in a row brought "
                f"no tau above {self.state.best_tau:.3f} (step {self.state.best_step})"
            )
        if step % settings.checkpoint_every == 0 or last or stalled:
            self._save()
        return last or stalled

    def _save(self) -> None:
        """Save a checkpoint, and before it log what it ends: a run that goes on from it has every step in one record."""
        if self.window.num_steps:
            self._log()
        self.keeper.save(self.state)

    def _log(self) -> dict[str, str]:
        """Write the window's metrics and begin a new one; what the progress bar shows."""
        epoch = self.order.epoch(self.state.step)
        record = self.window.record(self.engine.sum, state=self.state, epoch=epoch)
        self._look_for_spikes(self.window.losses)
        self.tracker.log(record | {"spikes": self.state.spikes})
        return {
            "loss": f"{record['loss']:.3f}",
            "tau_product": f"{record.get('tau_product', 1.0):.3f}",
            "tau": f"{self.state.best_tau:.3f}",
        }

    def _look_for_spikes(self, losses: list[float]) -> None:
        """Say which of the newest steps had a loss far above those before it."""
        for step, loss in enumerate(losses, start=self.state.step - len(losses)):
            spike = self.spikes.look(loss, step=step + 1, documents=self.order.documents(step))
            if spike is not None:
                self.state.spikes += 1
                self.say(spike)

    def _evaluate(self) -> None:
        with self.window.paused():
            statistics = self.keeper.evaluate(self.state)
            self.early_stop.count(self.state)
        record: dict[str, float | int] = {"step": self.state.step, "heldout/tau": statistics.tau}
        record |= {f"heldout/marginal_{i + 1}": rate for i, rate in enumerate(statistics.marginal)}
        self.tracker.log(record)

    def _stop(self) -> None:
        self._save()
        self.keeper.wait()
        if self.engine.is_main:
            mark_for_requeue(self.run_dir, signal_number=self.stop.signal_number, step=self.state.step)
        raise Preempted(signal_number=self.stop.signal_number, step=self.state.step)

    def _stop_agreed(self) -> bool:
        """True on every process as soon as one was signalled, so that all save the same step."""
        flag = torch.tensor(int(self.stop.requested), device=self.engine.device)
        return bool(self.engine.sum(flag) > 0)

    def _prepared(self) -> Prefetcher[tuple[int, Pack], TrainingPack]:
        """Packs of the steps that are left, in order, made ready ahead of their use."""
        ranks = {"rank": self.engine.rank, "world_size": self.engine.world_size}
        steps = range(self.state.step, self.total)
        items = ((step, pack) for step in steps for pack in self.order.packs(step, **ranks))
        return Prefetcher(self._prepare, items, depth=self.prefetch)

    def _prepare(self, item: tuple[int, Pack]) -> TrainingPack:
        step, planned = item
        settings = self.settings

        def perturb(states_TX: Tensor, place: int) -> Tensor:
            document = planned.documents[place]
            return settings.noise.apply(states_TX, seed=settings.seed, step=step, document=document)

        pack = training_pack(
            self.documents.load(planned.documents),
            source=self.source,
            num_steps=settings.ttt_steps,
            embedding_VH=self.embedding_VH,
            perturb=perturb,
        )
        return pack.pin() if self.engine.device.type == "cuda" else pack

    @contextmanager
    def _explained(self, *, tokens: int, rows: list[int], documents: int) -> Iterator[None]:
        """Turn running out of memory into a sentence with the numbers of what was computed."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            explain_out_of_memory(
                error, tokens=tokens, rows=rows, draft_vocab_size=self.draft_vocab_size, documents=documents
            )
            raise

    def _progress(self) -> tqdm:
        return tqdm(
            total=self.total,
            initial=self.state.step,
            unit="step",
            desc="train",
            disable=None if self.engine.is_main else True,
        )
