"""The sections of a recipe that say how a head is trained and where its curves go."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyas.recipes.section import Number, Section, Threads

Weight = Annotated[Number, Field(ge=0)]


class Losses(Section):
    """Weights of the terms of a row's loss; 0 = without. All but `feature` compare token distributions."""

    forward_kl: Weight = Field(default=1.0, description="KL(target, head): soft cross-entropy")
    reverse_kl: Weight = Field(default=0.0, description="KL(head, target)")
    jensen_shannon: Weight = Field(default=0.0, description="Jensen-Shannon divergence")
    total_variation: Weight = Field(default=0.0, description="1 - sum of min(p, q): the share of drafts rejected")
    log_acceptance: Weight = Field(default=0.0, description="LK: -log of the sum of min(p, q)")
    cross_entropy: Weight = Field(default=0.0, description="hard: on the target's likeliest token")
    top_k: Weight = Field(default=0.0, description="HASS: cross-entropy over the target's likeliest tokens")
    top_k_tokens: int = Field(default=10, ge=1, description="tokens of the top_k term, if it has a weight")
    feature: Weight = Field(default=0.0, description="EAGLE: smooth L1 to the target's hidden state")

    @model_validator(mode="after")
    def _check_some(self) -> Self:
        weights = (value for name, value in self if name != "top_k_tokens")
        if not any(weights):
            raise ValueError("forward_kl: all losses are 0, so nothing would be learnt; set one above 0")
        return self


class Train(Section):
    """Optimisation, held-out evaluation and checkpoints."""

    epochs: int = Field(default=2, gt=0, description="passes over the training conversations")
    batch_tokens: int = Field(default=1024, gt=0, description="tokens of one optimizer step, over all processes")
    pack_tokens: int | None = Field(
        default=None, gt=0, description="tokens of one forward of one process; smaller = less memory; null = its share"
    )
    ttt_steps: int = Field(default=3, ge=1, description="training-time-test steps: how deep the head learns to draft")
    ttt_warmup_share: Number = Field(default=0.3, ge=0, le=1, description="share of training with one step only")
    step_decay: Number = Field(default=0.8, gt=0, le=1, description="weight of a TTT step relative to the one before")
    losses: Losses = Losses()
    detach_feedback: bool = Field(
        default=False, description="HASS: no gradient through fed-back features, from the second TTT step on"
    )
    feature_noise: Literal["none", "constant", "length"] = Field(
        default="none", description="EAGLE: uniform noise on input features; length scales it by 512 / tokens"
    )
    feature_noise_width: Number = Field(default=0.2, gt=0, description="width of the interval of feature_noise")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: for the layers' matrices, with AdamW for the rest; not under DeepSpeed or FSDP",
    )
    learning_rate: Number = Field(default=1e-3, gt=0, description="peak learning rate of AdamW")
    muon_learning_rate: Number | None = Field(
        default=None, gt=0, description="peak learning rate of Muon, if it is used; null = learning_rate"
    )
    warmup_share: Number = Field(default=0.03, ge=0, lt=1, description="share of training with rising learning rate")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine", description="learning rate after warm-up; wsd = stable, then a linear decay"
    )
    decay_share: Number = Field(default=0.2, gt=0, le=1, description="share of training that wsd decays in")
    final_share: Number = Field(default=0.05, ge=0, le=1, description="last learning rate as a share of the peak")
    weight_decay: Number = Field(default=0.0, ge=0, description="decoupled weight decay of matrices")
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW betas"
    )
    max_grad_norm: Number | None = Field(
        default=1.0, gt=0, description="gradients are clipped to this norm; null = not"
    )
    max_grad_value: Number | None = Field(
        default=None, gt=0, description="and each entry before it to this; null = not"
    )
    ema_decay: Number | None = Field(
        default=None, gt=0, lt=1, description="evaluate and keep a moving average of the weights; null = the weights"
    )
    precision: Literal["bf16", "fp32"] = Field(default="bf16", description="of the forward; weights stay fp32")
    evaluate_every: int = Field(default=100, gt=0, description="steps between held-out evaluations")
    evaluate_conversations: int = Field(default=32, gt=0, description="held-out conversations of one evaluation")
    chain_length: int = Field(default=3, ge=1, description="drafted tokens k of the held-out tau")
    stop_after_evaluations: int | None = Field(
        default=None,
        gt=0,
        description="stop when so many evaluations in a row, after the TTT warm-up, brought no better tau; null = never",
    )
    max_skipped_steps: int = Field(
        default=10, ge=0, description="steps with a loss or gradient that is not finite are skipped; stop after so many"
    )
    checkpoint_every: int = Field(default=100, gt=0, description="steps between checkpoints")
    keep_checkpoints: int = Field(default=2, gt=0, description="newest checkpoints that stay on disk")
    log_every: int = Field(default=10, gt=0, description="steps between lines of metrics.jsonl")
    threads: Threads = Field(default=None, description="CPU threads of each process; null = all cores, shared fairly")


class Tracking(Section):
    """Where curves go besides metrics.jsonl. What fails here is said once and never stops training."""

    trackers: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        default=(), strict=False, description="any of wandb, tensorboard"
    )
    project: str | None = Field(default=None, min_length=1, description="wandb project; null = WANDB_PROJECT, or eyas")
    entity: str | None = Field(default=None, min_length=1, description="wandb entity; null = WANDB_ENTITY")
    group: str | None = Field(default=None, min_length=1, description="wandb run group; null = WANDB_RUN_GROUP")
    tags: tuple[str, ...] = Field(default=(), strict=False, description="wandb tags")
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="wandb mode; null = WANDB_MODE, or online"
    )

    @field_validator("trackers")
    @classmethod
    def _check_distinct(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(values)) != len(values):
            raise ValueError("values must be distinct")
        return values
