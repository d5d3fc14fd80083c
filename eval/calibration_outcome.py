"""What a calibration must show before anybody may call it passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.eval.verdict import ALPHA

MIN_CELLS = 40
MIN_SESSIONS = 10
"""With fewer sessions even a call in several of them would leave the stated rate possible."""
FOUND = 0.9
"""Share of tests in which the largest known factor, and an arm that is known to be slow, must be found."""


def outcome(
    records: Mapping[str, Any] | None, *, slowed: Sequence[Mapping[str, Any]], simulated: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Whether the calibration passed, with the reasons in words.

    Returns:
        passed: False when anything failed; else None when anything is lacking; else True.
        failed: more sessions call a difference than is stated, or a difference that is there was missed.
        lacking: what a session needs so that passing says something.
    """
    failed, lacking = [], []
    if records is None or records["cells"] < MIN_CELLS or records["sessions"] < MIN_SESSIONS:
        cells, sessions = (0, 0) if records is None else (records["cells"], records["sessions"])
        lacking.append(
            f"AR against AR in {cells} cells and {sessions} splits of the starts; it takes {MIN_CELLS} cells and "
            f"{MIN_SESSIONS} splits (five AR starts)"
        )
    if not slowed:
        lacking.append("no arm was slowed by a known share (slowed_by), so no known difference was there to be found")
    if records is not None:
        failed += _too_many(records["session_rate_interval"], "splits of the AR starts")
        found = records["detection"][-1]
        if found["found"] < FOUND:
            failed.append(
                f"AR starts slowed {found['slow_down']:g}x are called slower in {found['found']:.0%} of the tests; "
                f"{FOUND:.0%} are needed"
            )
    if simulated is not None:
        failed += _too_many(simulated["no_difference"]["alarms_interval"], "made-up sessions")
    failed += [
        f"arm {each['arm']}, known to be slow, is called slower in {each['found'] or 0:.0%} of {each['cells']} cells; "
        f"{FOUND:.0%} are needed (more starts see smaller differences)"
        for each in slowed
        if each["found"] is None or each["found"] < FOUND
    ]
    return {"passed": False if failed else None if lacking else True, "failed": failed, "lacking": lacking}


def _too_many(interval: Sequence[float], what: str) -> list[str]:
    """The stated rate is exceeded when all rates that the count leaves possible are above it."""
    if interval[0] <= ALPHA:
        return []
    return [f"at least {interval[0]:.0%} of the {what} call a difference where there is none; {ALPHA:.0%} are stated"]


def outcome_sentence(calibration: Mapping[str, Any]) -> str:
    """Passed, failed or undecided, and why."""
    if calibration["failed"]:
        return f"Calibration FAILED: {'; '.join(calibration['failed'])}."
    if calibration["lacking"]:
        return f"Calibration undecided, too little to say that it passed: {'; '.join(calibration['lacking'])}."
    return "Calibration passed."
