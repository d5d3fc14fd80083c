"""H: the losslessness ladder, and predicted against served acceptance on the same answers."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.names import arm_label
from eyas.eval.report.sections.greedy import greedy_section
from eyas.eval.report.sections.sampled import lengths_section, sampled_section
from eyas.eval.report.sections.sampler import sampler_section
from eyas.eval.report.values import MISSING, count, listing, number, percent

TITLE = "H. Losslessness"
LEVELS = {
    "L0": "the sampler alone, against exact laws",
    "L1": "greedy tokens, all prompts in one batch",
    "L2": "greedy tokens, one prompt at a time",
    "L3": "sampled tokens, position by position",
    "L4": "lengths of sampled answers and reasons to end",
}
Row = dict[str, Any]


def lossless_section(results: dict[str, Any]) -> Section:
    lossless = results.get("lossless")
    if lossless is None or lossless["status"] == "not run":
        why = "No cell can be SUPPORTED without it."
        return Section(TITLE, [not_measured("", why).paragraphs[0]], parts=[_parity(results)])
    words = (
        'Does drafting change what comes out? Each level asks with another instrument. The answer is never "proved lossless": it '
        'is "no difference detected", with the number of samples and the size of difference that would have been seen.'
    )
    parts = [
        sampler_section(lossless["L0"]),
        greedy_section(results, "L1", lossless["L1"]),
        greedy_section(results, "L2", lossless["L2"]),
        sampled_section(results, lossless["L3"]),
        lengths_section(results, lossless["L4"]),
        _parity(results),
    ]
    failed = [level for level in LEVELS if lossless[level].get("passed") is False]
    alerts = [f"FAILED: {listing(failed)}."] if failed else []
    shown = [_levels(results, lossless), _arms(results, lossless), *_drafted(results, lossless)]
    return Section(TITLE, [words, _scope(lossless), *_mends(lossless)], shown, alerts=alerts, parts=parts)


def _scope(lossless: Row) -> str:
    """What was served for the ladder, and so what it speaks about."""
    greedy, sampled = lossless["L1"], lossless["L3"]
    words = f"What it speaks about: engines in {lossless['dtype']}, held-out prompts, answers of at most {lossless['max_tokens']} tokens."
    if greedy["status"] == "done":
        words += f" L1 and L2 decode greedily, L1 in batches of {greedy['batch_size']} and L2 one prompt at a time."
    if sampled["status"] == "done":
        words += (
            f" L3 and L4 sample at temperature {lossless['temperature']:g}, top-p {lossless['top_p']:g}, "
            f"top-k {lossless['top_k'] or 'off'}."
        )
    left_out = lossless["L0"].get("exercised", {}).get("not_exercised")
    if left_out:
        words += f" L0 does not exercise {left_out}."
    return f"{words} Cells of other prompts, decoding, precision or batch sizes rest on it by inference: see section K."


def _levels(results: dict[str, Any], lossless: Row) -> Table:
    rows = [
        [level, question, outcome(lossless[level]), _why(results, lossless[level])]
        for level, question in LEVELS.items()
    ]
    return table(["level", "question", "outcome", "why not passed"], rows, text_columns=4, caption="The ladder")


def _why(results: dict[str, Any], level: Row) -> str:
    """Why a level did not run, is undecided or failed, by arm where arms differ."""
    if level.get("why"):
        return level["why"]
    reasons = [(row["arm"], row["why"]) for row in level.get("arms", []) if row["why"]]
    return "; ".join(f"{arm_label(results, arm)}: {why}" for arm, why in reasons)


def _drafted(results: dict[str, Any], lossless: Row) -> list[Table]:
    """How much was drafted in the answers that were compared: without drafts a level compares plain decoding with itself."""
    levels = [level for level in LEVELS if lossless[level].get("arms")]
    if not levels:
        return []
    found = {(row["arm"], level): row for level in levels for row in lossless[level]["arms"]}
    rows = [
        [arm_label(results, row["arm"]), *(_drafted_in(found.get((row["arm"], level))) for level in levels)]
        for row in lossless["arms"]
    ]
    caption = "Drafted in the compared answers, by level: without drafts a level says nothing about an arm"
    return [table(["arm", *levels], rows, text_columns=1 + len(levels), caption=caption)]


def _drafted_in(row: Row | None) -> str:
    if row is None:
        return MISSING
    answers = f"{count(row['answers_drafted'])} of {count(row['answers'])} answers"
    return f"{count(row['drafted_tokens'])} tokens in {answers}, batch size {row['batch_size']}"


def outcome(level: Row) -> str:
    """A level in a word."""
    if level.get("passed") is None:
        return "undecided" if level["status"] == "done" else "not run"
    if level.get("applies") is False:
        return "decides nothing: the engines served with another sampler"
    return "no difference detected" if level["passed"] else "DIFFERENCE DETECTED"


def _arms(results: dict[str, Any], lossless: Row) -> Table:
    words = {None: "undecided, or not wholly run", True: "passed", False: "FAILED"}
    rows = [
        [
            arm_label(results, row["arm"]),
            listing([arm_label(results, arm) for arm in row["stands_for"]]),
            words[row["greedy_passed"]],
            words[row["sampled_passed"]],
        ]
        for row in lossless["arms"]
    ]
    columns = ["arm", "stands for", "temperature 0 (L0 to L2)", "temperature above 0 (L0 to L4)"]
    return table(
        columns, rows, text_columns=4, caption="By arm: the longest chain runs the same code as the shorter ones"
    )


def _mends(lossless: Row) -> list[str]:
    found = lossless.get("mends") or []
    return [f"Mended in the engine for this check: {'; '.join(found)}."] if found else []


def _parity(results: dict[str, Any]) -> Section:
    title = "Predicted against served acceptance, same answers"
    parity = results.get("parity")
    if parity is None:
        return not_measured(title)
    agree = "agree" if parity["passed"] else "DO NOT agree"
    words = (
        f"Offline and served tau {agree} (difference {percent(parity['relative_difference'], 2)}, tolerance "
        f"{percent(parity['tolerance'])}): chain drafting simulated outside the engine along the answers that "
        f"{arm_label(results, parity['arm'])} served in L1 ({parity['dtype']}), k={parity['draft_length']}, step-weighted."
    )
    rows = [
        [
            name,
            count(parity[name]["drafts"]),
            number(parity[name]["tau_step_weighted"], 4),
            " ".join(number(rate, 4) for rate in parity[name]["marginal"]),
        ]
        for name in ("offline", "served")
    ]
    return Section(title, [words], [table(["", "draft steps", "tau", "marginal by position"], rows, text_columns=1)])
