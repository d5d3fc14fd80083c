from __future__ import annotations

import pytest

from eyas.eval.stats import RatioInterval
from eyas.eval.verdict import Lossless, best_arm, judge

FASTER = RatioInterval(1.25, 1.15, 1.35)


@pytest.mark.parametrize(
    ("interval", "spread", "starts", "lossless", "word", "reason"),
    [
        (FASTER, 1.05, 3, "passed", "SUPPORTED", "3 starts per arm"),
        (FASTER, 1.05, 2, "passed", "INCONCLUSIVE", "only 2 starts per arm; SUPPORTED needs 3"),
        (FASTER, None, 1, "passed", "INCONCLUSIVE", "only 1 start per arm"),
        (FASTER, 1.30, 3, "passed", "INCONCLUSIVE", "two AR starts differ as much (1.30x)"),
        (FASTER, 1.05, 3, "not run", "INCONCLUSIVE", "lossless check did not run"),
        (FASTER, 1.05, 3, "failed", "NOT SUPPORTED", "outputs differ"),
        (RatioInterval(1.02, 0.97, 1.08), 1.01, 5, "passed", "INCONCLUSIVE", "includes 1"),
        (RatioInterval(1.02, 1.0, 1.08), 1.01, 5, "passed", "INCONCLUSIVE", "includes 1"),
        (RatioInterval(0.8, 0.7, 0.9), 1.5, 1, "failed", "SLOWER", "below 1"),
    ],
)
def test_rules(
    interval: RatioInterval, spread: float | None, starts: int, lossless: Lossless, word: str, reason: str
) -> None:
    verdict = judge(interval, spread=spread, ar_starts=starts, head_starts=starts + 1, lossless=lossless)
    assert verdict.word == word
    assert reason in verdict.reason


def test_best_arm_includes_plain_decoding_and_gives_it_ties() -> None:
    assert best_arm({"ar": 40.0, "k3": 50.0, "k1": 45.0}) == "k3"
    assert best_arm({"k3": 40.0, "ar": 40.0}) == "ar"
