"""From the raw records of the open loop to rows of results: one per rate and arm. Needs no server and no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.eval.latency import summarise, summarise_requests
from eyas.eval.openloop.differences import read_servers, void_servers
from eyas.eval.openloop.latency import answered, latency_summary, meets
from eyas.eval.openloop.rates import Backlog, judge_backlog, steady_window
from eyas.eval.openloop.ratios import compare_with, tokens_per_second
from eyas.eval.openloop.records import (
    PLAN,
    FailedCell,
    LoadCell,
    LoadRequest,
    read_cells,
    read_failed,
    read_of_session,
    realised_rate,
)
from eyas.eval.records import AR, KINDS, Kind, is_synthetic, longest_draft

CLIENT_LIMIT, CLIENT_FLOOR_S = 0.1, 0.002
"""A client is too slow when its timers are late, at their p99, by more than this share of the median TTFT, or by more
than this many seconds if that is longer (timers are no better)."""

CLIENT_RULE = "The client is too slow to be believed when the p99 of its timers' delay is above 10 % of the median TTFT and above 2 ms."


def open_loop_rows(directory: Path, *, session: str) -> list[dict[str, Any]]:
    """One row per rate and arm, by rising rate, AR first; none without an open loop in `directory`.

    Cells that failed are listed in the row of their rate and arm (`failed_cells`), also when it has no other cell. `void`
    says why an arm is not comparable with plain decoding; None when it is.

    Args:
        directory: the open loop's, of a score.
        session: id of the score.

    Raises:
        ValueError: a record is broken or of another session; names the file.
    """
    if not (directory / PLAN).is_file():
        return []
    plan = read_of_session(directory / PLAN, session=session)
    cells, failed = read_cells(directory, session=session), read_failed(directory, session=session)
    void = void_servers(read_servers(directory, session=session), cells)
    rows = []
    for rate in sorted({cell.rate for cell in [*cells, *failed]}):
        here = [cell for cell in cells if cell.rate == rate]
        lost = [cell for cell in failed if cell.rate == rate]
        baseline = [cell for cell in here if cell.arm == AR]
        for arm, kind in _kinds([*here, *lost]).items():
            own = [cell for cell in here if cell.arm == arm]
            row: dict[str, Any] = {"rate": rate, "arm": arm, "kind": kind, "void": void.get(arm)}
            row["failed_cells"] = [{"start": cell.start, "reason": cell.reason} for cell in lost if cell.arm == arm]
            row |= _row(own, plan) | compare_with(baseline, own, void=void.get(arm)) if own else _empty(plan)
            rows.append(row)
    return rows


def _kinds(cells: Sequence[LoadCell | FailedCell]) -> dict[str, Kind]:
    """Arm -> kind, AR first."""
    kinds: dict[str, Kind] = {cell.arm: cell.kind for cell in cells}
    return {arm: kinds[arm] for arm in sorted(kinds, key=lambda arm: (KINDS.index(kinds[arm]), arm))}


def _empty(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a rate that no start of an arm finished."""
    names = "+".join(dict.fromkeys(request["dataset"] for request in plan["requests"]))
    return {"dataset": names, "temperature": plan["sampling"]["temperature"], "starts": 0, "load": None}


def _row(cells: Sequence[LoadCell], plan: Mapping[str, Any]) -> dict[str, Any]:
    """All results of one rate of one arm but its comparison with plain decoding."""
    requests = [request for cell in cells for request in cell.requests]
    backlog, latency = judge_backlog(cells), latency_summary(requests)
    return {
        **_identity(cells[0]),
        "starts": len(cells),
        "wanted": plan["wanted"],
        "prompts": len({request.unit for request in requests}),
        "requests": len(requests),
        "answered": len(answered(requests)),
        "failures": dict(Counter(request.failure for request in requests if request.failure is not None)),
        "load": backlog.load,
        "backlog": _backlog(backlog),
        "rates": _rates(cells),
        "tokens_per_second": _mean([tokens_per_second(cell) for cell in cells]),
        "tokens_per_second_by_start": [tokens_per_second(cell) for cell in cells],
        "makespan": _mean([cell.seconds for cell in cells]),
        **latency,
        "goodput": goodput(cells, slo_ttft_ms=float(plan["slo_ttft_ms"]), slo_tpot_ms=float(plan["slo_tpot_ms"])),
        "queueing": _queueing(cells, requests),
        "running": _running(cells),
        "client": client_check(cells, median_ttft=latency["ttft"]["p50"] if latency["ttft"] else None),
        "acceptance": acceptance(cells),
        "preemptions": sum(cell.counters["preemptions"] for cell in cells),
        "load_average_before": [cell.load_average for cell in cells],
        **_answers(answered(requests)),
    }


def _identity(cell: LoadCell) -> dict[str, Any]:
    return {
        "dataset": cell.dataset,
        "temperature": cell.temperature,
        "draft_length": longest_draft(cell.speculative_config),
        "synthetic": is_synthetic(cell.speculative_config),
        "fixed_length": cell.fixed_length,
        "max_tokens": cell.max_tokens,
        "max_num_seqs": cell.max_num_seqs,
        "max_connections": cell.max_connections,
    }


def _backlog(backlog: Backlog) -> dict[str, Any]:
    return {
        "rise": backlog.rise,
        "noise": backlog.noise,
        "arrivals": backlog.arrivals,
        "mean": backlog.mean,
    }


def _rates(cells: Sequence[LoadCell]) -> dict[str, float | None]:
    """Requests per second: by the timetable, as sent, and as answered within the steady window."""
    scheduled = [realised_rate([request.t_scheduled for request in cell.requests]) for cell in cells]
    sent = [realised_rate([r.t_sent for r in cell.requests if r.t_sent is not None]) for cell in cells]
    return {
        "scheduled": _mean_or_none(scheduled),
        "sent": _mean_or_none(sent),
        "answered": _mean([_answered_rate(cell) for cell in cells]),
    }


def _answered_rate(cell: LoadCell) -> float:
    begin, end = steady_window(cell)
    count = sum(begin < (request.t_finish or 0.0) <= end for request in answered(cell.requests))
    return count / (end - begin) if end > begin else 0.0


def goodput(cells: Sequence[LoadCell], *, slo_ttft_ms: float, slo_tpot_ms: float) -> dict[str, float]:
    """Requests per second that met both objectives, mean over starts, and their share of all that arrived."""
    good, rates, arrived = 0, [], 0
    for cell in cells:
        met = sum(meets(request, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms) for request in cell.requests)
        span = cell.seconds - min(request.t_scheduled for request in cell.requests)
        rates.append(met / span if span > 0 else 0.0)
        good, arrived = good + met, arrived + len(cell.requests)
    return {
        "requests_per_second": _mean(rates),
        "share": good / arrived,
        "slo_ttft_ms": slo_ttft_ms,
        "slo_tpot_ms": slo_tpot_ms,
    }


def _queueing(cells: Sequence[LoadCell], requests: Sequence[LoadRequest]) -> dict[str, Any]:
    """Where requests waited: in the client's timers, for a connection, in the engine's queue; and how many waited there."""
    independent = len({request.unit for request in requests})
    waits = {
        "client_lag": [request.t_released - request.t_scheduled for request in requests],
        "connection_wait": [r.t_sent - r.t_released for r in requests if r.t_sent is not None],
        "server_queue": [r.queue_seconds for r in requests if r.queue_seconds is not None],
    }
    waiting = [sample.waiting for cell in cells for sample in cell.samples]
    return {
        **{name: summarise_requests(each, independent=independent) for name, each in waits.items()},
        "waiting": summarise(waiting),
        "waiting_max": max(waiting, default=None),
    }


def _running(cells: Sequence[LoadCell]) -> dict[str, Any]:
    """The engine's running batch as /metrics showed it while requests were due, and requests under way as the client saw."""
    batches = [sample.running for cell in cells for sample in cell.samples]
    return {
        "sampled": summarise(batches),
        "sampled_max": max(batches, default=None),
        "samples": len(batches),
        "under_way": _mean([_under_way(cell) for cell in cells]),
        "kv_cache_max": max((sample.kv_cache for cell in cells for sample in cell.samples), default=None),
    }


def _under_way(cell: LoadCell) -> float:
    """Time average of requests that were sent and not ended, over the whole cell."""
    ended = [(r.t_sent, r.t_finish) for r in cell.requests if r.t_sent is not None and r.t_finish is not None]
    return sum(end - begin for begin, end in ended) / cell.seconds if cell.seconds else 0.0


def client_check(cells: Sequence[LoadCell], *, median_ttft: float | None) -> dict[str, Any]:
    """Whether the client was fast enough to be believed (`CLIENT_RULE`); None where it cannot be said."""
    delay = summarise([lag for cell in cells for lag in cell.loop_lags])
    limit = None if median_ttft is None else max(CLIENT_LIMIT * median_ttft, CLIENT_FLOOR_S)
    too_slow = None if delay is None or limit is None else delay["p99"] > limit
    return {"timer_delay": delay, "limit": limit, "too_slow": too_slow}


def acceptance(cells: Sequence[LoadCell]) -> dict[str, Any] | None:
    """Acceptance by the server's counters, and the same by requests: the two must tell the same. None without drafts.

    `residuals` are shares by which the sums over requests fall short of the counters; requests that failed are counted by
    the server and tell nothing themselves.
    """
    counted = {name: sum(cell.counters[name] for cell in cells) for name in cells[0].counters}
    drafts = counted["num_drafts"]
    if not drafts:
        return None
    requests = [request for cell in cells for request in answered(cell.requests)]
    length = max(len(cell.accepted_per_position) for cell in cells)
    by_position = [sum((cell.accepted_per_position + [0] * length)[at] for cell in cells) for at in range(length)]
    told = {
        "num_drafts": sum(request.steps or 0 for request in requests),
        "num_draft_tokens": sum(request.drafted or 0 for request in requests),
        "num_accepted_tokens": sum(request.accepted or 0 for request in requests),
        "generation_tokens": sum(request.n_out for request in requests),
    }
    return {
        "tau_engine": 1 + counted["num_accepted_tokens"] / drafts,
        "draft_acceptance_rate": counted["num_accepted_tokens"] / max(counted["num_draft_tokens"], 1),
        "marginal_by_position": [count / drafts for count in by_position],
        "counters": counted,
        "residuals": {name: (counted[name] - value) / max(counted[name], 1) for name, value in told.items()},
    }


def _answers(complete: Sequence[LoadRequest]) -> dict[str, Any]:
    firsts = [request.chunk_sizes[0] for request in complete]
    return {
        "mean_prompt_tokens": _mean_or_none([request.n_in for request in complete]),
        "mean_output_tokens": _mean_or_none([request.n_out for request in complete]),
        "mean_first_chunk_tokens": _mean_or_none(firsts),
        "finish_reasons": dict(Counter(request.finish_reason for request in complete)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def highest_sustained(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per arm: the highest rate it sustained, the lowest that saturated it, and its best goodput."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm and row["starts"]]
        sustained = [row["rate"] for row in own if row["load"] == "sustained"]
        saturated = [row["rate"] for row in own if row["load"] == "saturated"]
        good = [row["goodput"]["requests_per_second"] for row in own]
        found.append(
            {
                "arm": arm,
                "highest_sustained_rate": max(sustained, default=None),
                "lowest_saturated_rate": min(saturated, default=None),
                "best_goodput": max(good, default=None),
            }
        )
    return found
