"""Running the ladder: L0's process, the engines, and what only the target or the head themselves can say afterwards.

Everything needing torch happens here and is stored as JSON; results.py judges without it. Each file is written once: a
session that is continued runs what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.arms import Arm
from eyas.eval.child import started_child
from eyas.eval.launch import Launcher
from eyas.eval.lossless.cases import ROUNDS
from eyas.eval.lossless.greedy import AnswerLogits, ask_target
from eyas.eval.lossless.ladder import arms_to_check, compared_positions, plan_lossless, sampled_as
from eyas.eval.lossless.stored import (
    LADDER,
    LOGITS,
    OFFLINE,
    PLAIN_START,
    SAMPLER,
    STARTS,
    Served,
    answers_fingerprint,
    is_quantised,
    read_ladder_starts,
    served_cells,
)
from eyas.eval.plan import StartPlan
from eyas.eval.records import RequestRecord
from eyas.eval.workload import Request
from eyas.heads.files import fingerprint, read_json, write_json

Predict = Callable[[list[int], int], list[int]]
"""(token ids of prompt and answer, number of prompt tokens) -> accepted drafts per step along that greedy path."""


def run_lossless(
    directory: Path,
    *,
    plan: StartPlan,
    arms: Sequence[Arm],
    prompts: Sequence[Request],
    requests: int,
    max_tokens: int,
    dtype: str,
    samples: int,
    launcher: Launcher,
    predict: Predict | None,
    rounds: int = ROUNDS,
) -> None:
    """Run the ladder into `directory`; `lossless_results` reads it.

    A failed process costs its own rows and is recorded, not raised.

    Args:
        plan, arms, prompts, requests, max_tokens, dtype, samples: as for `plan_lossless`.
        predict: offline acceptance of the longest head arm, or None without a head.
        rounds: verification steps per case of L0.
    """
    starts = plan_lossless(
        plan, arms=arms, prompts=prompts, requests=requests, max_tokens=max_tokens, dtype=dtype, samples=samples
    )
    checked = arms_to_check(arms)
    write_json(
        directory / LADDER,
        {
            "session": plan.session,
            "arms": checked,
            "dtype": dtype,
            **asdict(sampled_as(plan)),
            "max_tokens": max_tokens,
            "samples": samples,
            "positions": compared_positions([arm for arm in arms if arm.name in checked]),
        },
    )
    run_sampler(directory, session=plan.session, launcher=launcher, rounds=rounds)
    stems = [directory / STARTS / f"{start.start:03d}-{start.arm}" for start in starts]
    _remove_other_starts(directory / STARTS, stems)
    for start, stem in zip(starts, stems, strict=True):
        launcher.run(start, stem)
    # A start that broke off keeps the cells it had finished, and they are compared too.
    records = read_ladder_starts(directory, session=plan.session)
    served = served_cells(records)
    if "ar" in served and not is_quantised(records):
        _ask_about_differences(directory, served, first=starts[PLAIN_START])
    heads = [arm for arm in arms if arm.kind == "head"]
    if predict is not None and heads:
        longest = max(heads, key=lambda arm: arm.draft_length)
        _predict_acceptance(directory, served, first=starts[PLAIN_START], arm=longest, predict=predict)


def run_sampler(directory: Path, *, session: str, launcher: Launcher, rounds: int) -> None:
    """L0 in a process of its own, in the engines' environment. A failure is stored in place of counts."""
    path = directory / SAMPLER
    if path.is_file() and {"session": session, "rounds": rounds}.items() <= read_json(path).items():
        return
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "eyas.eval.lossless.sampler", str(rounds), str(path), session]
    log = path.with_suffix(".log")
    with started_child(command, environment=launcher.environment, log_path=log, relay=launcher.relay) as child:
        reason = child.wait(timeout_s=launcher.timeout_s)
    if reason is None and not path.is_file():
        reason = "ended without writing its counts"
    if reason is not None:
        write_json(path, {"session": session, "why": f"the sampler's process failed: {reason}; see {log}"})
        launcher.relay(f"L0 failed: {reason}; see {log}\n")


def _remove_other_starts(directory: Path, stems: Sequence[Path]) -> None:
    """Files of arms that are no longer checked would enter the results."""
    kept = {stem.name for stem in stems}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.split(".")[0] not in kept:
            path.unlink()
    directory.mkdir(parents=True, exist_ok=True)


def _ask_about_differences(directory: Path, served: Served, *, first: StartPlan) -> None:
    """Let the target judge every answer of L1 and L2 that differs from plain decoding's. `first`: plain decoding's plan."""
    identity = {"session": first.session, "answers": answers_fingerprint(served)}
    path = directory / LOGITS
    if path.is_file() and identity.items() <= read_json(path).items():
        return
    logits = answer_logits(Path(first.target_dir), trust_remote_code=first.trust_remote_code)
    prompts = prompt_tokens(first)
    facts: dict[str, Any] = {"L1": {}, "L2": {}}
    for run, cells in served.items():
        for level in facts:
            if run != "ar" and level in cells and level in served["ar"]:
                facts[level][run] = ask_target(
                    served["ar"][level].requests, cells[level].requests, prompts=prompts, logits=logits
                )
    write_json(path, identity | facts)


def prompt_tokens(start: StartPlan) -> dict[str, list[int]]:
    """Prompt id -> its tokens, of a start's first level."""
    return {request.prompt_id: request.token_ids for request in start.cells[0].requests}


def answer_logits(target_dir: Path, *, trust_remote_code: bool) -> AnswerLogits:
    """Logits of the target by Hugging Face in float32. The model is loaded at the first call."""
    loaded: list[Any] = []

    def logits(token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.float32]:
        import torch

        from eyas.heads.target import load_target_model

        if not loaded:
            loaded.append(load_target_model(target_dir, dtype=torch.float32, trust_remote_code=trust_remote_code))
        with torch.no_grad():
            rows = loaded[0](torch.tensor([token_ids])).logits[0, num_prompt_tokens - 1 : -1]
        return rows.numpy()

    return logits


def _predict_acceptance(directory: Path, served: Served, *, first: StartPlan, arm: Arm, predict: Predict) -> None:
    """Acceptance of the head along its own served greedy answers, offline. `first`: plan of a start of the ladder."""
    if "L1" not in served.get(arm.name, {}):
        return
    answers = served[arm.name]["L1"].requests
    identity = {
        "session": first.session,
        "arm": arm.name,
        "draft_length": arm.draft_length,
        "answers": fingerprint([request.token_ids for request in answers]),
    }
    path = directory / OFFLINE
    if path.is_file() and identity.items() <= read_json(path).items():
        return
    prompts = prompt_tokens(first)
    accepted = {request.prompt_id: _predicted(request, prompts[request.prompt_id], predict) for request in answers}
    write_json(path, {**identity, "dtype": first.dtype, "accepted": accepted})


def _predicted(request: RequestRecord, prompt: list[int], predict: Predict) -> list[int]:
    return predict([*prompt, *request.token_ids], len(prompt))
