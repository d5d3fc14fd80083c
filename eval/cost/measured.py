"""Everything measured that the cost model of one (dataset, temperature) starts from, taken out of the records once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.eval.cost import model
from eyas.eval.cost.starts import StartValues, start_values
from eyas.eval.cost.steps import BySize, Group, all_blocks, drafting_arms, groups, step_seconds, tokens_per_step
from eyas.eval.latency import throughput
from eyas.eval.records import AR, ArmFacts, Blocks, Cells


@dataclass(frozen=True)
class Measured:
    """One (dataset, temperature), with the model fitted on its fitted batch sizes.

    Attributes:
        by_size: batch size, ascending -> arm -> starts.
        arms: arms that draft and have a step time at a fitted batch size, in the session's order.
        times: step seconds by start; rates: tokens per second by start.
        fitted: batch sizes that the model was fitted on; held_out: those it has never seen.
        fit: the model; errors: each form's error in the choice, empty when there was none to make.
        taus: arm -> tau over its fitted batch sizes, 1 for plain decoding.
    """

    group: Group
    by_size: BySize
    facts: dict[str, ArmFacts]
    arms: list[str]
    times: StartValues
    rates: StartValues
    fitted: list[int]
    held_out: list[int]
    fit: model.Fit
    errors: dict[model.FormName, float]
    taus: dict[str, float]

    @property
    def sizes(self) -> list[int]:
        return list(self.by_size)

    def seconds(self, arm: str, size: int) -> float | None:
        """Measured step time, geometric mean over starts; None where there is none."""
        return self._at(self.times, arm, size)

    def rate(self, arm: str, size: int) -> float | None:
        """Measured tokens per second, geometric mean over starts; None where there is none."""
        return self._at(self.rates, arm, size)

    def tau_at(self, arm: str, size: int) -> float | None:
        """Measured tau in one cell."""
        return tokens_per_step(all_blocks(self.by_size[size].get(arm, ())))

    def _at(self, values: StartValues, arm: str, size: int) -> float | None:
        means = values.means()
        found = float(means[arm][self.sizes.index(size)]) if arm in means else math.nan
        return None if math.isnan(found) else found


def measured_groups(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[Measured]:
    """One `Measured` per (dataset, temperature) that has step times of plain decoding and of an arm that drafts."""
    found = []
    for group, by_size in groups(cells).items():
        measured = measure(group, by_size, arms=arms)
        if measured is not None:
            found.append(measured)
    return found


def measure(group: Group, by_size: BySize, *, arms: Mapping[str, ArmFacts]) -> Measured | None:
    """Step times, rates, taus and the fitted model of one group; None where nothing can be compared."""
    names = [AR, *drafting_arms(arms)]
    times = start_values(by_size, arms=names, value=step_seconds)
    usable = usable_sizes(times)
    held = model.held_out(usable)
    fitted = [size for size in usable if size not in held]
    points = points_of(times.at(fitted), arms) if fitted else []
    known = {point.arm for point in points}
    if AR not in known or len(known) < 2:
        return None
    form, errors = model.choose_form(points)
    return Measured(
        group=group,
        by_size=by_size,
        facts=dict(arms),
        arms=[name for name in names if name != AR and name in known],
        times=times,
        rates=start_values(by_size, arms=names, value=_rate),
        fitted=fitted,
        held_out=held,
        fit=model.fit(points, form=form),
        errors=errors,
        taus=_taus(by_size, arms=[name for name in names if name in known], sizes=fitted),
    )


def usable_sizes(times: StartValues) -> list[int]:
    """Batch sizes with a step time of plain decoding."""
    means = times.means()
    if AR not in means:
        return []
    return [size for size, mean in zip(times.batch_sizes, means[AR], strict=True) if not math.isnan(mean)]


def points_of(times: StartValues, arms: Mapping[str, ArmFacts]) -> list[model.Point]:
    """The mean step times as points of the model."""
    return [
        model.Point(arm, None if arms[arm].kind == "other" else arms[arm].draft_length, size, seconds)
        for arm, values in times.means().items()
        for size, seconds in zip(times.batch_sizes, values.tolist(), strict=True)
        if not math.isnan(seconds)
    ]


def _rate(blocks: Blocks) -> float | None:
    return math.exp(sum(math.log(throughput(cell)) for cell in blocks) / len(blocks)) if blocks else None


def _taus(by_size: BySize, *, arms: Sequence[str], sizes: Sequence[int]) -> dict[str, float]:
    taus = {}
    for arm in arms:
        tau = tokens_per_step([cell for size in sizes for cell in all_blocks(by_size[size].get(arm, ()))])
        assert tau is not None, "a step time comes from pure decode steps"
        taus[arm] = tau
    return taus
