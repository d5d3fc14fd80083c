"""Acceptance of a session: rows by dataset, temperature and arm, by cell, and by output position, from raw records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.eval.acceptance.intervals import tau_intervals
from eyas.eval.acceptance.positions import bucket_edges, position_rows
from eyas.eval.acceptance.rates import tau_request_mean, tau_step_weighted, wasted_tokens
from eyas.eval.acceptance.reconcile import passes, reconcile, reconcile_counters
from eyas.eval.acceptance.steps import accepted_counts, decode_steps, drafted_counts, received_counts
from eyas.eval.acceptance.summary import acceptance_summary, tokens_per_decode_step
from eyas.eval.records import ArmFacts, Blocks, CellKey, Cells, RequestRecord

Group = tuple[CellKey, str, list[Blocks]]
"""A cell, an arm that drafts, and the arm's starts there."""


def acceptance_results(
    cells: Cells, arms: Mapping[str, ArmFacts], *, offline: Mapping[str, Any] | None
) -> dict[str, list[dict[str, Any]]]:
    """All that results.json holds about acceptance; see the functions below for each key."""
    return {
        "acceptance": acceptance_rows(cells, arms, offline=offline),
        "acceptance_cells": acceptance_cell_rows(cells, arms),
        "acceptance_positions": acceptance_position_rows(cells, arms),
        "reconciliation": reconciliation_rows(cells, arms),
    }


def acceptance_rows(
    cells: Cells, arms: Mapping[str, ArmFacts], *, offline: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Per dataset, temperature and arm that drafts: acceptance in the cell with the most prompts, over all its starts.

    One cell and not all of them: smaller cells serve the first prompts of the larger ones, so pooling would count
    those prompts several times. A schedule drafts another number of tokens at each batch size, so it has a row for each.

    Args:
        offline: acceptance that training predicted, see `offline_of`.
    """
    rows = []
    for key, arm, starts in _largest_cells(cells, arms):
        requests, length = _requests(starts), _longest_chain(starts, arms[arm])
        summary = acceptance_summary(requests, draft_length=length)
        counters = _sum_counters(starts)
        tallies = reconcile_counters(requests, counters)
        rows.append(
            _place(key, arm, arms[arm])
            | {"draft_length": length, "starts": len(starts), "counters": counters, "counter_residuals": tallies}
            | summary
            | {"reconciled": passes(summary["reconciliation"], tallies)}
            | {"offline": _beside_offline(offline, key=key, facts=arms[arm], summary=summary)}
        )
    return rows


def acceptance_cell_rows(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """The few figures about acceptance that stand beside a speed, for every cell and arm that drafts.

    Cells of other batch sizes may serve more prompts, so that tau moves with the batch size though the head does not: the
    keys with `common` are over the prompts that all batch sizes of the dataset and temperature share.
    """
    common = _common_prompts(cells)
    rows = []
    for key, arm, starts in _drafting(cells, arms):
        requests = _requests(starts)
        shared = [request for request in requests if request.prompt_id in common[key.dataset, key.temperature]]
        row = {
            "requests": len(requests),
            "prompts": len({request.prompt_id for request in requests}),
            "steps": sum(len(drafted_counts(request)) for request in requests),
            "decode_steps": sum(decode_steps(request) for request in requests),
            "tau": _tau(requests),
            "tau_interval": tau_intervals(requests)["step_weighted"],
            "tau_all_steps": tokens_per_decode_step(requests),
            "tau_request_mean": tau_request_mean([received_counts(request) for request in requests]),
            "tau_engine": tau_step_weighted([accepted_counts(request) for request in requests]),
            "common_prompts": len({request.prompt_id for request in shared}),
            "tau_common": _tau(shared),
            "tau_common_interval": tau_intervals(shared)["step_weighted"],
            "tau_all_steps_common": tokens_per_decode_step(shared),
            "wasted": wasted_tokens(
                [received_counts(request) for request in requests], [drafted_counts(request) for request in requests]
            ),
        }
        rows.append(_place(key, arm, arms[arm]) | row)
    return rows


def _common_prompts(cells: Cells) -> dict[tuple[str, float], set[str]]:
    """(dataset, temperature) -> the prompts that its cells of every batch size serve."""
    common: dict[tuple[str, float], set[str]] = {}
    for key, by_arm in cells.items():
        served = {request.prompt_id for starts in by_arm.values() for request in starts[0][0].requests}
        common[key.dataset, key.temperature] = common.get((key.dataset, key.temperature), served) & served
    return common


def _tau(requests: Sequence[RequestRecord]) -> float | None:
    return tau_step_weighted([received_counts(request) for request in requests])


def acceptance_position_rows(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """Acceptance by output position in the cells of `acceptance_rows`; the buckets are the same for the whole session."""
    groups = list(_largest_cells(cells, arms))
    longest = max((request.n_out for _, _, starts in groups for request in _requests(starts)), default=0)
    edges = bucket_edges(longest)
    return [
        _place(key, arm, arms[arm]) | row
        for key, arm, starts in groups
        for row in position_rows(_requests(starts), edges=edges)
    ]


def reconciliation_rows(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """Do counts, chunks and the engine's counters agree, in every cell and arm that drafts?"""
    rows = []
    for key, arm, starts in _drafting(cells, arms):
        requests = _requests(starts)
        tally, counters = reconcile(requests), reconcile_counters(requests, _sum_counters(starts))
        rows.append(_place(key, arm, arms[arm]) | tally | {"counters": counters, "passed": passes(tally, counters)})
    return rows


def offline_of(context: Mapping[str, Any]) -> dict[str, Any] | None:
    """What training said about held-out acceptance, from a session's context; None where it says nothing.

    `context["training"]["heldout"]` is the trainer's heldout.json. Its texts are the held-out answers as they stand in
    the data, walked greedily, so it is to be compared with greedy serving of held-out prompts.
    """
    found = (context.get("training") or {}).get("heldout")
    if not found:
        return None
    return {
        "dataset": "heldout",
        "temperature": 0.0,
        "draft_length": found["chain_length"],
        "tau": found["heldout_tau"],
        "marginal": found["heldout_marginal"],
        "estimator": found["estimator"],
        "source": "held-out evaluation of training (train/heldout.json)",
    }


def _beside_offline(
    offline: Mapping[str, Any] | None, *, key: CellKey, facts: ArmFacts, summary: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Served tau beside the trainer's, at the shorter of both chain lengths; None where they are not comparable."""
    if offline is None or facts.kind != "head":
        return None
    if (offline["dataset"], offline["temperature"]) != (key.dataset, key.temperature):
        return None
    served, predicted = summary["tau_at_shorter_chains"], _taus_by_length(offline)
    length = max((length for length in predicted if length <= len(served)), default=None)
    if length is None:
        return None
    return {
        "draft_length": length,
        "served_tau": served[length - 1],
        "offline_tau": predicted[length],
        "relative_difference": predicted[length] / served[length - 1] - 1,
        "estimator": offline["estimator"],
        "source": offline["source"],
    }


def _taus_by_length(offline: Mapping[str, Any]) -> dict[int, float]:
    """Chain length -> predicted tau: of every length where marginals are known."""
    marginal = offline["marginal"] or []
    shorter = {length: 1 + sum(marginal[:length]) for length in range(1, len(marginal) + 1)}
    return {**shorter, offline["draft_length"]: offline["tau"]}


def _drafting(cells: Cells, arms: Mapping[str, ArmFacts]) -> Iterator[Group]:
    for key, by_arm in cells.items():
        for arm, facts in arms.items():
            if facts.kind != "ar" and arm in by_arm:
                yield key, arm, by_arm[arm]


def _largest_cells(cells: Cells, arms: Mapping[str, ArmFacts]) -> Iterator[Group]:
    """Of each dataset, temperature and arm the cell with the most prompts; of a schedule every cell."""
    groups: dict[tuple[str, float, str], list[Group]] = {}
    for key, arm, starts in _drafting(cells, arms):
        groups.setdefault((key.dataset, key.temperature, arm), []).append((key, arm, starts))
    for (_, _, arm), members in groups.items():
        if arms[arm].kind == "schedule":
            yield from members
        else:
            yield max(members, key=lambda group: (len(group[2][0][0].requests), group[0].batch_size))


def _place(key: CellKey, arm: str, facts: ArmFacts) -> dict[str, Any]:
    identity = {"arm": arm, "kind": facts.kind, "draft_length": facts.draft_length, "synthetic": facts.synthetic}
    return {**key._asdict(), **identity}


def _requests(starts: Sequence[Blocks]) -> list[RequestRecord]:
    return [request for blocks in starts for block in blocks for request in block.requests]


def _longest_chain(starts: Sequence[Blocks], facts: ArmFacts) -> int:
    """Most tokens that a step drafted: other methods need not name it in their configuration."""
    drafted = [max(drafted_counts(request), default=0) for request in _requests(starts)]
    return max([facts.draft_length, *drafted])


def _sum_counters(starts: Sequence[Blocks]) -> dict[str, int]:
    blocks = [block for blocks in starts for block in blocks]
    return {name: sum(block.counters[name] for block in blocks) for name in blocks[0].counters}
