"""What tests of the online mode share: token files, stores of three forms, and a target's settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import planned_identity
from eyas.train.features.online import TargetSettings
from eyas.train.inputs import Online
from tests import tiny, training

PLAIN = StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=False)
EAGLE = StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=True)
SMALL = StoreForm(storage="fp8", teacher="top-k", teacher_k=16, last_everywhere=False)
LAYERS = {PLAIN: tiny.CAPTURE_LAYERS, EAGLE: (), SMALL: tiny.CAPTURE_LAYERS}
BATCH_TOKENS = 200
"""Of the online target: other groups than the store's, so that nothing is equal by luck."""


@dataclass(frozen=True)
class Inputs:
    """Where they lie."""

    target: Path
    tokens: Path
    stores: dict[StoreForm, Path]


def make_inputs(directory: Path, *, target: Path) -> Inputs:
    """Token files, and a store of each form."""
    stores, tokens = {}, Path()
    for number, form in enumerate((PLAIN, EAGLE, SMALL)):
        tokens, stores[form] = training.make_inputs(
            directory / str(number), target=target, capture_layers=LAYERS[form], form=form
        )
    return Inputs(target, tokens, stores)


def online_features(form: StoreForm = PLAIN, **changes: Any) -> Online:
    """The target beside the head, with some settings changed."""
    settings = Online(capture_layers=LAYERS[form], dtype="float32", form=form, batch_tokens=BATCH_TOKENS, threads=1)
    return replace(settings, **changes)


def target_settings(inputs: Inputs, form: StoreForm = PLAIN) -> TargetSettings:
    """Of a target that computes what a store of that form would hold."""
    identity = planned_identity(
        inputs.target,
        tokens_dir=inputs.tokens,
        capture_layers=LAYERS[form],
        dtype="float32",
        form=form,
        trust_remote_code=False,
    )
    return TargetSettings(
        target_dir=inputs.target,
        tokens_dir=inputs.tokens,
        identity=identity,
        batch_tokens=BATCH_TOKENS,
        device="cpu",
        threads=1,
        trust_remote_code=False,
    )
