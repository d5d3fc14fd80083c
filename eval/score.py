"""The score stage: measure a head against plain decoding in real vLLM, check it, judge it, write the report.

What it leaves: context.json (what is measured) and protocol.json (how), starts/ and fidelity/ (raw records, plans, logs),
fidelity.json, and the report: results.json, report.md, report.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.eval.fidelity import Predict, check_lossless, check_parity, target_logits
from eyas.eval.grid import Arm, order_of_starts, run_grid
from eyas.eval.launch import Launcher
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import AR, read_start
from eyas.eval.report.build import build_report
from eyas.eval.workload import Request, Workload, load_heldout, load_humaneval
from eyas.heads.chat import TargetChat
from eyas.heads.files import write_json
from eyas.heads.serving import engine_environment, require_vllm, speculative_config

HUMANEVAL_BATCH_SIZE = 8
"""HumanEval is one cell per start, at this batch size: a look at text unlike the training data, not a second sweep."""


def score(
    out_dir: Path,
    *,
    target_dir: Path,
    trust_remote_code: bool,
    template_options: Mapping[str, Any],
    head_dir: Path,
    method: str,
    draft_lengths: list[int],
    batch_sizes: list[int],
    starts_per_arm: int,
    requests_per_batch_slot: int,
    min_requests: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    heldout_path: Path,
    humaneval_requests: int,
    dtype: str,
    max_model_len: int,
    enforce_eager: bool,
    threads: int,
    kv_cache_gib: int,
    timeout_s: float,
    fidelity_requests: int,
    fidelity_max_tokens: int,
    fidelity_dtype: str,
    predict: Predict,
    context: dict[str, Any],
) -> dict[str, int]:
    """Measure the head in `head_dir` against plain decoding of `target_dir`; returns counts.

    Complete starts in `out_dir` are kept. `predict` computes acceptance offline; `context` is stored as it is.

    Raises:
        ValueError: vLLM or a data package is missing, the prompts do not suffice, or all starts of one side failed.
    """
    require_vllm()
    chat = TargetChat(target_dir, trust_remote_code=trust_remote_code, template_options=template_options)
    wanted = {size: max(min_requests, requests_per_batch_slot * size) for size in batch_sizes}
    prompts = load_prompts(
        chat,
        heldout_path=heldout_path,
        heldout_requests=max(*wanted.values(), fidelity_requests),
        humaneval_requests=humaneval_requests,
        max_prompt_tokens=max_model_len - max(max_tokens, fidelity_max_tokens) - max(draft_lengths) - 1,
    )
    plan = StartPlan(
        target_dir=str(target_dir),
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=seed,
        enforce_eager=enforce_eager,
        stop_token_ids=chat.stop_token_ids,
        warmup=prompts.warmup,
        cells=prompts.cells(wanted, temperature=temperature, max_tokens=max_tokens, seed=seed),
    )
    arms = plan_arms(head_dir, method=method, draft_lengths=draft_lengths)
    order = order_of_starts(arms, starts_per_arm=starts_per_arm)
    launcher = Launcher(engine_environment(threads=threads, kv_cache_gib=kv_cache_gib), timeout_s)
    limits = {"threads": threads, "kv_cache_gib": kv_cache_gib, "timeout_s": timeout_s}
    asked = [*wanted.values(), humaneval_requests]
    write_json(out_dir / "protocol.json", limits | describe_protocol(plan, order, prompts, wanted=asked))
    write_json(out_dir / "context.json", context)
    finished = run_grid(out_dir / "starts", plan=plan, order=order, launcher=launcher)
    fidelity = Fidelity(out_dir / "fidelity", max(arms, key=lambda arm: arm.draft_length), launcher, predict)
    check = CellPlan("heldout", fidelity_requests, 0.0, fidelity_max_tokens, seed, prompts.measured[:fidelity_requests])
    write_json(out_dir / "fidelity.json", fidelity.run(replace(plan, dtype=fidelity_dtype, cells=[check])))
    return {"starts": finished, **_counts(build_report(out_dir))}


def _counts(results: dict[str, Any]) -> dict[str, int]:
    return {
        "failed_starts": len(results["failures"]),
        "cells": len(results["cells"]),
        "requests": results["requests"],
        "output_tokens": results["output_tokens"],
    }


@dataclass(frozen=True)
class Prompts:
    """The session's prompts. The last held-out one warms engines up and is never measured."""

    heldout: Workload
    humaneval: Workload

    @property
    def measured(self) -> list[Request]:
        return self.heldout.requests[:-1]

    @property
    def warmup(self) -> list[int]:
        return self.heldout.requests[-1].token_ids

    def cells(self, wanted: dict[int, int], *, temperature: float, max_tokens: int, seed: int) -> list[CellPlan]:
        """A cell per batch size on the first `wanted[batch size]` held-out prompts, and one of HumanEval."""
        chosen = [("heldout", size, self.measured[:count]) for size, count in wanted.items()]
        if self.humaneval.requests:
            chosen.append(("humaneval", HUMANEVAL_BATCH_SIZE, self.humaneval.requests))
        return [CellPlan(name, size, temperature, max_tokens, seed, requests) for name, size, requests in chosen]


def load_prompts(
    chat: TargetChat,
    *,
    heldout_path: Path,
    heldout_requests: int,
    humaneval_requests: int,
    max_prompt_tokens: int,
) -> Prompts:
    """Load at most `heldout_requests` held-out prompts, one more for warm-up, and HumanEval's unless 0 are wanted."""
    heldout = load_heldout(heldout_path, chat, limit=heldout_requests + 1, max_prompt_tokens=max_prompt_tokens)
    if len(heldout.requests) < 2:
        raise ValueError(
            "scoring needs at least 2 held-out prompts, one of them for warm-up; "
            "raise data.heldout_share or give more held-out conversations"
        )
    humaneval = Workload("humaneval", [], 0, 0)
    if humaneval_requests:
        humaneval = load_humaneval(chat, limit=humaneval_requests, max_prompt_tokens=max_prompt_tokens)
    return Prompts(heldout, humaneval)


def plan_arms(head_dir: Path, *, method: str, draft_lengths: list[int]) -> list[Arm]:
    """Plain decoding, and one arm per draft length."""
    heads = [
        Arm(f"k{length}", speculative_config(head_dir, method=method, num_speculative_tokens=length), length)
        for length in draft_lengths
    ]
    return [Arm(AR, None, 0), *heads]


def describe_protocol(plan: StartPlan, order: list[Arm], prompts: Prompts, *, wanted: list[int]) -> dict[str, Any]:
    """What the report says about how it was measured, as plain values. `wanted`: requests asked for, cell by cell."""
    counts = [
        {"dataset": cell.dataset, "batch_size": cell.batch_size, "requests": len(cell.requests), "wanted": asked}
        for cell, asked in zip(plan.cells, wanted, strict=False)
    ]
    return {
        "order": [arm.name for arm in order],
        "arms": {arm.name: arm.draft_length for arm in order},
        "dtype": plan.dtype,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "seed": plan.seed,
        "enforce_eager": plan.enforce_eager,
        "stop_token_ids": plan.stop_token_ids,
        "temperature": plan.cells[0].temperature,
        "max_tokens": plan.cells[0].max_tokens,
        "requests": counts,
        "left_out": {
            workload.dataset: {"too_long": workload.too_long, "duplicates": workload.duplicates}
            for workload in (prompts.heldout, prompts.humaneval)
        },
    }


@dataclass(frozen=True)
class Fidelity:
    """The lossless and parity check: where it runs, and what it needs."""

    directory: Path
    arm: Arm
    launcher: Launcher
    predict: Predict

    def run(self, plan: StartPlan) -> dict[str, Any]:
        """Start AR and the head on the same prompts and compare; a failed start is reported, not raised."""
        self.directory.mkdir(parents=True, exist_ok=True)
        stems = {}
        for arm in (Arm(AR, None, 0), self.arm):
            stems[arm.name] = self.directory / arm.name
            arm_plan = replace(plan, arm=arm.name, speculative_config=arm.speculative_config)
            if not self.launcher.run(arm_plan, stems[arm.name]):
                return {"status": "failed", "why": f"the start of {arm.name} failed", "dtype": plan.dtype}
        plain, drafted = (read_start(stem.with_suffix(".jsonl")).cells[0] for stem in stems.values())
        prompts = {request.prompt_id: request.token_ids for request in plan.cells[0].requests}
        logits = target_logits(Path(plan.target_dir), trust_remote_code=plan.trust_remote_code)
        lossless = check_lossless(plain.requests, drafted.requests, prompts=prompts, logits=logits)
        parity = check_parity(
            drafted.requests, prompts=prompts, draft_length=self.arm.draft_length, predict=self.predict
        )
        settings = {"dtype": plan.dtype, "batch_size": len(plain.requests), "max_tokens": plain.max_tokens}
        return {"status": "done", "arm": self.arm.name, **settings, "lossless": lossless, "parity": parity}
