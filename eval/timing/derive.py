"""What step times alone say about the parts of a step, and whether the instrumented split agrees.

Nothing is wrapped here. T_SD(B, k) - T_AR(B) is what drafting and verifying k tokens cost on top of a plain step,
whatever the parts. A lower-accuracy estimate of the verification is T_AR at B * (k + 1) requests, which reads as many tokens: it
counts the context of each request k times too often, so it is an upper estimate where contexts are long, and it holds
the scheduler's and the sampler's work for more requests than there are. What T_SD has above it is drafting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

PLACE = ("dataset", "temperature", "batch_size", "arm")

MAX_DIFFERENCE = 0.10
"""Share of a step by which split and derivation may differ: about as much as starts of a process do on a CPU."""


def derived_rows(step_times: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per cell and arm that drafts: what the medians of `step_time_rows` imply.

    Returns:
        Rows with ar_seconds, seconds, extra_seconds (T_SD - T_AR), ratio (T_SD / T_AR: the tau at which the arm breaks
        even), extra_per_drafted_token, verify_proxy_seconds (T_AR at B * (k + 1), interpolated between measured batch
        sizes, None outside them or where k is not fixed) and draft_proxy_seconds (T_SD minus it).
    """
    measured = [row for row in step_times if row["p50"] is not None]
    rows = []
    for row in measured:
        plain = _plain(measured, row)
        if row["kind"] == "ar" or plain is None:
            continue
        extra = row["p50"] - plain["p50"]
        proxy = _verify_proxy(measured, row)
        rows.append(
            {name: row[name] for name in (*PLACE, "kind", "draft_length")}
            | {
                "ar_seconds": plain["p50"],
                "seconds": row["p50"],
                "extra_seconds": extra,
                "ratio": row["p50"] / plain["p50"],
                "extra_per_drafted_token": extra / row["draft_length"] if fixed_length(row) else None,
                "verify_proxy_seconds": proxy,
                "draft_proxy_seconds": None if proxy is None else row["p50"] - proxy,
            }
        )
    return rows


def fixed_length(row: Mapping[str, Any]) -> bool:
    """Whether every step of the arm drafts the same number of tokens."""
    return row["kind"] == "head" and row["draft_length"] > 0


def _plain(rows: Iterable[Mapping[str, Any]], row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    cell = [row[name] for name in PLACE[:3]]
    return next((each for each in rows if each["kind"] == "ar" and [each[name] for name in PLACE[:3]] == cell), None)


def _verify_proxy(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float | None:
    """T_AR at as many requests as the arm's step reads tokens."""
    if not fixed_length(row):
        return None
    tokens = row["running"] * (row["draft_length"] + 1)
    same = [row[name] for name in PLACE[:2]]
    curve = {
        each["running"]: each["p50"]
        for each in rows
        if each["kind"] == "ar" and [each[name] for name in PLACE[:2]] == same
    }
    sizes = sorted(curve)
    if not sizes or not sizes[0] <= tokens <= sizes[-1]:
        return None
    return float(np.interp(tokens, sizes, [curve[size] for size in sizes]))


def check_split(split: Sequence[Mapping[str, Any]], derived: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The instrumented split of each drafting arm beside the derivation from the step times of the measured runs.

    The parts of an arm, minus the same parts of AR, add up to the extra cost of a step; `derived_rows` has that cost from
    other processes without instruments. They differ by perturbation, by noise between starts and by context length.

    Returns:
        Rows with extra_by_part (seconds: draft, verify, sample, overhead), extra_split (their sum), extra_derived,
        difference (split - derived), its share of the arm's step time, whether they agree (that share is at most
        `MAX_DIFFERENCE`), and verify over its proxy.
    """
    parts = {tuple(row[name] for name in PLACE): row for row in split if row["not_measured"] is None}
    plain = {key[:3]: row for key, row in parts.items() if row["kind"] == "ar"}
    rows = []
    for derivation in derived:
        place = tuple(derivation[name] for name in PLACE)
        if place not in parts or place[:3] not in plain:
            continue
        drafted, ar = parts[place]["mean"], plain[place[:3]]["mean"]
        by_part = {name: drafted[name] - ar[name] for name in ("draft", "verify", "sample", "overhead")}
        extra, proxy = sum(by_part.values()), derivation["verify_proxy_seconds"]
        share = (extra - derivation["extra_seconds"]) / derivation["seconds"]
        rows.append(
            dict(zip(PLACE, place, strict=True))
            | {
                "extra_by_part": by_part,
                "extra_split": extra,
                "extra_derived": derivation["extra_seconds"],
                "difference": extra - derivation["extra_seconds"],
                "difference_share": share,
                "agrees": abs(share) <= MAX_DIFFERENCE,
                "verify_over_proxy": None if proxy is None else (drafted["step"] - drafted["draft"]) / proxy,
            }
        )
    return rows
