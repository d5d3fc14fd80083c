"""Laws of a step's time with known constants, and a session that follows the linear one."""

from __future__ import annotations

from eyas.eval.cost.rows import cost_results
from tests.cost_cells import facts, session

LENGTHS = {"k3": 3, "k1": 1}
ACCEPTS = {"k3": [3, 0, 1, 2, 0], "k1": [1, 0, 1, 0, 0]}
TAUS = {"k3": 1 + 6 / 5, "k1": 1 + 2 / 5}
SIZES = (1, 2, 4, 8, 16, 32)
STEP, TOKEN, SEQUENCE = 0.030, 0.0012, 0.0004
DRAFTS = {"ar": 0.0, "k3": 0.006, "k1": 0.0025}


def linear_law(arm: str, running: int) -> float:
    tokens = (LENGTHS.get(arm, 0) + 1) * running
    return STEP + DRAFTS[arm] + TOKEN * tokens + SEQUENCE * running


def roofline_law(arm: str, running: int) -> float:
    tokens = (LENGTHS.get(arm, 0) + 1) * running
    return STEP + DRAFTS[arm] + TOKEN * max(0, tokens - 8) + SEQUENCE * running


def linear_session() -> dict:
    cells = session(linear_law, lengths=LENGTHS, accepts=ACCEPTS, batch_sizes=SIZES)
    return cost_results(cells, facts(LENGTHS), [], seed=0)
