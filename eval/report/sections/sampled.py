"""Part of H: L3 and L4, distributions of sampled tokens and of whole answers."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, not_measured, table
from eyas.eval.report.names import arm_label
from eyas.eval.report.values import MISSING, count, number, p_value, percent

SAMPLED = "L3: sampled tokens, position by position"
LENGTHS = "L4: lengths of sampled answers and reasons to end"
LENGTH_TESTS = {"p_lengths": "lengths", "p_mean": "mean length", "p_reasons": "reasons"}
Row = dict[str, Any]


def sampled_section(results: dict[str, Any], level: Row) -> Section:
    if level["status"] != "done":
        return not_measured(SAMPLED, level.get("why") or "")
    words = (
        f"{count(level['samples'])} answers per arm to {level['prompts']} prompts, a seed each, compared by a two-sample chi-square "
        "at every position (the first token comes from the prompt, the next from verification, the last is the bonus token: other "
        f"code each). p by permutation, corrected over arms and positions (Holm), level {level['level']:g}. Detectable TV: a "
        f"total variation distance of this size would have been found with probability {percent(level['power'], 0)}. It is over "
        "tokens frequent enough to be compared and the rare ones taken together: what differs only among the rare, whose share of "
        "the samples is given, is not seen. A position with a detectable TV of "
        f"{level['weakest']:g} or more is undecided, and so is its arm; pairs of positions may only find a difference."
    )
    named = [(arm_label(results, row["arm"]), row) for row in level["arms"]]
    if level["null"] is not None:
        named.append(("AR again (null)", level["null"]))
    rows = [
        [
            name,
            test["where"],
            test["outcome"],
            " + ".join(count(n) for n in test["samples"]),
            f"{number(test['statistic'], 1)} ({test['degrees']})",
            p_value(test["p_value"]),
            p_value(test["p_holm"]),
            number(test["tv"], 4),
            number(test["detectable_tv"], 4),
            percent(test["rare_share"]),
        ]
        for name, row in named
        for test in row["tests"]
    ]
    columns = [
        *(
            "arm",
            "where",
            "outcome",
            "samples",
            "chi-square (degrees)",
            "p",
            "p (Holm)",
            "TV",
            "detectable TV",
            "rare",
        ),
    ]
    return Section(SAMPLED, [words], [table(columns, rows, text_columns=3)])


def lengths_section(results: dict[str, Any], level: Row) -> Section:
    if level["status"] != "done":
        return not_measured(LENGTHS, level.get("why") or "")
    words = (
        f"{count(level['samples'])} sampled answers per arm, paired by request. Lengths: Kolmogorov and Smirnov's distance, p by "
        "swapping the arms within pairs; mean length likewise. Reasons: McNemar's exact test on answers cut at the limit. "
        f"Corrected over arms and tests (Holm), level {level['level']:g}. Detectable: two distributions of lengths this far apart "
        f"would have been found with probability {percent(level['power'], 0)} or more."
    )
    named = [(arm_label(results, row["arm"]), row["outcome"], row) for row in level["arms"]]
    if level["null"] is not None:
        named.append(("AR again (null)", level["null"]["outcome"], level["null"]))
    rows = [["AR", "the reference", *_summary(level["ar"]), *[MISSING] * (2 + len(LENGTH_TESTS))]]
    rows += [
        [
            name,
            found,
            *_summary(row),
            number(row["ks"], 3),
            number(row["detectable_ks"], 3),
            *(f"{p_value(row[name])} ({p_value(row['p_holm'][name])})" for name in LENGTH_TESTS),
        ]
        for name, found, row in named
    ]
    columns = [
        *("arm", "outcome", "ended by", "mean tokens", "KS distance", "detectable"),
        *(f"p, {label} (Holm)" for label in LENGTH_TESTS.values()),
    ]
    return Section(LENGTHS, [words], [table(columns, rows, text_columns=3)])


def _summary(row: Row) -> list[str]:
    reasons = ", ".join(f"{reason} {n}" for reason, n in row["finish_reasons"].items())
    return [reasons, number(row["mean_tokens"], 1)]
