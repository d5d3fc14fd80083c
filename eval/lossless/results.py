"""The ladder's results from its stored files (stored.py): `lossless_results(DIRECTORY)`. Pure: neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eyas.eval.fidelity import check_parity
from eyas.eval.holm import holm
from eyas.eval.lossless import greedy
from eyas.eval.lossless.drafted import with_drafting
from eyas.eval.lossless.lengths import compare_lengths
from eyas.eval.lossless.sampled import compare_sampled
from eyas.eval.lossless.sampler_verdict import judge_sampler
from eyas.eval.lossless.stored import (
    LADDER,
    LOGITS,
    OFFLINE,
    SAMPLER,
    STARTS,
    Served,
    answers_fingerprint,
    is_quantised,
    read_ladder_starts,
    read_stored,
    served_cells,
)
from eyas.eval.lossless.words import combined, not_run, outcome_word
from eyas.eval.records import CellRecord, RequestRecord, StartRecord

MATCH_LEVEL = 0.05
"""Of the test that an arm repeats plain decoding as often as plain decoding repeats itself; Holm over arms."""

NO_SAMPLES = "no sampled answers were asked for (samples 0)"
LEVELS = ("L0", "L1", "L2", "L3", "L4")
HOW = ("dtype", "temperature", "top_p", "top_k", "max_tokens")
"""What ladder.json says of how the levels were served: the precision of all, the sampling of L3 and L4."""


def lossless_results(directory: Path, *, session: str) -> dict[str, Any]:
    """{"lossless": ..., "parity": ...} of a score directory's `lossless` folder.

    Args:
        session: id of the score's session.

    Raises:
        ValueError: a file is broken, or of another session.
    """
    ladder = read_stored(directory / LADDER, session=session)
    if ladder is None:
        why = "the ladder has not run"
        levels = {level: not_run(why) for level in LEVELS}
        return {"lossless": {"status": "not run", "why": why, "arms": [], "passed": None, **levels}, "parity": None}
    starts = read_ladder_starts(directory, session=session)
    served, samples = served_cells(starts), bool(ladder["samples"])
    levels = {
        "L0": _sampler_level(read_stored(directory / SAMPLER, session=session), applies=not _other_runner(starts)),
        **_greedy_levels(directory, starts, ladder=ladder, session=session),
        **(_sampled_levels(served, positions=ladder["positions"]) if samples else {}),
    }
    rows = [_arm_row(arm, stands_for, levels, sampled=samples) for arm, stands_for in ladder["arms"].items()]
    outcomes = [row["passed"] for row in rows]
    return {
        "lossless": {
            "status": "done" if None not in outcomes else "partial",
            **{name: ladder[name] for name in HOW},
            "quantised": is_quantised(starts),
            **{level: levels.get(level, not_run(NO_SAMPLES)) for level in LEVELS},
            "arms": rows,
            "mends": sorted({mend for start in starts for mend in start.description.get("mends", [])}),
            "passed": combined(outcomes),
        },
        "parity": _parity(directory, served, session=session),
    }


def _other_runner(starts: Sequence[StartRecord]) -> bool:
    """Whether an engine served with vLLM's second model runner, which has a rejection sampler of its own."""
    return any(start.description["engine"].get("model_runner_v2") for start in starts)


def _sampler_level(raw: dict[str, Any] | None, *, applies: bool) -> dict[str, Any]:
    """L0. Where another sampler served (`applies` false) it is shown and decides nothing: L1 to L4 are left."""
    if raw is None:
        return not_run("the sampler's process has not run") | {"applies": applies}
    level = judge_sampler(raw) if "cases" in raw else not_run(raw["why"])
    return level | {"applies": applies}


def _level(served: Served, level: str, compare: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A level by `compare(plain, null, arms)`, with what the arms drafted in it."""
    if level not in served.get("ar", {}):
        return not_run("the start of plain decoding did not finish")
    cells = {run: cells[level] for run, cells in served.items() if level in cells}
    arms = {run: cell for run, cell in cells.items() if run not in ("ar", "null")}
    if not arms:
        return not_run("no start of an arm finished")
    return with_drafting(compare(cells["ar"], cells.get("null"), arms), arms)


def _greedy_levels(
    directory: Path, starts: Sequence[StartRecord], *, ladder: dict[str, Any], session: str
) -> dict[str, dict[str, Any]]:
    """L1 and L2. Where the target is quantised it was not asked about differences, and they stay undecided."""
    served, quantised = served_cells(starts), is_quantised(starts)
    logits = None if quantised else read_stored(directory / LOGITS, session=session)
    if logits is not None and logits["answers"] != answers_fingerprint(served):
        raise ValueError(
            f"{directory / LOGITS} is about other answers than those in {directory / STARTS}; run `eyas score` again, which asks "
            "the target anew"
        )
    levels = {}
    for level in ("L1", "L2"):
        facts = None if quantised else (logits or {}).get(level, {})
        levels[level] = _level(served, level, partial(_greedy_level, facts=facts, dtype=ladder["dtype"]))
    return levels


def _greedy_level(
    plain: CellRecord,
    null: CellRecord | None,
    arms: Mapping[str, CellRecord],
    *,
    facts: Mapping[str, Any] | None,
    dtype: str,
) -> dict[str, Any]:
    """L1 against the null of another batch size; L2 has none: it asks for equality. `facts`: by run; None = not asked."""

    def of(run: str) -> list[dict[str, Any]] | None:
        return None if facts is None else facts.get(run, [])

    allowed = greedy.null_gap(of("null") or [])
    rows = []
    for arm, cell in arms.items():
        row = greedy.compare(plain.requests, cell.requests, facts=of(arm), dtype=dtype, allowed_by_null=allowed)
        match_p = None if null is None else greedy.match_rate_p(plain.requests, cell.requests, null.requests)
        rows.append({"arm": arm, **row, "exact": row["identical"] == row["requests"], "match_p": match_p})
    return {
        "status": "done",
        "dtype": dtype,
        "batch_size": plain.batch_size,
        "requests": len(plain.requests),
        "tie_gap": greedy.TIE_GAP,
        "null_gap": allowed,
        "null": None if null is None else _null_row(plain, null, of("null"), dtype=dtype),
        "arms": _judged(rows, level=plain.dataset, dtype=dtype),
    }


def _judged(rows: Sequence[dict[str, Any]], *, level: str, dtype: str) -> list[dict[str, Any]]:
    adjusted = iter(holm([row["match_p"] for row in rows if row["match_p"] is not None]))
    judged = []
    for row in rows:
        p_holm = None if row["match_p"] is None else next(adjusted)
        fewer = p_holm is not None and p_holm <= MATCH_LEVEL
        alone = level == "L2"
        passed, why = greedy.judge_alone(row, dtype=dtype) if alone else greedy.judge_batch(row, fewer=fewer)
        judged.append({**row, "match_p_holm": p_holm, "passed": passed, "outcome": outcome_word(passed), "why": why})
    return judged


def _null_row(
    plain: CellRecord, null: CellRecord, facts: Sequence[dict[str, Any]] | None, *, dtype: str
) -> dict[str, Any]:
    """Plain decoding against itself: whatever it does is allowed, so nothing is judged."""
    allowed = greedy.null_gap(facts or [])
    row = greedy.compare(plain.requests, null.requests, facts=facts, dtype=dtype, allowed_by_null=allowed)
    return {"batch_size": null.batch_size, **row}


def _sampled_levels(served: Served, *, positions: int) -> dict[str, dict[str, Any]]:
    def tokens(plain: CellRecord, null: CellRecord | None, arms: Mapping[str, CellRecord]) -> dict[str, Any]:
        return compare_sampled(plain.requests, _answers(null), _answers_of(arms), positions=positions)

    def lengths(plain: CellRecord, null: CellRecord | None, arms: Mapping[str, CellRecord]) -> dict[str, Any]:
        return compare_lengths(plain.requests, _answers(null), _answers_of(arms))

    return {"L3": _level(served, "L3", tokens), "L4": _level(served, "L4", lengths)}


def _answers(cell: CellRecord | None) -> list[RequestRecord] | None:
    return None if cell is None else cell.requests


def _answers_of(arms: Mapping[str, CellRecord]) -> dict[str, list[RequestRecord]]:
    return {arm: cell.requests for arm, cell in arms.items()}


def _arm_row(arm: str, stands_for: list[str], levels: dict[str, dict[str, Any]], *, sampled: bool) -> dict[str, Any]:
    """An arm over all levels. `sampled`: sampled answers were asked for, so that L3 and L4 belong to "passed"."""

    def passed(level: str) -> bool | None:
        rows = levels[level].get("arms", []) if level in levels else []
        return next((row["passed"] for row in rows if row["arm"] == arm), None)

    sampler = levels["L0"]
    greedy_levels = [passed("L1"), passed("L2")]
    sampled_levels = [passed("L3"), passed("L4")]
    if sampler["applies"]:
        greedy_levels.append(sampler.get("greedy_passed"))
        sampled_levels.append(sampler.get("sampled_passed"))
    greedy_passed, sampled_passed = combined(greedy_levels), combined([*greedy_levels, *sampled_levels])
    return {
        "arm": arm,
        "stands_for": stands_for,
        "greedy_passed": greedy_passed,
        "sampled_passed": sampled_passed,
        "passed": sampled_passed if sampled else greedy_passed,
    }


def _parity(directory: Path, served: Served, *, session: str) -> dict[str, Any] | None:
    offline = read_stored(directory / OFFLINE, session=session)
    if offline is None or "L1" not in served.get(offline["arm"], {}):
        return None
    drafted = served[offline["arm"]]["L1"].requests
    parity = check_parity(drafted, offline=offline["accepted"], draft_length=offline["draft_length"])
    return {"arm": offline["arm"], "dtype": offline["dtype"], **parity}
