"""What forbids a claim about a cell in its own run, whatever another run says: the same things that forbid it a verdict."""

from __future__ import annotations

from typing import Any

from eyas.eval.lossless.ladder import lossless_outcome
from eyas.eval.records import AR
from eyas.eval.verdict import MAX_LOOP_SHARE, MAX_RECONCILIATION, MIN_STARTS


def unfit(results: dict[str, Any], cell: dict[str, Any]) -> list[str]:
    """Why nothing may be claimed about the speed of `cell`; empty where it may."""
    arm = results["arms"][cell["arm"]]
    void = results["config_differences"]["reasons"]
    lossless = lossless_outcome(results["lossless"], arm=cell["arm"], temperature=cell["temperature"])
    reasons = {
        "acceptance is synthetic": arm["synthetic"],
        "its comparison with plain decoding is void": bool(void.keys() & {cell["arm"], AR}),
        f"fewer than {MIN_STARTS} starts": cell["starts"] < MIN_STARTS,
        "indicative only": cell["indicative"] and cell["starts"] >= MIN_STARTS,
        "too few prompts": cell["prompts"] < cell["needed_prompts"],
        "the lossless check failed": lossless is False,
        "looping answers": cell["loop_share"] > MAX_LOOP_SHARE,
        "counts that disagree": cell["reconciliation"] > MAX_RECONCILIATION,
    }
    return [words for words, holds in reasons.items() if holds]
