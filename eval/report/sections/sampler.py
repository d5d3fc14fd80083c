"""Part of H: L0, the engine's rejection sampler against exact laws, with wrong samplers that must be found out."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, not_measured, table
from eyas.eval.report.values import count, number, percent, significant

TITLE = "L0: the sampler alone"


def sampler_section(level: dict[str, Any]) -> Section:
    if level.get("passed") is None:
        return not_measured(TITLE, level.get("why") or "")
    found = "No difference detected" if level["passed"] else "DIFFERENCE DETECTED"
    words = (
        f"{found}. Counts of emitted tokens over {count(level['rounds'])} rounds per case on a tiny vocabulary, against exact "
        f"float64 laws: {level['tests']} chi-square tests at a family-wise level of {level['level']:g} (Bonferroni: p below "
        f"{significant(level['threshold'])} each). Negative controls, samplers that are wrong on purpose: "
        f"{level['controls_found']} of {level['controls']} found out by the same tests. TV: total variation distance to the law; "
        "it means something only beside the noise floor and the detectable TV, which the test would find with probability "
        f"{percent(level['power'], 0)}, over the tokens as tested (rare ones taken together)."
    )
    tables = [_cases(level["cases"], caption="As it served")]
    installed = level["as_installed"]["cases"]
    if installed:
        tables.append(_cases(installed, caption="As installed, before anything was mended"))
    return Section(TITLE, [words], tables, alerts=_alerts(level))


def _alerts(level: dict[str, Any]) -> list[str]:
    """A defect of the engine that the measurement had to mend belongs to the reader's picture of the engine."""
    if level["as_installed"]["passed"]:
        return []
    mends = "; ".join(level["mends"]) or "nothing"
    return [
        f"The sampler as installed did NOT pass this test. Mended for everything measured here: {mends}. A server without the "
        "mend gives other answers at temperature above 0."
    ]


def _cases(cases: list[dict[str, Any]], *, caption: str) -> Table:
    rows = []
    for case in cases:
        widest = max(case["tests"], key=lambda test: test["tv"], default=None)
        rows.append(
            [
                case["name"],
                case["sampler"],
                "yes" if case["must_fail"] else "no",
                case["error"] or case["outcome"],
                "yes" if case["as_expected"] else "NO",
                count(case["rounds"]),
                significant(case["smallest_p"]),
                number(None if widest is None else widest["tv"], 4),
                number(None if widest is None else widest["noise_floor"], 4),
                number(None if widest is None else widest["detectable_tv"], 4),
            ]
        )
    columns = [
        *("case", "sampler", "must fail", "outcome", "as expected", "rounds", "smallest p"),
        *("largest TV", "its noise floor", "detectable TV"),
    ]
    marks = ["" if case["as_expected"] else "slower" for case in cases]
    return table(columns, rows, text_columns=5, row_marks=marks, caption=caption)
