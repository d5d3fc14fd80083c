"""What the training loop does, step by step. Steps are optimiser steps; shares are of all steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eyas.train.noise import FeatureNoise
from eyas.train.optim import Schedule, learning_rate_at
from eyas.train.order import OrderSettings


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings of a run that do not change what a row's loss is.

    Attributes:
        batch_tokens: tokens of one optimiser step, over all processes. pack_tokens: of one forward; None is a whole share.
        learning_rate: peak rate of AdamW; other rates follow it.
        ema_decay: evaluate and keep an average of the weights; None evaluates the weights themselves.
        evaluate_conversations: held-out conversations of an evaluation while training; the final figure uses all.
        stop_after_evaluations: end when so many evaluations in a row brought no better tau, none of them of the steps that train
            one TTT step only; None never does.
        max_skipped_steps: steps that may be skipped since a loss or gradient is not finite.
        chain_length: drafted tokens k of the held-out tau.
    """

    epochs: int
    batch_tokens: int
    pack_tokens: int | None
    ttt_steps: int
    ttt_warmup_share: float
    step_decay: float
    learning_rate: float
    warmup_share: float
    schedule: Schedule
    decay_share: float
    final_share: float
    noise: FeatureNoise
    ema_decay: float | None
    evaluate_every: int
    evaluate_conversations: int
    stop_after_evaluations: int | None
    max_skipped_steps: int
    checkpoint_every: int
    keep_checkpoints: int
    log_every: int
    chain_length: int
    seed: int

    @property
    def order(self) -> OrderSettings:
        """What decides which documents a step trains on."""
        return OrderSettings(
            batch_tokens=self.batch_tokens, pack_tokens=self.pack_tokens, epochs=self.epochs, seed=self.seed
        )

    def rate_at(self, step: int, *, total: int) -> float:
        """Learning rate of a step (0-based) of `total`."""
        return learning_rate_at(
            step,
            peak=self.learning_rate,
            total_steps=total,
            warmup_steps=max(1, round(self.warmup_share * total)),
            schedule=self.schedule,
            decay_share=self.decay_share,
            final_share=self.final_share,
        )

    def warmed_up_at(self, *, total: int) -> int:
        """The first step (0-based) that trains all TTT steps; those before it train one, which costs least."""
        return 0 if self.ttt_steps == 1 else math.ceil(self.ttt_warmup_share * total)

    def ttt_steps_at(self, step: int, *, total: int) -> int:
        """Training-time-test steps of an optimiser step."""
        return 1 if step < self.warmed_up_at(total=total) else self.ttt_steps

    def steps_change_at(self, step: int, *, total: int) -> bool:
        """Whether an optimiser step has another number of TTT steps than the one before it."""
        return 0 < step == self.warmed_up_at(total=total)
