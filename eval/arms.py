"""Arms: the engine configurations that a session compares. They differ by `speculative_config` and by nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.eval.plan import StartPlan
from eyas.eval.records import AR, AR_TWIN, Kind, Phase, longest_draft
from eyas.heads.serving import speculative_config

SCHEDULE = "schedule"
"""Name of the arm whose draft length follows the batch size."""

SLOWED_BY = "slowed_by"
"""Key of an arm of the recipe, beside vLLM's own: the share of each step's time that the worker waits after it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*")
_HEAD_NAME = re.compile(r"k\d+")


@dataclass(frozen=True)
class Arm:
    """One engine configuration. No `speculative_config` is plain decoding, by AR or by a control under another name."""

    name: str
    kind: Kind
    speculative_config: dict[str, Any] | None
    slowed_by: float = 0.0

    @property
    def draft_length(self) -> int:
        """Most tokens drafted in one step; 0 for AR."""
        return longest_draft(self.speculative_config)


PLAIN = Arm(AR, "ar", None)
TWIN = Arm(AR_TWIN, "other", None)


def plan_arms(
    head_dir: Path | None,
    *,
    method: str | None,
    draft_lengths: Sequence[int],
    others: Mapping[str, Mapping[str, Any]],
) -> list[Arm]:
    """Plain decoding, the head at each draft length ("k3", ...), and the other arms by their names.

    Args:
        head_dir: the head; None when no draft length is given.
        method: vLLM's name of its kind.
        draft_lengths: drafted tokens a step, the main one first.
        others: a `speculative_config` by name; an empty one is plain decoding again, and `slowed_by` in it slows it.

    Raises:
        ValueError: the name of another arm is no name, or one that eyas gives itself.
    """
    return [PLAIN, *_head_arms(head_dir, method, draft_lengths), *(_other_arm(*item) for item in others.items())]


def _head_arms(head_dir: Path | None, method: str | None, draft_lengths: Sequence[int]) -> list[Arm]:
    if not draft_lengths:
        return []
    assert head_dir is not None, "draft lengths need a head"
    assert method is not None, "a head has a method"
    return [
        Arm(f"k{length}", "head", speculative_config(head_dir, method=method, num_speculative_tokens=length))
        for length in draft_lengths
    ]


def _other_arm(name: str, config: Mapping[str, Any]) -> Arm:
    require_free_name(name)
    served = {key: value for key, value in config.items() if key != SLOWED_BY}
    return Arm(name, "other", served or None, slowed_by=config.get(SLOWED_BY, 0.0))


def require_free_name(name: str) -> None:
    """Refuse names that file names cannot carry and names that eyas gives itself.

    Raises:
        ValueError: says which names are free.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"arm {name!r}: a name is letters, digits and underscores, such as ngram or draft_0_5b")
    if name in (AR, SCHEDULE, AR_TWIN) or _HEAD_NAME.fullmatch(name):
        raise ValueError(
            f"arm {name!r}: eyas names plain decoding, its control, the schedule and the head's own arms so; choose another name"
        )


def arm_plan(plan: StartPlan, arm: Arm, *, start: int, round: int, phase: Phase = "grid") -> StartPlan:
    """`plan` for one start of `arm`; everything else stays, so that arms differ in nothing else."""
    return replace(
        plan,
        arm=arm.name,
        kind=arm.kind,
        start=start,
        round=round,
        phase=phase,
        speculative_config=arm.speculative_config,
        slowed_by=arm.slowed_by,
    )
