"""The section of a recipe that says how a head is trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from eyas.recipes.section import Number, Section, Threads


class Train(Section):
    """Optimisation, held-out evaluation and checkpoints."""

    epochs: int = Field(default=2, gt=0, description="passes over the training conversations")
    batch_tokens: int = Field(default=1024, gt=0, description="tokens of one optimizer step")
    ttt_steps: int = Field(default=3, ge=1, description="training-time-test steps: how deep the head learns to draft")
    ttt_warmup_share: Number = Field(default=0.3, ge=0, le=1, description="share of training with one step only")
    step_decay: Number = Field(default=0.8, gt=0, le=1, description="weight of a TTT step relative to the one before")
    learning_rate: Number = Field(default=1e-3, gt=0, description="peak learning rate")
    warmup_share: Number = Field(default=0.03, ge=0, lt=1, description="share of training with rising learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="learning rate after warm-up"
    )
    weight_decay: Number = Field(default=0.0, ge=0, description="AdamW weight decay")
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW betas"
    )
    max_grad_norm: Number | None = Field(
        default=1.0, gt=0, description="gradients are clipped to this norm; null = not"
    )
    max_grad_value: Number | None = Field(
        default=None, gt=0, description="and each entry before it to this; null = not"
    )
    token_loss_weight: Number = Field(default=1.0, ge=0, description="KL divergence from the target's distribution")
    top_k_loss_weight: Number = Field(default=0.0, ge=0, description="HASS: cross-entropy over the likeliest tokens")
    top_k: int = Field(default=10, ge=1, description="tokens of the top-k loss, if it has a weight")
    feature_loss_weight: Number = Field(default=0.0, ge=0, description="EAGLE: smooth L1 to the target's hidden state")
    detach_feedback: bool = Field(
        default=False, description="HASS: no gradient through fed-back features, from the second TTT step on"
    )
    feature_noise: Literal["none", "constant", "length"] = Field(
        default="none", description="EAGLE: uniform noise on input features; length scales it by 512 / tokens"
    )
    feature_noise_width: Number = Field(default=0.2, gt=0, description="width of the interval of feature_noise")
    precision: Literal["bf16", "fp32"] = Field(default="bf16", description="of the forward; weights stay fp32")
    evaluate_every: int = Field(default=100, gt=0, description="steps between held-out evaluations")
    evaluate_conversations: int = Field(default=32, gt=0, description="held-out conversations of one evaluation")
    chain_length: int = Field(default=3, ge=1, description="drafted tokens k of the held-out tau")
    checkpoint_every: int = Field(default=100, gt=0, description="steps between checkpoints")
    log_every: int = Field(default=10, gt=0, description="steps between lines of metrics.jsonl")
    threads: Threads = Field(default=None, description="CPU threads; null = all cores")
    tracker: Literal["none", "wandb"] = Field(default="none", description="where metrics go besides metrics.jsonl")

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if not (self.token_loss_weight or self.top_k_loss_weight or self.feature_loss_weight):
            raise ValueError("token_loss_weight: all losses are 0, so nothing would be learnt; set one above 0")
        return self
