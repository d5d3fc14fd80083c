"""The ladder's results from its stored files: `lossless_results(DIRECTORY)`. Pure: neither torch nor vLLM.

Files of the directory: ladder.json (which arm stands for which), starts/ (records of the engines), sampler.json (counts of
L0), logits.json (what the target says where answers differ), offline.json (acceptance predicted along the served answers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.eval.fidelity import check_parity
from eyas.eval.holm import holm
from eyas.eval.lossless import greedy
from eyas.eval.lossless.lengths import compare_lengths
from eyas.eval.lossless.sampled import compare_sampled
from eyas.eval.lossless.sampler_verdict import judge_sampler
from eyas.eval.lossless.words import combined, not_run, outcome_word
from eyas.eval.records import RequestRecord, StartRecord, read_starts
from eyas.heads.files import read_json

LADDER = "ladder.json"
SAMPLER = "sampler.json"
LOGITS = "logits.json"
OFFLINE = "offline.json"
STARTS = "starts"

MATCH_LEVEL = 0.05
"""Of the test that an arm repeats plain decoding as often as plain decoding repeats itself; Holm over arms."""

NO_SAMPLES = "no sampled answers were asked for (samples 0)"
LEVELS = ("L0", "L1", "L2", "L3", "L4")
Served = dict[str, dict[str, list[RequestRecord]]]
"""Run ("ar", "null", or an arm) -> level -> its requests."""


def lossless_results(directory: Path) -> dict[str, Any]:
    """{"lossless": ..., "parity": ...} of a score directory's `lossless` folder.

    Raises:
        ValueError: a file is broken, or files of two sessions are mixed.
    """
    if not (directory / LADDER).is_file():
        why = "the ladder has not run"
        levels = {level: not_run(why) for level in LEVELS}
        return {"lossless": {"status": "not run", "why": why, "arms": [], "passed": None, **levels}, "parity": None}
    ladder = read_json(directory / LADDER)
    starts = read_starts(directory / STARTS) if (directory / STARTS).is_dir() else []
    served, arms = _served(starts), ladder["arms"]
    facts = _stored(directory / LOGITS) or {}
    sampler = _stored(directory / SAMPLER)
    levels = {
        "L0": _sampler_level(sampler, applies=not _other_runner(starts)),
        "L1": _level(served, "L1", lambda: _greedy_level(served, "L1", facts, ladder=ladder)),
        "L2": _level(served, "L2", lambda: _greedy_level(served, "L2", facts, ladder=ladder)),
        "L3": not_run(NO_SAMPLES),
        "L4": not_run(NO_SAMPLES),
    }
    if ladder["samples"]:
        levels["L3"] = _level(served, "L3", lambda: _sampled_level(served, positions=ladder["positions"]))
        levels["L4"] = _level(served, "L4", lambda: _length_level(served))
    rows = [_arm_row(arm, stands_for, levels, sampled=bool(ladder["samples"])) for arm, stands_for in arms.items()]
    outcomes = [row["passed"] for row in rows]
    return {
        "lossless": {
            "status": "done" if None not in outcomes else "partial",
            **{name: ladder[name] for name in ("dtype", "temperature", "max_tokens")},
            **levels,
            "arms": rows,
            "mends": sorted({mend for start in starts for mend in start.description.get("mends", [])}),
            "passed": combined(outcomes),
        },
        "parity": _parity(directory, served),
    }


def _stored(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _served(starts: Sequence[StartRecord]) -> Served:
    """The first start of plain decoding is the reference, the second the null. A start that broke off lacks cells."""
    names = {start.start: start.arm for start in starts}
    names |= {number: name for number, name in ((0, "ar"), (1, "null")) if number in names}
    return {names[start.start]: {cell.dataset: cell.requests for cell in start.cells} for start in starts}


def _other_runner(starts: Sequence[StartRecord]) -> bool:
    """Whether an engine served with vLLM's second model runner, which has a rejection sampler of its own."""
    return any(start.description["engine"].get("model_runner_v2") for start in starts)


def _sampler_level(raw: dict[str, Any] | None, *, applies: bool) -> dict[str, Any]:
    """L0. Where another sampler served (`applies` false) it is shown and decides nothing: L1 to L4 are left."""
    if raw is None:
        return not_run("the sampler's process has not run") | {"applies": applies}
    level = judge_sampler(raw) if "cases" in raw else not_run(raw["why"])
    return level | {"applies": applies}


def _level(served: Served, level: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if level not in served.get("ar", {}):
        return not_run("the start of plain decoding did not finish")
    if not _arms(served, level):
        return not_run("no start of an arm finished")
    return compute()


def _arms(served: Served, level: str) -> dict[str, list[RequestRecord]]:
    return {name: levels[level] for name, levels in served.items() if name not in ("ar", "null") and level in levels}


def _greedy_level(served: Served, level: str, facts: dict[str, Any], *, ladder: dict[str, Any]) -> dict[str, Any]:
    """L1 against the null of another batch size; L2 has none: it asks for equality."""
    plain, null = served["ar"][level], served.get("null", {}).get(level)
    dtype, known = ladder["dtype"], facts.get(level, {})
    allowed = greedy.null_gap(known.get("null", []))
    rows = []
    for arm, other in _arms(served, level).items():
        row = greedy.compare(plain, other, facts=known.get(arm, []), dtype=dtype, allowed_by_null=allowed)
        match_p = None if null is None else greedy.match_rate_p(plain, other, null)
        rows.append({"arm": arm, **row, "exact": row["identical"] == row["requests"], "match_p": match_p})
    adjusted = iter(holm([row["match_p"] for row in rows if row["match_p"] is not None]))
    for row in rows:
        row["match_p_holm"] = None if row["match_p"] is None else next(adjusted)
        fewer = row["match_p_holm"] is not None and row["match_p_holm"] <= MATCH_LEVEL
        row["passed"] = row["violations"] == 0 and not fewer
        row["outcome"] = outcome_word(row["passed"])
    return {
        "status": "done",
        "dtype": dtype,
        "batch_size": len(plain) if level == "L1" else 1,
        "requests": len(plain),
        "tie_gap": greedy.TIE_GAP,
        "null_gap": allowed,
        "null": None if null is None else _null_row(plain, null, known.get("null", []), ladder=ladder),
        "arms": rows,
        "passed": all(row["passed"] for row in rows),
    }


def _null_row(
    plain: Sequence[RequestRecord],
    null: Sequence[RequestRecord],
    facts: Sequence[dict[str, Any]],
    *,
    ladder: dict[str, Any],
) -> dict[str, Any]:
    """Plain decoding against itself: whatever it does is allowed, so nothing is judged."""
    row = greedy.compare(plain, null, facts=facts, dtype=ladder["dtype"], allowed_by_null=greedy.null_gap(facts))
    return {"batch_size": ladder["null_batch_size"], **row}


def _sampled_level(served: Served, *, positions: int) -> dict[str, Any]:
    null = served.get("null", {}).get("L3")
    return compare_sampled(served["ar"]["L3"], null, _arms(served, "L3"), positions=positions)


def _length_level(served: Served) -> dict[str, Any]:
    return compare_lengths(served["ar"]["L4"], served.get("null", {}).get("L4"), _arms(served, "L4"))


def _arm_row(arm: str, stands_for: list[str], levels: dict[str, dict[str, Any]], *, sampled: bool) -> dict[str, Any]:
    """An arm over all levels. `sampled`: sampled answers were asked for, so that L3 and L4 belong to "passed"."""

    def passed(level: str) -> bool | None:
        return next((row["passed"] for row in levels[level].get("arms", []) if row["arm"] == arm), None)

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


def _parity(directory: Path, served: Served) -> dict[str, Any] | None:
    offline = _stored(directory / OFFLINE)
    if offline is None or "L1" not in served.get(offline["arm"], {}):
        return None
    drafted = served[offline["arm"]]["L1"]
    parity = check_parity(drafted, offline=offline["accepted"], draft_length=offline["draft_length"])
    return {"arm": offline["arm"], "dtype": offline["dtype"], **parity}
