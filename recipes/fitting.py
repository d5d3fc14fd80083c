"""Whether the steps of a run fit into a device's memory, and the settings with which those that do not would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from eyas.recipes.hardware import NAMED, Hardware, gib
from eyas.recipes.load import with_values
from eyas.recipes.plan_facts import PlanFacts

PARALLEL = (2, 4, 8, 16)
LEAST_PACK = 512
LEAST_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a run by the memory that it needs of a device, and settings that lower it, the cheapest first."""

    name: str
    needed: Callable[[PlanFacts], float]
    mends: Callable[[PlanFacts], Iterator[dict[str, Any]]]


def steps_of(facts: PlanFacts, *, devices: int) -> list[Step]:
    """The steps of a run that need a device's memory."""
    recipe = facts.run.recipe
    answer = Step(name="regenerate", needed=PlanFacts.generation_memory, mends=_split_generation)
    extract = Step(name="extract", needed=lambda each: each.extraction_memory(devices=devices), mends=_split_extraction)
    train = Step(name="train", needed=PlanFacts.training_memory, mends=_smaller_training)
    score = Step(name="score", needed=PlanFacts.serving_memory, mends=_split_serving)
    first = [answer] if recipe.data.regenerate and not recipe.data.generation.servers.urls else []
    return [*first, *([] if recipe.features.mode == "online" else [extract]), train, score]


def fit_line(facts: PlanFacts, step: Step, *, hardware: Hardware) -> str:
    """Whether a step fits; where it does not, what would: the first setting of the recipe, or known hardware."""
    needed = step.needed(facts)
    if needed <= hardware.memory:
        return f"{step.name}: {gib(needed)} of {gib(hardware.memory)} per device: fits"
    told = f"{step.name}: {gib(needed)} needed per device and {gib(hardware.memory)} there: does NOT fit"
    for values in step.mends(facts):
        lowered = step.needed(_changed(facts, values))
        if lowered <= hardware.memory:
            settings = " ".join(f"{key}={value}" for key, value in values.items() if value is not None)
            return f"{told}; with {settings} {gib(lowered)} would"
    larger = [name for name, device in NAMED.items() if device.memory >= needed]
    return (
        f"{told}, and no setting here mends it; it would on {', '.join(larger) if larger else 'no device known here'}"
    )


def _changed(facts: PlanFacts, values: dict[str, Any]) -> PlanFacts:
    """What a plan knows of the run with other values, `section.field` -> value; those of a section are set together."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, field = key.rpartition(".")
        sections.setdefault(section, {})[field] = value
    return replace(facts, run=replace(facts.run, recipe=with_values(facts.run.recipe, sections)))


def _split_generation(facts: PlanFacts) -> Iterator[dict[str, Any]]:
    for number in _parallel(facts, above=facts.run.recipe.data.generation.tensor_parallel_size):
        yield {"data.generation.tensor_parallel_size": number}


def _split_extraction(facts: PlanFacts) -> Iterator[dict[str, Any]]:
    features = facts.run.recipe.features
    own: dict[str, Any] = {}
    if features.backend == "hf":
        if features.device_map is None:
            yield {"features.device_map": "auto"}
        own = {"features.backend": "vllm", "features.device_map": None}
    size = features.batch_size
    while (size := size // 2) >= LEAST_BATCH:
        yield {**own, "features.batch_size": size}
    for number in _parallel(facts, above=features.tensor_parallel_size):
        yield {**own, "features.tensor_parallel_size": number}


def _smaller_training(facts: PlanFacts) -> Iterator[dict[str, Any]]:
    recipe = facts.run.recipe
    size = min(recipe.train.pack_tokens or recipe.train.batch_tokens, recipe.train.batch_tokens)
    while (size := size // 2) >= max(LEAST_PACK, recipe.data.max_length):
        yield {"train.pack_tokens": size}
    if recipe.features.mode == "online" and recipe.features.where == "inline" and recipe.features.device is None:
        yield {"features.where": "process"}


def _split_serving(facts: PlanFacts) -> Iterator[dict[str, Any]]:
    for number in _parallel(facts, above=facts.run.recipe.score.tensor_parallel_size):
        yield {"score.tensor_parallel_size": number}


def _parallel(facts: PlanFacts, *, above: int) -> Iterator[int]:
    """Numbers of devices that a target's heads can be split over."""
    return (number for number in PARALLEL if number > above and facts.size.num_heads % number == 0)
