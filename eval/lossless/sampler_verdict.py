"""L0, the judging half: counts of `sampler.json` against exact float64 laws. Pure: neither torch nor vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np

from eyas.eval.lossless.cases import Counts
from eyas.eval.lossless.chi_square import POWER, Floats, detectable_tv, goodness_of_fit, noise_floor, total_variation
from eyas.eval.lossless.laws import Model, emitted_laws, pair_law
from eyas.eval.lossless.words import DETECTED, NOT_DETECTED

LEVEL = 1e-6
"""Family-wise: Bonferroni over all tests of right samplers. Fixed seeds apart, one run in a million would cry wolf."""


def judge_sampler(raw: dict[str, Any]) -> dict[str, Any]:
    """L0 from the content of `sampler.json`.

    What is judged is the sampler as it served, with its mends; `as_installed` tells what it did before them. Passed: no test of a right sampler rejects, greedy rows are exact, and every wrong sampler is found out by the same tests.
    """
    model = Model(*(np.array(raw["model"][name]) for name in ("target", "draft")))
    counted = [Counts.from_json(case) for case in raw["cases"]]
    tests = sum(len(each.positions) + 1 for each in counted if each.case.rule == "right" and each.positions)
    threshold = LEVEL / max(1, tests)
    rows = [_case_row(model, each, threshold=threshold) for each in counted]
    controls = [row for row in rows if row["must_fail"]]
    greedy = [each for each in counted if each.case.greedy == "all"]
    greedy_passed = bool(greedy) and all(each.error is None and each.greedy_wrong == 0 for each in greedy)
    sampled = [row for row in rows if not row["must_fail"] and row["greedy"] != "all"]
    sampled_passed = bool(sampled) and all(row["as_expected"] for row in sampled)
    controls_found = sum(row["as_expected"] for row in controls)
    return {
        "status": "done",
        "rounds": raw["rounds"],
        "exercised": raw["exercised"],
        "mends": raw["mends"],
        "as_installed": _as_installed(model, raw["as_installed"], threshold=threshold),
        "level": LEVEL,
        "power": POWER,
        "tests": tests,
        "threshold": threshold,
        "cases": rows,
        "controls": len(controls),
        "controls_found": controls_found,
        "greedy_passed": greedy_passed and controls_found == len(controls),
        "sampled_passed": sampled_passed and controls_found == len(controls),
        "passed": greedy_passed and sampled_passed and controls_found == len(controls),
    }


def _as_installed(model: Model, raw: list[dict[str, Any]], *, threshold: float) -> dict[str, Any]:
    rows = [_case_row(model, Counts.from_json(case), threshold=threshold) for case in raw]
    return {"passed": all(row["as_expected"] for row in rows), "cases": rows}


def _case_row(model: Model, counted: Counts, *, threshold: float) -> dict[str, Any]:
    case = counted.case
    tests = _tests(model, counted, threshold=threshold) if counted.positions else []
    found = any(test["p_value"] < threshold for test in tests) or counted.greedy_wrong > 0
    must_fail = case.rule != "right"
    outcome = "error" if counted.error else DETECTED if found else NOT_DETECTED
    return {
        "name": case.name,
        "sampler": case.sampler,
        "rule": case.rule,
        "drafts": case.drafts,
        "temperature": case.temperature,
        "greedy": case.greedy,
        "must_fail": must_fail,
        "rounds": counted.rounds,
        "greedy_rows": counted.greedy_rows,
        "greedy_wrong": counted.greedy_wrong,
        "tests": tests,
        "smallest_p": min((test["p_value"] for test in tests), default=None),
        "largest_tv": max((test["tv"] for test in tests), default=None),
        "outcome": outcome,
        "error": counted.error,
        "as_expected": counted.error is None and found == must_fail,
    }


def _tests(model: Model, counted: Counts, *, threshold: float) -> list[dict[str, Any]]:
    laws = emitted_laws(model, counted.case.drafts, lengths=counted.case.lengths)
    tests = [
        _test(f"position {number}", counts, law, threshold=threshold)
        for number, (counts, law) in enumerate(zip(counted.positions, laws, strict=True), start=1)
    ]
    return [*tests, _test("first two tokens", counted.pairs, pair_law(model), threshold=threshold)]


def _test(where: str, counts: list[int], law: Floats, *, threshold: float) -> dict[str, Any]:
    result, samples = goodness_of_fit(counts, law.tolist()), sum(counts)
    return {
        "where": where,
        "samples": samples,
        # JSON has no infinity: a token that the target never gives has been emitted.
        "statistic": result.statistic if np.isfinite(result.statistic) else None,
        "degrees": result.degrees,
        "p_value": result.p_value,
        "tv": total_variation(counts, law.tolist()),
        "noise_floor": noise_floor(law.tolist(), samples),
        "detectable_tv": detectable_tv(samples, result.degrees, level=threshold),
    }
