"""How long prompts and answers were: quantiles and a small histogram. Means alone hide what a batch really held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eyas.eval.records import ArmFacts, Cells


def length_rows(cells: Cells, arms: Mapping[str, ArmFacts]) -> list[dict[str, Any]]:
    """Per dataset, temperature and arm: lengths in tokens of the distinct prompts, and of all answers of all starts."""
    rows = []
    for dataset, temperature in dict.fromkeys((key.dataset, key.temperature) for key in cells):
        for arm in arms:
            requests = [
                request
                for key, by_arm in cells.items()
                if (key.dataset, key.temperature) == (dataset, temperature)
                for start in by_arm.get(arm, [])
                for block in start
                for request in block.requests
            ]
            if requests:
                prompts = {request.prompt_id: request.n_in for request in requests}
                row = {"dataset": dataset, "temperature": temperature, "arm": arm}
                row |= {"prompt_tokens": lengths_of(list(prompts.values()))}
                rows.append(row | {"output_tokens": lengths_of([request.n_out for request in requests])})
    return rows


def lengths_of(values: Sequence[int]) -> dict[str, Any]:
    """How many, mean, least, p10, p50, p90, most, and the histogram."""
    p10, p50, p90 = np.percentile(values, [10, 50, 90])
    return {
        "n": len(values),
        "mean": float(np.mean(values)),
        "min": min(values),
        "p10": float(p10),
        "p50": float(p50),
        "p90": float(p90),
        "max": max(values),
        "histogram": histogram(values),
    }


def histogram(values: Sequence[int]) -> list[list[int]]:
    """[from, to, how many] over the ranges 0, 1, 2 to 3, 4 to 7, 8 to 15, ..., from the first that is met to the last."""
    counts = Counter(value.bit_length() for value in values)
    return [[(1 << bits) >> 1, (1 << bits) - 1, counts[bits]] for bits in range(min(counts), max(counts) + 1)]
