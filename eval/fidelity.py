"""Does the head change what comes out, and is it accepted as often as training predicted?

Both questions are answered by one pair of starts, AR and the longest chain, greedy, in float32, on the same prompts at
one batch. Speculative decoding is lossless in exact arithmetic; in floating point a verification of k + 1 positions
sums in another order than a decode of one, so where the two best tokens are all but equal either may win. Such a
*tie* is told from a *violation* by the target itself: a float32 forward (Hugging Face) of the common prefix
must put exactly the two differing tokens on top, at most `TIE_GAP` apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.acceptance import marginal_rates, tau_step_weighted
from eyas.eval.records import RequestRecord

TIE_GAP = 1e-3
"""Largest gap of two float32 logits that counts as a tie.

Logits of language models are of magnitude 10 to 40; float32 resolves 2e-6 there, and the different summation orders of
two engines add up over tens of layers: SmolLM2-135M (30 layers, logits up to 38) gave 6e-5 between a forward of the whole
sequence and one token by token. A gap above 1e-3 is therefore a decision of the model, not rounding."""

PARITY_TOLERANCE = 0.03
"""Largest relative difference between predicted and served tau that counts as parity."""

Predict = Callable[[list[int], int], list[int]]
"""(token ids of prompt and answer, number of prompt tokens) -> accepted drafts per step along that greedy path."""

Logits = Callable[[list[int]], NDArray[np.float32]]
"""Token ids -> logits [V] of the token that follows them."""


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first differing token, or where the shorter one ends; None when equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def classify_difference(
    prompt: list[int], plain: list[int], drafted: list[int], *, index: int, logits: Logits
) -> dict[str, Any]:
    """Is the difference at `index` a tie of the target's two best tokens, or a violation?"""
    if index >= min(len(plain), len(drafted)):
        return {"index": index, "outcome": "violation", "why": "one answer ends earlier", "gap": None}
    row = logits([*prompt, *plain[:index]])
    best = set(np.argsort(row)[-2:].tolist())
    gap = float(abs(row[plain[index]] - row[drafted[index]]))
    tie = best == {plain[index], drafted[index]} and gap <= TIE_GAP
    outcome, why = ("tie", "the two best tokens") if tie else ("violation", "a decision of the target")
    return {"index": index, "outcome": outcome, "why": why, "gap": gap, "ar": plain[index], "head": drafted[index]}


def check_lossless(
    plain: Sequence[RequestRecord], drafted: Sequence[RequestRecord], *, prompts: dict[str, list[int]], logits: Logits
) -> dict[str, Any]:
    """Compare the two arms' answers token by token. `prompts`: prompt id -> its token ids."""
    answers = {request.prompt_id: request.token_ids for request in drafted}
    differences = []
    for request in plain:
        other = answers[request.prompt_id]
        index = first_difference(request.token_ids, other)
        if index is not None:
            prompt = prompts[request.prompt_id]
            finding = classify_difference(prompt, request.token_ids, other, index=index, logits=logits)
            differences.append({"prompt_id": request.prompt_id, **finding})
    violations = sum(difference["outcome"] == "violation" for difference in differences)
    return {
        "requests": len(plain),
        "tokens": sum(request.n_out for request in plain),
        "identical": len(plain) - len(differences),
        "ties": len(differences) - violations,
        "violations": violations,
        "tie_gap": TIE_GAP,
        "differences": differences,
        "passed": violations == 0,
    }


def accepted_within_answer(request: RequestRecord) -> list[int]:
    """Accepted tokens of each draft step as far as they are in the answer.

    The engine counts what it verified, which at the end may lie behind a stop token or the length limit: tokens that
    nobody received, and that no offline walk over the answer knows of.
    """
    counts: list[int] = []
    given = 1  # the first token comes from reading the prompt
    for accepted in request.per_step_accepted or []:
        counts.append(max(0, min(accepted, request.n_out - given)))
        given += accepted + 1
    return counts


def check_parity(
    drafted: Sequence[RequestRecord], *, prompts: dict[str, list[int]], draft_length: int, predict: Predict
) -> dict[str, Any]:
    """Compare the acceptance that `predict` computes offline with what the engine served on the same answers."""
    served = [accepted_within_answer(request) for request in drafted]
    offline = [
        predict([*prompts[request.prompt_id], *request.token_ids], len(prompts[request.prompt_id]))
        for request in drafted
    ]
    tau_served, tau_offline = tau_step_weighted(served), tau_step_weighted(offline)
    difference = None if tau_served is None or tau_offline is None else tau_offline / tau_served - 1
    return {
        "requests": len(drafted),
        "draft_length": draft_length,
        "served": _acceptance(served, draft_length=draft_length),
        "offline": _acceptance(offline, draft_length=draft_length),
        "relative_difference": difference,
        "tolerance": PARITY_TOLERANCE,
        "passed": difference is not None and abs(difference) <= PARITY_TOLERANCE,
    }


def _acceptance(accepted: list[list[int]], *, draft_length: int) -> dict[str, Any]:
    return {
        "drafts": sum(len(request) for request in accepted),
        "tau_step_weighted": tau_step_weighted(accepted),
        "marginal": marginal_rates(accepted, draft_length=draft_length),
    }


def target_logits(target_dir: Path, *, trust_remote_code: bool) -> Logits:
    """Next-token logits of the target by Hugging Face in float32. The model is loaded at the first call."""
    loaded: list[Any] = []

    def logits(token_ids: list[int]) -> NDArray[np.float32]:
        import torch

        from eyas.heads.target import load_target_model

        if not loaded:
            loaded.append(load_target_model(target_dir, dtype=torch.float32, trust_remote_code=trust_remote_code))
        with torch.no_grad():
            return loaded[0](torch.tensor([token_ids])).logits[0, -1].numpy()

    return logits
