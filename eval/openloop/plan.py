"""What an open-loop session does: the engine, the prompts, the rates, and the starts in which they are served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eyas.eval.arms import Arm
from eyas.eval.openloop.arrivals import require_rates
from eyas.eval.openloop.client import Sampling
from eyas.eval.openloop.load import Patience
from eyas.eval.openloop.records import cell_path, holds
from eyas.eval.serve_options import ServedEngine
from eyas.eval.workload import Request
from eyas.heads.files import fingerprint


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What every start of every arm does.

    Attributes:
        session: id of the session; cells of another one are measured again.
        engine: without a `speculative_config`: the arms bring theirs.
        requests: unique prompts, served once at each rate, in this order and at the same times in every arm.
        warmup: prompts answered all at once before each cell; they belong to none, and may repeat one.
        rates: requests per second.
        seed: of the arrival times.
        max_connections: requests that the client has under way at once; later ones wait, and their records say so.
    """

    session: str
    engine: ServedEngine
    requests: list[Request]
    warmup: list[list[int]]
    rates: list[float]
    seed: int
    sampling: Sampling
    max_connections: int
    patience: Patience

    @property
    def dataset(self) -> str:
        return "+".join(dict.fromkeys(request.dataset for request in self.requests))

    @property
    def seconds_per_start(self) -> float:
        """How long the arrivals of one start take; loading, warm-up and the last answers come on top."""
        return sum(len(self.requests) / rate for rate in self.rates)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self) -> None:
        """Refuse what would measure something else than it says.

        Raises:
            ValueError: no rate or no prompt, a rate that is none, a prompt that is served twice or warmed up with.
        """
        require_rates(self.rates)
        if not self.requests or not self.warmup or not self.rates:
            raise ValueError("an open loop needs rates, prompts to measure, and another prompt to warm up with")
        seen = {tuple(tokens): "the warm-up" for tokens in self.warmup}
        for request in self.requests:
            tokens = tuple(request.token_ids)
            if tokens in seen:
                raise ValueError(
                    f"prompt {request.prompt_id} of the open loop has the tokens of {seen[tokens]}; a prompt that is served "
                    "twice makes answers alike and caches hit, so give every prompt once"
                )
            seen[tokens] = request.prompt_id


@dataclass(frozen=True, kw_only=True)
class LoadStart:
    """One start of the session: its arm, its place in the order, and where its files go."""

    arm: Arm
    number: int
    directory: Path
    plan: LoadPlan

    @property
    def engine(self) -> ServedEngine:
        return replace(self.plan.engine, speculative_config=self.arm.speculative_config)

    def fingerprint(self, rate: float) -> str:
        """Of everything that shapes the cell at `rate`; the plan's other rates do not."""
        shaping = self.plan.to_json() | {"rates": [rate], "engine": self.engine.to_json()}
        return fingerprint(shaping | {"arm": self.arm.name, "start": self.number})

    def cells(self) -> dict[float, Path]:
        """Where the cell of each rate is kept, by rising rate."""
        return {rate: cell_path(self.directory, rate=rate) for rate in sorted(self.plan.rates)}

    def missing(self) -> list[float]:
        """Rates without a complete cell of this plan, rising."""
        return [rate for rate, path in self.cells().items() if not holds(path, self.fingerprint(rate))]

    def complete(self) -> list[Path]:
        """The complete cells of this plan."""
        missing = self.missing()
        return [path for rate, path in self.cells().items() if rate not in missing]


def plan_starts(directory: Path, plan: LoadPlan, *, arms: Sequence[Arm], starts_per_arm: int) -> Iterator[LoadStart]:
    """The starts in order: forwards, backwards, forwards, ..., so that a machine that slows down harms all arms alike."""
    rounds = [list(arms)[:: 1 if number % 2 == 0 else -1] for number in range(starts_per_arm)]
    for number, arm in enumerate(arm for one_round in rounds for arm in one_round):
        yield LoadStart(arm=arm, number=number, directory=directory / f"{number:03d}-{arm.name}", plan=plan)
