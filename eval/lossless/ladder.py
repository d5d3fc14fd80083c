"""The losslessness ladder: what is served for it, and its results from what was stored.

L0  the rejection sampler alone against exact laws                      sampler.py, sampler_verdict.py
L1  greedy answers, token by token, all prompts in one batch            greedy.py
L2  the same at batch size 1, where plain decoding batches nothing      greedy.py
L3  sampled answers, position by position                               sampled.py
L4  lengths of sampled answers and reasons to end                       lengths.py

One engine process of each arm serves the cells L1 to L4, and a second process of plain decoding gives the null. An arm is
checked at its longest chain, which stands for the shorter ones: they run the same code at fewer positions. An arm that drafts
in small batches only (a schedule) is served in the largest batch in which it drafts. L3 and L4 sample as the session does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.eval.arms import PLAIN, Arm, arm_plan
from eyas.eval.lossless.sampled import sample_id
from eyas.eval.lossless.stored import NULL_START
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import is_synthetic
from eyas.eval.workload import Request

EXACT_REQUESTS = 8
"""Prompts of L2: one after the other, so that each costs as much as a whole batch."""

SAMPLED_PROMPTS = 2
"""Prompts of L3, the shortest: many answers to few prompts, because every prompt has a distribution of its own."""

LENGTH_SAMPLES = 4
"""Answers per prompt in L4."""

SEEDS_PER_START = 1_000_000
"""Distance of the seeds of two starts: equal seeds would make answers equal and hide nothing but differences."""


@dataclass(frozen=True)
class SampledAs:
    """How L3 and L4 are sampled. `top_k` 0 and `top_p` 1 cut nothing off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def sampled_as(plan: StartPlan) -> SampledAs:
    """As the session's cells of the highest temperature: more of the distribution is seen there than at lower ones."""
    hottest = max(plan.cells, key=lambda cell: cell.temperature, default=None)
    if hottest is None or hottest.temperature == 0:
        return SampledAs()
    return SampledAs(hottest.temperature, hottest.top_p, hottest.top_k)


def drafting_batch_size(arm: Arm, *, at_most: int) -> int:
    """Largest batch size up to `at_most` in which the arm drafts, or `at_most` where it drafts in none."""
    ranges = (arm.speculative_config or {}).get("num_speculative_tokens_per_batch_size") or []
    return max((size for size in range(1, at_most + 1) if _scheduled_length(ranges, size)), default=at_most)


def _scheduled_length(ranges: Sequence[Sequence[int]], batch_size: int) -> int:
    """k of a schedule's ranges at a batch size: a range's k is carried on to the next one, as vLLM reads it."""
    begun = [length for first, _, length in ranges if first <= batch_size]
    return begun[-1] if begun else 0


def arms_to_check(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Arm that is served -> arms that it stands for (itself among them).

    Arms whose acceptance is made up by the engine are left out: their answers are wrong on purpose.
    """
    families: dict[str, list[Arm]] = {}
    for arm in arms:
        if arm.speculative_config is not None and not is_synthetic(arm.speculative_config):
            shared = {name: value for name, value in arm.speculative_config.items() if name != "num_speculative_tokens"}
            families.setdefault(json.dumps(shared, sort_keys=True), []).append(arm)
    return {
        max(family, key=lambda arm: arm.draft_length).name: [arm.name for arm in family] for family in families.values()
    }


def plan_lossless(
    plan: StartPlan,
    *,
    arms: Sequence[Arm],
    prompts: Sequence[Request],
    requests: int,
    max_tokens: int,
    dtype: str,
    samples: int,
) -> list[StartPlan]:
    """The starts of the ladder: plain decoding, plain decoding again, and each arm of `arms_to_check`.

    Args:
        plan: engine settings of the session; its cells are replaced.
        arms: all arms of the session.
        prompts: measured prompts, of which the first `requests` are served.
        requests: prompts of L1 and L4. max_tokens: longest answer there.
        dtype: of the engines; float32, unless the target is too large for it.
        samples: sampled answers of L3 in each start; 0 = neither L3 nor L4, greedy levels only.
    """
    checked = [arm for arm in arms if arm.name in arms_to_check(arms)]
    positions = compared_positions(checked)
    starts = []
    for number, arm in enumerate([PLAIN, PLAIN, *checked]):
        is_null = number == NULL_START
        whole = drafting_batch_size(arm, at_most=len(prompts[:requests]))
        cells = _cells(
            prompts[:requests],
            # Other batches make other sums: what plain decoding makes of them is the null.
            greedy_batch=max(1, whole // 2) if is_null else whole,
            sampled_batch=whole,
            max_tokens=max_tokens,
            samples=samples,
            positions=positions,
            seed=plan.seed + number * SEEDS_PER_START,
            sampled=sampled_as(plan),
        )
        kept = [cell for cell in cells if not (is_null and cell.dataset == "L2") and (samples or cell.temperature == 0)]
        settings = replace(plan, dtype=dtype, cells=kept, blocks=1, protocol="starts", instrument=False)
        starts.append(arm_plan(settings, arm, start=number, round=0))
    return starts


def compared_positions(arms: Sequence[Arm]) -> int:
    """Output positions of L3: one from the prompt, k drafted, one bonus."""
    return 2 + max((arm.draft_length for arm in arms), default=0)


def _cells(
    prompts: Sequence[Request],
    *,
    greedy_batch: int,
    sampled_batch: int,
    max_tokens: int,
    samples: int,
    positions: int,
    seed: int,
    sampled: SampledAs,
) -> list[CellPlan]:
    greedy = [Request("L1", prompt.prompt_id, prompt.token_ids) for prompt in prompts]
    cells = [
        CellPlan("L1", greedy_batch, 0.0, max_tokens, seed, greedy),
        CellPlan("L2", 1, 0.0, max_tokens, seed, greedy[:EXACT_REQUESTS]),
    ]
    if not samples:
        return cells
    shortest = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:SAMPLED_PROMPTS]
    tokens = _repeated("L3", shortest, -(-samples // len(shortest)))
    whole = _repeated("L4", prompts, LENGTH_SAMPLES)
    short = CellPlan("L3", sampled_batch, sampled.temperature, positions, seed, tokens, sampled.top_p, sampled.top_k)
    later = seed + SEEDS_PER_START // 2
    return [*cells, short, replace(short, dataset="L4", max_tokens=max_tokens, seed=later, requests=whole)]


def _repeated(dataset: str, prompts: Sequence[Request], times: int) -> list[Request]:
    """Every prompt `times` times, interleaved, each under an id of its own."""
    return [
        Request(dataset, sample_id(prompt.prompt_id, number), prompt.token_ids)
        for number in range(times)
        for prompt in prompts
    ]


def lossless_outcome(lossless: dict[str, Any] | None, *, arm: str, temperature: float) -> bool | None:
    """Whether the ladder allows a cell of `arm` at `temperature` to be called lossless; None = not (wholly) run.

    Greedy cells need L0's greedy rows, L1 and L2; sampled cells all of L0 to L4.
    """
    if lossless is None or lossless["status"] == "not run":
        return None
    kind = "greedy_passed" if temperature == 0 else "sampled_passed"
    return next((row[kind] for row in lossless["arms"] if arm in row["stands_for"]), None)
