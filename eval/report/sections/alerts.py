"""What stands against believing the numbers, on the first screen: each in a yellow box."""

from __future__ import annotations

from typing import Any

from eyas.eval.records import AR
from eyas.eval.report.batches import NOMINAL_SHARE, full_batch
from eyas.eval.report.names import (
    arm_label,
    batch_sizes,
    dataset_name,
    group_name,
    groups,
    of_group,
    of_phase,
)
from eyas.eval.report.values import listing, percent
from eyas.eval.verdict import MIN_STARTS


def alerts(results: dict[str, Any]) -> list[str]:
    """What a reader must know before believing any number."""
    return [
        *_of_arms(results),
        *_of_mends(results),
        *_of_starts(results),
        *_of_calibration(results),
        *_of_prompts(results),
        *_of_batches(results),
        *_of_losslessness(results),
    ]


def _of_arms(results: dict[str, Any]) -> list[str]:
    found = [
        f"Arm {arm_label(results, arm)} has synthetic acceptance: the engine made it up, so its speed is no result."
        for arm, facts in results["arms"].items()
        if facts["synthetic"]
    ]
    for arm, reason in void_arms(results).items():
        found.append(f"Arm {arm_label(results, arm)} is not comparable with plain decoding: {reason}.")
    if AR not in results["arms"]:
        found.append("Plain decoding (AR) did not finish in this session, so nothing can be compared.")
    return found


def void_arms(results: dict[str, Any]) -> dict[str, str]:
    """Arm -> why its configuration voids the comparison."""
    differences = results["config_differences"]
    return dict(differences["reasons"]) if differences["void"] else {}


def _of_mends(results: dict[str, Any]) -> list[str]:
    """An engine that was mended in its process is not the one that a reader installs."""
    if not results["mends"]:
        return []
    return [
        f"The engine was mended in its process before it was measured: {'; '.join(results['mends'])}. The same engine as "
        "installed gives other outputs, so what is said about losslessness, and every SUPPORTED that rests on it, holds for "
        "the mended engine only. See sections A and H."
    ]


def _of_starts(results: dict[str, Any]) -> list[str]:
    """Starts are counted in the phase in which they are compared, and the smaller count is what a reader must know."""
    found = []
    counts = fewest_starts(results)
    few = {arm: n for arm, n in counts.items() if n < MIN_STARTS}
    if few:
        shown = ", ".join(f"{arm_label(results, arm)} {n}" for arm, n in few.items())
        found.append(
            f"Fewer than {MIN_STARTS} fresh starts of an engine ({shown}): intervals are indicative, and no cell of these "
            "arms can be SUPPORTED."
        )
    failures = results["failures"]
    if failures:
        names = ", ".join(dict.fromkeys(arm_label(results, each["arm"]) for each in failures))
        kept = sum(each.get("kept_blocks", 0) for each in failures)
        what = (
            f"the {kept} blocks that they had finished are in the figures"
            if kept
            else "nothing of them is in any figure"
        )
        found.append(f"{len(failures)} starts failed ({names}); {what}; see section J.")
    return found


def fewest_starts(results: dict[str, Any]) -> dict[str, int]:
    """Arm -> its starts in the phase that has fewer of them."""
    later = results["schedule_starts"]
    return {arm: min(n, later.get(arm, n)) for arm, n in results["starts"].items()}


def _of_calibration(results: dict[str, Any]) -> list[str]:
    """A session whose own plain starts would be called different too often has no statistics to believe."""
    calibration = results.get("calibration")
    if calibration is None or calibration["passed"] is not False:
        return []
    return [
        f"The statistics failed their calibration in this session: {'; '.join(calibration['failed'])}. See section C."
    ]


def _of_prompts(results: dict[str, Any]) -> list[str]:
    cells = {(cell["dataset"], cell["temperature"], cell["batch_size"]): cell for cell in results["cells"]}
    found = []
    short = [cell for cell in cells.values() if cell["prompts"] < cell["needed_prompts"]]
    if short:
        worst = min(short, key=lambda cell: cell["prompts"] / cell["needed_prompts"])
        found.append(
            f"{len(short)} of {len(cells)} cells have fewer independent prompts than they need and are INCONCLUSIVE in every "
            f"arm; fewest: {dataset_name(worst['dataset'])} at batch size {worst['batch_size']}, {worst['prompts']} of "
            f"{worst['needed_prompts']}. See section B."
        )
    uneven = [group for group in groups(results["cells"]) if len(_prompt_counts(results, group)) > 1]
    if uneven:
        counts = sorted({count for group in uneven for count in _prompt_counts(results, group)})
        found.append(
            f"Batch sizes answer different numbers of prompts ({counts[0]} to {counts[-1]}): a part of what changes with the "
            "batch size may be the prompts. Section E has tau on the prompts that all sizes share."
        )
    return found


def _prompt_counts(results: dict[str, Any], group: tuple[str, float]) -> set[int]:
    return {cell["prompts"] for cell in of_group(results["cells"], group)}


def _of_batches(results: dict[str, Any]) -> list[str]:
    """Where a batch size was asked for and a smaller one ran."""
    rows = of_phase(results["running"], "grid")
    shares = {
        (group, size): share
        for group in groups(rows)
        for size in batch_sizes(of_group(rows, group))
        if (share := full_batch(results, group, size)) is not None
    }
    thin = [place for place, share in shares.items() if share.least < NOMINAL_SHARE]
    if not thin:
        return []
    group, size = min(thin, key=lambda place: shares[place].least)
    return [
        f"In {len(thin)} of {len(shares)} cells the full batch ran for less than {percent(NOMINAL_SHARE, 0)} of the time in some arm "
        f"(least: {percent(shares[group, size].least, 0)}, {group_name(*group)}, batch size {size}): a ratio there is partly "
        "one of smaller batches. The table says how full each was; more prompts (score.requests_per_batch_slot) keep a batch "
        "full for longer."
    ]


def _of_losslessness(results: dict[str, Any]) -> list[str]:
    """Greedy cells need the greedy levels of the ladder, sampled cells all of them."""
    lossless = results.get("lossless")
    if lossless is None or lossless["status"] == "not run":
        return ["Losslessness was not checked, so no cell can be SUPPORTED; see section H."]
    sampled = any(temperature > 0 for temperature in results["protocol"]["temperatures"])
    outcomes = {row["arm"]: row["sampled_passed" if sampled else "greedy_passed"] for row in lossless["arms"]}
    failed = listing([arm_label(results, arm) for arm, passed in outcomes.items() if passed is False])
    unsure = listing([arm_label(results, arm) for arm, passed in outcomes.items() if passed is None])
    found = []
    if failed:
        found.append(f"The losslessness check FAILED for {failed}: the engine gives other outputs; see section H.")
    if unsure:
        found.append(f"Losslessness is undecided for {unsure}; see section H.")
    return found
