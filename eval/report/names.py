"""What datasets, arms and cells are called in the report, and which of them is the main one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from eyas.eval.records import AR, AR_TWIN, Phase

MAIN_DATASET = "heldout"
DATASET_NAMES = {"heldout": "held-out chat", "humaneval": "HumanEval", "mix": "mix of all"}
KINDS = {"ar": "plain decoding", "head": "draft head", "other": "other drafting", "schedule": "schedule of k"}


def dataset_name(dataset: str) -> str:
    return DATASET_NAMES.get(dataset, dataset)


def drafting_arms(results: dict[str, Any]) -> list[str]:
    """Every arm but AR and its twin (the null of a session side by side), in the order of the results."""
    return [arm for arm in results["arms"] if arm not in (AR, AR_TWIN)]


def is_control(results: dict[str, Any], arm: str) -> bool:
    """Whether an arm is plain decoding under another name, as it is or slowed on purpose: a test of the statistics."""
    return arm != AR and not results["arms"][arm]["speculative_config"]


def arm_label(results: dict[str, Any], arm: str) -> str:
    """ "AR", "k=3" for the head's arms, the arm's own name for the others."""
    facts = results["arms"].get(arm)
    if arm == AR:
        return "AR"
    if facts is not None and facts["kind"] == "head" and arm == f"k{facts['draft_length']}":
        return f"k={facts['draft_length']}"
    return arm


def groups(rows: Iterable[dict[str, Any]]) -> list[tuple[str, float]]:
    """The (dataset, temperature) pairs of `rows`: the main dataset first, then in order of appearance, coolest first."""
    pairs = dict.fromkeys((row["dataset"], row["temperature"]) for row in rows)
    order = {dataset: index for index, dataset in enumerate(dict.fromkeys(dataset for dataset, _ in pairs))}
    return sorted(pairs, key=lambda pair: (pair[0] != MAIN_DATASET, order[pair[0]], pair[1]))


def group_name(dataset: str, temperature: float) -> str:
    return f"{dataset_name(dataset)}, temperature {temperature:g}"


def of_phase(rows: Iterable[dict[str, Any]], phase: Phase) -> list[dict[str, Any]]:
    """The rows of one phase: absolute numbers of two phases do not stand beside each other."""
    return [row for row in rows if row["phase"] == phase]


def by_phase(rows: Sequence[dict[str, Any]], caption: str) -> list[tuple[list[dict[str, Any]], str]]:
    """The rows of each phase and a caption that tells the schedule's; the grid comes first, and alone needs no word."""
    later = of_phase(rows, "schedule")
    return [(of_phase(rows, "grid"), caption)] + ([(later, f"{caption}: phase of the schedule")] if later else [])


def of_group(rows: Iterable[dict[str, Any]], group: tuple[str, float]) -> list[dict[str, Any]]:
    """The rows of one (dataset, temperature)."""
    return [row for row in rows if (row["dataset"], row["temperature"]) == group]


def place(row: dict[str, Any]) -> list[str]:
    """The first columns of most tables: prompts and temperature."""
    return [dataset_name(row["dataset"]), f"{row['temperature']:g}"]


PLACE = ("prompts", "T")
"""Headings of `place`."""


def batch_sizes(rows: Iterable[dict[str, Any]]) -> list[int]:
    return sorted({row["batch_size"] for row in rows})


def size_list(sizes: Sequence[int]) -> str:
    """ "batch size 1", "batch sizes 1, 2 and 4"."""
    shown = [str(size) for size in sizes]
    joined = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"batch size{'' if len(shown) == 1 else 's'} {joined}"
