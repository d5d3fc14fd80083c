"""What stands against believing the numbers is said on the first screen, and words do not claim more than was judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.eval.report.sections.alerts import alerts
from eyas.eval.report.sections.verdict import verdict_section
from eyas.eval.report.words import best_k_sentence
from eyas.heads.files import read_json

Results = dict[str, Any]
GROUP = ("heldout", 0.0)


@pytest.fixture(scope="module")
def full(full_session: Path) -> Results:
    return read_json(full_session / "results.json")


@pytest.fixture
def calm(full: Results) -> Results:
    """The same session without anything that stands against it."""
    cells = [row | {"prompts": 12, "needed_prompts": 12} for row in full["cells"]]
    running = [row | {"at_nominal": 0.9} for row in full["running"]]
    lossless = full["lossless"]
    arms = [row | {"greedy_passed": True, "sampled_passed": True} for row in lossless["arms"]]
    calibration = full["calibration"] | {"passed": None, "failed": []}
    return full | {
        "cells": cells,
        "running": running,
        "lossless": lossless | {"arms": arms},
        "failures": [],
        "calibration": calibration,
        "mends": [],
    }


def of_cells(rows: list[dict[str, Any]], change: dict[str, Any], **where: Any) -> list[dict[str, Any]]:
    """`rows`, with `change` in those that fit `where`."""
    return [row | change if all(row[name] == value for name, value in where.items()) else row for row in rows]


def test_a_calm_session_has_no_alert(calm: Results) -> None:
    assert alerts(calm) == []


def test_too_few_prompts_are_said_first(calm: Results) -> None:
    few = of_cells(calm["cells"], {"prompts": 4}, dataset="humaneval", temperature=1.0)
    (found,) = [alert for alert in alerts(calm | {"cells": few}) if "fewer independent prompts" in alert]
    assert found.startswith("1 of 14 cells have fewer independent prompts than they need"), "however many arms it has"
    assert "HumanEval at batch size 8, 4 of 12" in found


def test_batch_sizes_of_different_prompts_are_said(calm: Results) -> None:
    uneven = of_cells(calm["cells"], {"prompts": 32}, dataset="heldout", batch_size=32)
    (found,) = alerts(calm | {"cells": uneven})
    assert found.startswith("Batch sizes answer different numbers of prompts (12 to 32)")


@pytest.mark.parametrize(("share", "found"), [(0.81, 0), (0.79, 1)])
def test_a_batch_that_ran_half_empty_is_said(calm: Results, share: float, found: int) -> None:
    place = {"dataset": "heldout", "temperature": 0.0, "batch_size": 32, "arm": "k5", "phase": "grid"}
    said = alerts(calm | {"running": of_cells(calm["running"], {"at_nominal": share}, **place)})
    assert len(said) == found
    if found:
        assert "In 1 of 14 cells the full batch ran for less than 80 %" in said[0]
        assert "(least: 79 %, held-out chat, temperature 0, batch size 32)" in said[0]


def test_a_mended_engine_is_said(calm: Results) -> None:
    (found,) = alerts(calm | {"mends": ["temperatures of one row were used for all"]})
    assert (
        "The engine was mended in its process before it was measured: temperatures of one row were used for all"
        in found
    )


def test_starts_are_judged_by_the_phase_that_has_fewer(calm: Results) -> None:
    later = calm["schedule_starts"] | {"ar": 2}
    assert calm["starts"]["ar"] == 3
    (found,) = alerts(calm | {"schedule_starts": later})
    assert "Fewer than 3 fresh starts of an engine (AR 2)" in found
    words = verdict_section(calm | {"schedule_starts": later}).parts[0].paragraphs[0]
    assert "2 to 3 fresh starts per arm" in words


@pytest.mark.parametrize(
    ("kept", "words"),
    [(0, "nothing of them is in any figure"), (3, "the 3 blocks that they had finished are in the figures")],
)
def test_what_failed_starts_left_is_said(calm: Results, kept: int, words: str) -> None:
    failure = {"arm": "k3", "start": 4, "reason": "exit code 1", "log_tail": [], "kept_blocks": kept}
    (found,) = alerts(calm | {"failures": [failure]})
    assert found == f"1 starts failed (k=3); {words}; see section J."


def test_a_failed_calibration_is_said(calm: Results) -> None:
    failed = calm["calibration"] | {"passed": False, "failed": ["at least 12% of the splits call a difference"]}
    (found,) = alerts(calm | {"calibration": failed})
    assert "The statistics failed their calibration in this session: at least 12%" in found


def test_the_highest_point_estimate_is_no_winner_unless_judged(full: Results) -> None:
    def sentence(arm: str, directions: dict[str, str | None]) -> str:
        place = {"dataset": "heldout", "temperature": 0.0, "batch_size": 4}
        cells = [
            row | place | {"arm": name, "phase": "grid", "direction": found}
            for row, (name, found) in zip(full["cells"], directions.items(), strict=False)
        ]
        return best_k_sentence(full | {"best_k": [place | {"arm": arm, "phase": "grid"}], "cells": cells})

    assert sentence("k3", {"k3": "faster", "k1": None}).endswith("temperature 0: k=3 at 4.")
    assert sentence("k3", {"k3": None, "k1": "faster"}).endswith("k=3 at 4 (not distinguishable from AR).")
    assert sentence("ar", {"k3": "slower", "k1": "slower"}).endswith("AR at 4.")
    assert sentence("ar", {"k3": "slower", "k1": None}).endswith("AR at 4 (not distinguishable from k=1).")


def test_the_main_table_shows_the_grids_plain_decoding_and_how_full_batches_were(full: Results) -> None:
    """AR of the schedule's phase made 17 tok/s at batch size 1: not beside the grid's ratios."""
    schedule = [row | {"ar_tokens_per_second": 17.0} for row in full["cells"] if row["kind"] == "schedule"]
    grid = [row for row in full["cells"] if row["kind"] != "schedule"]
    table = verdict_section(full | {"cells": [*schedule, *grid]}).tables[0]
    assert table.columns[:2] == ["batch size", "AR tok/s"]
    assert (table.columns[-1], table.rows[0][-1]) == ("full batch, AR / least", "100 % / 100 %")
    plain = next(row for row in grid if (row["dataset"], row["temperature"], row["batch_size"]) == (*GROUP, 1))
    assert table.rows[0][:2] == ["1", f"{plain['ar_tokens_per_second']:.1f}"]
    assert "17.0" not in {value for row in table.rows for value in row}
