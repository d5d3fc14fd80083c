"""The table of coverage in docs/evaluation.md: made-up sessions over the range of designs that the intervals promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from eyas.eval.simulation import Design, Simulated, simulate

STARTS = (3, 5, 8)
ARMS = (2, 5, 9)
NOISES = ((0.0, 0.02), (0.03, 0.05), (0.1, 0.12))
PROMPTS = (12, 16, 64)
PROMPT_SD = 0.1
TYPICAL = Design(arms=5, starts=3, prompts=16, start_sd=0.03, block_sd=0.05, prompt_sd=PROMPT_SD)
PROMPTS_ALONE = replace(TYPICAL, start_sd=0.0, block_sd=0.02)
VARIANTS: tuple[tuple[str, Design], ...] = (
    ("as assumed", TYPICAL),
    ("4 blocks per start", replace(TYPICAL, blocks=4)),
    ("prompts differ more between arms (20 %)", replace(TYPICAL, prompt_sd=0.2)),
    ("answers scatter more (20 %)", replace(TYPICAL, answer_sd=0.2)),
    ("AR's starts scatter twice as much (12 % and 6 %)", replace(TYPICAL, start_sd=0.06, start_sd_ratio=2.0)),
    ("AR's starts scatter half as much (3 % and 6 %)", replace(TYPICAL, start_sd=0.06, start_sd_ratio=0.5)),
    ("one start in eight is far off", replace(TYPICAL, start_sd=0.06, tails="rare")),
    ("two arms only, one start in eight far off", replace(TYPICAL, arms=2, start_sd=0.06, tails="rare")),
    ("24 cells a session, Holm", replace(TYPICAL, cells=24)),
    ("24 cells, 6 arms, 12 prompts, noise of prompts alone", replace(PROMPTS_ALONE, arms=6, cells=24, prompts=12)),
    ("24 cells, 6 arms, 16 prompts, noise of prompts alone", replace(PROMPTS_ALONE, arms=6, cells=24, prompts=16)),
    ("9 arms, 12 prompts, noise of prompts alone", replace(PROMPTS_ALONE, arms=9, prompts=12)),
    ("9 arms, 6 prompts, noise of prompts alone", replace(PROMPTS_ALONE, arms=9, prompts=6)),
    ("side by side, pairs scatter by 3 %", replace(TYPICAL, arms=6, block_sd=0.0, paired=True)),
    ("slower by 20 %", replace(TYPICAL, log_ratio=-0.2231)),
)


def designs() -> Iterator[Design]:
    """The grid: starts 3 to 8, arms 2 to 9, quiet to loud machines, 12 to 64 prompts."""
    for starts, arms, (start_sd, block_sd), prompts in itertools.product(STARTS, ARMS, NOISES, PROMPTS):
        yield Design(
            arms=arms, starts=starts, prompts=prompts, start_sd=start_sd, block_sd=block_sd, prompt_sd=PROMPT_SD
        )


def grid_table(*, tests: int, say: Callable[[str], None]) -> list[Simulated]:
    """Simulate the grid with `tests` tests a design and say it as a Markdown table: a row per starts, arms and noise."""
    say("| starts | arms | start sd | block sd | " + " | ".join(f"{prompts} prompts" for prompts in PROMPTS) + " |")
    say("| ---: " * (4 + len(PROMPTS)) + "|")
    found: list[Simulated] = []
    for row in _rows():
        results = [_simulate(design, tests=tests) for design in row]
        found += results
        first = row[0]
        cells = [f"{first.starts}", f"{first.arms}", f"{first.start_sd:.0%}", f"{first.block_sd:.0%}"]
        say("| " + " | ".join(cells + [f"{100 * result.coverage:.1f}" for result in results]) + " |")
    return found


def variants_table(*, tests: int, say: Callable[[str], None]) -> list[Simulated]:
    """What the assumptions are worth: coverage and calls where they do not hold."""
    say("| sessions | coverage % | called % | sessions with a call % |")
    say("| --- | ---: | ---: | ---: |")
    found = []
    for name, design in VARIANTS:
        result = _simulate(design, tests=tests)
        numbers = (result.coverage, result.faster + result.slower, result.alarms)
        say(f"| {name} | " + " | ".join(f"{100 * number:.1f}" for number in numbers) + " |")
        found.append(result)
    return found


def _simulate(design: Design, *, tests: int) -> Simulated:
    sessions = -(-tests // design.tests)
    if design.cells > 1:  # what is asked there is the share of sessions
        sessions = max(sessions, tests // 10)
    return simulate(design, sessions=sessions, seed=design.starts)


def _rows() -> Iterator[Sequence[Design]]:
    every = list(designs())
    for start in range(0, len(every), len(PROMPTS)):
        yield every[start : start + len(PROMPTS)]
