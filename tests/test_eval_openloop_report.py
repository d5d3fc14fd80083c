"""What the report says of the open loop: what was asked, what failed, and percentiles only where there are prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.eval.openloop.records import LoadRequest
from eyas.eval.openloop.rows import open_loop_rows
from eyas.eval.report.document import Section
from eyas.eval.report.sections.open_loop import open_loop_section
from tests import openloop_records as made

RATES = (1.0, 2.0)
CONFIG = {"method": "eagle3", "num_speculative_tokens": 3}
ARMS = {
    "ar": {"kind": "ar", "draft_length": 0, "speculative_config": None, "synthetic": False, "slowed_by": 0.0},
    "k3": {"kind": "head", "draft_length": 3, "speculative_config": CONFIG, "synthetic": False, "slowed_by": 0.0},
}


def well_served(count: int) -> list[LoadRequest]:
    return [made.request(index, arrives=1.0 + index) for index in range(count)]


def section_of(directory: Path, requests: list[LoadRequest], *, drafted: list[LoadRequest]) -> Section:
    """The section of a session of two rates in which plain decoding served `requests` and k=3 `drafted`."""
    cells = [made.cell(requests, rate=rate) for rate in RATES]
    cells += [made.cell(drafted, arm="k3", kind="head", start=1, rate=r, speculative_config=CONFIG) for r in RATES]
    made.write_session(directory, cells)
    results: dict[str, Any] = {"open_loop": open_loop_rows(directory, session=made.SESSION), "arms": ARMS}
    return open_loop_section(results)


@pytest.mark.parametrize(
    ("count", "told", "tail"), [(100, "1.00 / 1.00 / 1.00", "p99"), (12, "1.00 / 1.00 / n/a", "p90")]
)
def test_a_p99_needs_prompts(tmp_path: Path, count: int, told: str, tail: str) -> None:
    section = section_of(tmp_path, well_served(count), drafted=well_served(count))
    latency = section.tables[1]
    row = dict(zip(latency.columns, latency.rows[0], strict=True))
    assert (row["TTFT [s]"], row["answers (prompts)"]) == (told, f"{count} ({count})")
    assert f"dotted: {tail}." in section.figures[0].caption


def test_failures_are_told_and_leave_no_ratio(tmp_path: Path) -> None:
    lossy = [*well_served(11), made.request(11, arrives=12.0, failure="HTTP 500")]
    section = section_of(tmp_path, well_served(12), drafted=lossy)
    alerts = [alert for alert in section.alerts if "failed" in alert]
    assert len(alerts) == 2, "one per rate"
    assert all("1 of 12 requests failed (HTTP 500: 1)" in alert and "no ratio" in alert for alert in alerts)
    assert [row[2:] for row in section.tables[2].rows] == [["1 of 12 requests of k3 failed", *["n/a"] * 4]] * 2
    good = section_of(tmp_path / "good", well_served(12), drafted=well_served(12))
    assert not good.alerts
    assert [row[2:] for row in good.tables[2].rows] == [["1.00x"] * 4] * 2


def test_what_was_asked_is_told(tmp_path: Path) -> None:
    section = section_of(tmp_path, well_served(9), drafted=well_served(9))
    assert "Prompts: held-out chat, 9 independent ones" in section.paragraphs[1]
    assert "temperature 0, 5 tokens at most, answers end by themselves" in section.paragraphs[1]
    assert section.alerts == ["The open loop had 9 prompts of the 10 that were asked for; none was repeated."]
