"""Whether the steps of a run fit into the memory of the devices, and the settings with which those that do not would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from eyas.recipes.hardware import NAMED, Hardware, gib
from eyas.recipes.load import with_values
from eyas.recipes.plan_facts import PlanFacts

PARALLEL = (1, 2, 4, 8, 16)
LEAST_PACK = 512
LEAST_BATCH = 8
VLLM_SHARE = 0.92
"""Of a GPU's memory that vLLM 0.32 takes where it is not told."""


def _one(_facts: PlanFacts) -> int:
    return 1


def _all(_facts: PlanFacts) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a run by what it needs of the devices.

    Attributes:
        needed: bytes of a device's memory.
        mends: settings that lower it on so many devices, the cheapest first.
        split: devices that one engine of it takes together.
        share: of a device's memory that it may take.
    """

    name: str
    needed: Callable[[PlanFacts], float]
    mends: Callable[[PlanFacts, int], Iterator[dict[str, Any]]]
    split: Callable[[PlanFacts], int] = _one
    share: Callable[[PlanFacts], float] = _all

    def fits(self, facts: PlanFacts, *, hardware: Hardware, devices: int) -> bool:
        """Whether there are devices enough, and each has the memory."""
        return self.split(facts) <= devices and self.needed(facts) <= self.room(facts, hardware=hardware)

    def room(self, facts: PlanFacts, *, hardware: Hardware) -> float:
        """Bytes that the step may take of a device."""
        return hardware.memory if hardware.cpu else hardware.memory * self.share(facts)


def steps_of(facts: PlanFacts, *, hardware: Hardware, devices: int, trains: bool) -> list[Step]:
    """The steps of a run that need a device's memory; only the measurement's unless it trains."""
    recipe = facts.run.recipe
    made: list[Step] = []
    if trains and recipe.data.regenerate and not recipe.data.generation.servers.urls:
        made.append(_answering())
    if trains and recipe.features.mode == "offline":
        made.append(_extracting(devices=devices))
    if trains:
        made.append(Step(name="train", needed=PlanFacts.training_memory, mends=_smaller_training))
    made.append(_scoring("score", PlanFacts.cpu_serving_memory if hardware.cpu else PlanFacts.serving_memory))
    lossless = recipe.score.lossless
    if recipe.score.draft_lengths and lossless.requests and lossless.dtype != recipe.score.dtype:
        made.append(_scoring(f"score, in {lossless.dtype} (score.lossless)", PlanFacts.lossless_memory))
    return made


def _answering() -> Step:
    return Step(
        name="regenerate",
        needed=PlanFacts.generation_memory,
        mends=_split_generation,
        split=lambda facts: facts.run.recipe.data.generation.tensor_parallel_size,
        share=lambda facts: facts.run.recipe.data.generation.gpu_memory_utilization,
    )


def _extracting(*, devices: int) -> Step:
    def share(facts: PlanFacts) -> float:
        features = facts.run.recipe.features
        return features.gpu_memory_utilization if features.backend == "vllm" else 1.0

    return Step(
        name="extract",
        needed=lambda facts: facts.extraction_memory(devices=devices),
        mends=_split_extraction,
        split=lambda facts: facts.run.recipe.features.tensor_parallel_size,
        share=share,
    )


def _scoring(name: str, needed: Callable[[PlanFacts], float]) -> Step:
    def share(facts: PlanFacts) -> float:
        score = facts.run.recipe.score
        whole = score.gpu_memory_utilization or VLLM_SHARE
        return whole / 2 if score.protocol == "side-by-side" else whole

    return Step(
        name=name,
        needed=needed,
        mends=_split_serving,
        split=lambda facts: facts.run.recipe.score.tensor_parallel_size,
        share=share,
    )


def fit_line(facts: PlanFacts, step: Step, *, hardware: Hardware, devices: int) -> str:
    """Whether a step fits; where it does not, what would: settings of the recipe, more devices, or known hardware."""
    needed, room, split = step.needed(facts), step.room(facts, hardware=hardware), step.split(facts)
    if step.fits(facts, hardware=hardware, devices=devices):
        over = "" if split == 1 else f" on each of {split} devices"
        return f"{step.name}: {gib(needed)} of {gib(room)} per device: fits{over}"
    told = f"{step.name}: {gib(needed)} needed per device and {gib(room)} there"
    if split > devices:
        told += f", on {split} devices together where there {'is 1' if devices == 1 else f'are {devices}'}"
    return f"{told}: does NOT fit{_mend(facts, step, hardware=hardware, devices=devices)}"


def _mend(facts: PlanFacts, step: Step, *, hardware: Hardware, devices: int) -> str:
    """With what a step would fit that does not: the first settings that do with the devices there are, then with more."""
    for number in (devices, *(more for more in PARALLEL if more > devices)):
        told = "" if number == devices else f"on {number} devices "
        if told and step.fits(facts, hardware=hardware, devices=number):
            return f"; on {number} devices it would"
        for values in step.mends(facts, number):
            changed = _changed(facts, values)
            if step.fits(changed, hardware=hardware, devices=number):
                settings = " ".join(f"{key}={value}" for key, value in values.items() if value is not None)
                return f"; {told}with {settings} {gib(step.needed(changed))} would"
    larger = [name for name, device in NAMED.items() if step.fits(facts, hardware=device, devices=devices)]
    where = ", ".join(larger) if larger else "no device known here"
    return f", and no setting here mends it; it would on {where}"


def _changed(facts: PlanFacts, values: dict[str, Any]) -> PlanFacts:
    """What a plan knows of the run with other values, `section.field` -> value; those of a section are set together."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, field = key.rpartition(".")
        sections.setdefault(section, {})[field] = value
    return replace(facts, run=replace(facts.run, recipe=with_values(facts.run.recipe, sections)))


def _split_generation(facts: PlanFacts, devices: int) -> Iterator[dict[str, Any]]:
    for number in _parallel(facts, devices=devices):
        yield {"data.generation.tensor_parallel_size": number}


def _split_extraction(facts: PlanFacts, devices: int) -> Iterator[dict[str, Any]]:
    features = facts.run.recipe.features
    own: dict[str, Any] = {}
    if features.backend == "hf":
        if features.device_map is None:
            yield {"features.device_map": "auto"}
        own = {"features.backend": "vllm", "features.device_map": None}
    smaller = [own] if own else []
    size = features.batch_size
    while (size := size // 2) >= LEAST_BATCH:
        smaller.append({**own, "features.batch_size": size})
    if features.tensor_parallel_size <= devices:
        yield from smaller
    for number in _parallel(facts, devices=devices):
        for values in ({**own}, *smaller):
            yield {**values, "features.tensor_parallel_size": number}


def _smaller_training(facts: PlanFacts, _devices: int) -> Iterator[dict[str, Any]]:
    recipe = facts.run.recipe
    size = min(recipe.train.pack_tokens or recipe.train.batch_tokens, recipe.train.batch_tokens)
    while (size := size // 2) >= max(LEAST_PACK, recipe.data.max_length):
        yield {"train.pack_tokens": size}
    if recipe.features.mode == "online" and recipe.features.where == "inline" and recipe.features.device is None:
        yield {"features.where": "process"}


def _split_serving(facts: PlanFacts, devices: int) -> Iterator[dict[str, Any]]:
    for number in _parallel(facts, devices=devices):
        yield {"score.tensor_parallel_size": number}


def _parallel(facts: PlanFacts, *, devices: int) -> Iterator[int]:
    """Numbers of devices, so many at most, that a target's heads can be split over."""
    return (number for number in PARALLEL if number <= devices and facts.size.num_heads % number == 0)
