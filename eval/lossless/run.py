"""Running the ladder: L0's process, the engines, and what only the target or the head themselves can say afterwards.

Everything needing torch happens here and is stored as JSON; results.py judges without it. Each file is written once: a
session that is continued runs what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.arms import Arm
from eyas.eval.child import started_child
from eyas.eval.launch import Launcher
from eyas.eval.lossless.cases import ROUNDS
from eyas.eval.lossless.greedy import AnswerLogits, ask_target
from eyas.eval.lossless.ladder import TEMPERATURE, arms_to_check, compared_positions, plan_lossless
from eyas.eval.lossless.results import LADDER, LOGITS, OFFLINE, SAMPLER, STARTS
from eyas.eval.plan import StartPlan
from eyas.eval.records import RequestRecord, read_start
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
            "arms": checked,
            "dtype": dtype,
            "temperature": TEMPERATURE,
            "max_tokens": max_tokens,
            "samples": samples,
            "positions": compared_positions([arm for arm in arms if arm.name in checked]),
            "null_batch_size": starts[1].cells[0].batch_size,
        },
    )
    run_sampler(directory, launcher=launcher, rounds=rounds)
    stems = [directory / STARTS / f"{start.start:03d}-{start.arm}" for start in starts]
    _remove_other_starts(directory / STARTS, stems)
    for start, stem in zip(starts, stems, strict=True):
        launcher.run(start, stem)
    # A start that broke off keeps the cells it had finished, and they are compared too.
    served = {stem: start for stem, start in zip(stems, starts, strict=True) if stem.with_suffix(".jsonl").is_file()}
    if stems[0] in served:
        _ask_about_differences(directory, served, plain=stems[0])
    heads = [arm for arm in arms if arm.kind == "head"]
    if predict is not None and heads:
        longest = max(heads, key=lambda arm: arm.draft_length)
        _predict_acceptance(directory, served, arm=longest, predict=predict)


def run_sampler(directory: Path, *, launcher: Launcher, rounds: int) -> None:
    """L0 in a process of its own, in the engines' environment. A failure is stored in place of counts."""
    path = directory / SAMPLER
    if path.is_file() and read_json(path).get("rounds") == rounds:
        return
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "eyas.eval.lossless.sampler", str(rounds), str(path)]
    log = path.with_suffix(".log")
    with started_child(command, environment=launcher.environment, log_path=log, relay=launcher.relay) as child:
        reason = child.wait(timeout_s=launcher.timeout_s)
    if reason is None and not path.is_file():
        reason = "ended without writing its counts"
    if reason is not None:
        write_json(path, {"why": f"the sampler's process failed: {reason}; see {log}"})
        launcher.relay(f"L0 failed: {reason}; see {log}\n")


def _remove_other_starts(directory: Path, stems: Sequence[Path]) -> None:
    """Files of arms that are no longer checked would enter the results."""
    kept = {stem.name for stem in stems}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.split(".")[0] not in kept:
            path.unlink()
    directory.mkdir(parents=True, exist_ok=True)


def _ask_about_differences(directory: Path, served: dict[Path, StartPlan], *, plain: Path) -> None:
    """Let the target judge every answer of L1 and L2 that differs from plain decoding's."""
    records = {stem: read_start(stem.with_suffix(".jsonl")).cells for stem in served}
    identity = fingerprint(
        {
            stem.name: [request.token_ids for cell in cells for request in cell.requests]
            for stem, cells in records.items()
        }
    )
    if (directory / LOGITS).is_file() and read_json(directory / LOGITS)["answers"] == identity:
        return
    first = served[plain]
    logits = answer_logits(Path(first.target_dir), trust_remote_code=first.trust_remote_code)
    prompts = {request.prompt_id: request.token_ids for request in first.cells[0].requests}
    facts: dict[str, Any] = {"answers": identity, "L1": {}, "L2": {}}
    reference = {cell.dataset: cell.requests for cell in records[plain]}
    for stem, start in served.items():
        name = "null" if start.start == 1 else start.arm
        for cell in records[stem]:
            if stem != plain and cell.dataset in ("L1", "L2") and cell.dataset in reference:
                facts[cell.dataset][name] = ask_target(
                    reference[cell.dataset], cell.requests, prompts=prompts, logits=logits
                )
    write_json(directory / LOGITS, facts)


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


def _predict_acceptance(directory: Path, served: dict[Path, StartPlan], *, arm: Arm, predict: Predict) -> None:
    """Acceptance of the head along its own served greedy answers, offline."""
    found = [
        (start, cell.requests)
        for stem, start in served.items()
        for cell in (read_start(stem.with_suffix(".jsonl")).cells if start.arm == arm.name else [])
        if cell.dataset == "L1"
    ]
    if not found:
        return
    ((start, answers),) = found
    identity = fingerprint([request.token_ids for request in answers])
    path = directory / OFFLINE
    if path.is_file() and read_json(path)["answers"] == identity:
        return
    prompts = {request.prompt_id: request.token_ids for request in start.cells[0].requests}
    accepted = {request.prompt_id: _predicted(request, prompts[request.prompt_id], predict) for request in answers}
    write_json(
        path,
        {
            "arm": arm.name,
            "draft_length": arm.draft_length,
            "dtype": start.dtype,
            "answers": identity,
            "accepted": accepted,
        },
    )


def _predicted(request: RequestRecord, prompt: list[int], predict: Predict) -> list[int]:
    return predict([*prompt, *request.token_ids], len(prompt))
