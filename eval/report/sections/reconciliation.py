"""Part of E: do the drafting counts explain the tokens that came out?"""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, not_measured, table
from eyas.eval.report.names import PLACE, arm_label, place
from eyas.eval.report.values import count, percent

TITLE = "Reconciliation with the output"
WORDS = (
    "Output tokens should equal one per request (from reading its prompt), one per step, and the accepted ones, but for "
    "tokens cut at the end of an answer. Unexplained: what is left, as a share of the output. Engine counters: the largest "
    "share by which one of the engine's own counters differs from the sum over requests. Up to 1 % passes."
)


def reconciliation_section(results: dict[str, Any]) -> Section:
    rows = results.get("reconciliation") or []
    if not rows:
        return not_measured(TITLE)
    shown = [
        [
            *place(row),
            arm_label(results, row["arm"]),
            "passed" if row["passed"] else "FAILED",
            str(row["batch_size"]),
            count(row["output_tokens"]),
            count(row["requests"]),
            count(row["steps"]),
            count(row["accepted"]),
            count(row["undrafted_steps"]),
            count(row["cut_at_end"]),
            f"{count(row['unexplained'])} ({percent(row['unexplained_share'], 2)})",
            percent(max((counter["share"] for counter in row["counters"]), default=0.0), 2),
        ]
        for row in rows
    ]
    columns = [
        *(
            *PLACE,
            "arm",
            "outcome",
            "batch size",
            "output tokens",
            "requests",
            "steps",
            "accepted",
            "steps without draft",
        ),
        *("cut at the end", "unexplained", "engine counters"),
    ]
    failed = sum(not row["passed"] for row in rows)
    alerts = [f"{failed} of {len(rows)} cells are not explained within 1 %."] if failed else []
    marks = ["" if row["passed"] else "slower" for row in rows]
    return Section(TITLE, [WORDS], [table(columns, shown, text_columns=4, row_marks=marks)], alerts=alerts)
