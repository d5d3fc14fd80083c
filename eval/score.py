"""The score stage: measure the arms against plain decoding in real vLLM, check them, judge them, write the report.

What it leaves: session.json, context.json (what is measured) and protocol.json (how); starts/ (raw records, plans, logs of
the grid and of the schedule), instrument/, lossless/ and open_loop/ (raw records of the other parts), schedule.json and
speculative_config.json; and the report: results.json, report.md, report.html. Every part can be stopped and continued.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.eval.arms import SCHEDULE, Arm, plan_arms
from eyas.eval.cost.serving import CONFIG_FILE, SCHEDULE_FILE
from eyas.eval.first_round import settle_starts
from eyas.eval.grid import plan_turns, require_both_sides, run_grid
from eyas.eval.launch import Launcher
from eyas.eval.lossless.run import Predict
from eyas.eval.parts import measure_lossless, measure_open_loop, measure_time_split, open_loop_temperature
from eyas.eval.plan import StartPlan
from eyas.eval.prompts import load_prompts
from eyas.eval.protocol import describe_protocol
from eyas.eval.report.build import build_report
from eyas.eval.schedule_phase import measure_schedule
from eyas.eval.sessions import Session, open_session
from eyas.eval.settings import Checks, Engine, Load, PromptSources, Repeats, Subject
from eyas.eval.workload import units
from eyas.heads.chat import TargetChat
from eyas.heads.files import write_json
from eyas.heads.serving import engine_environment, require_vllm

Say = Callable[[str], None]


def score(
    out_dir: Path,
    *,
    subject: Subject,
    sources: PromptSources,
    load: Load,
    repeats: Repeats,
    engine: Engine,
    checks: Checks,
    predict: Predict | None,
    context: dict[str, Any],
    say: Say,
) -> dict[str, int]:
    """Measure the arms of `subject` against plain decoding of its target; returns counts.

    Complete starts in `out_dir` are kept.

    Args:
        out_dir: of the session.
        subject, sources, load, repeats, engine, checks: what to measure, see `eyas.eval.settings`.
        predict: computes the head's acceptance offline; None without a head.
        context: stored as it is.
        say: takes a line for the user.

    Raises:
        ValueError: vLLM or a data package is missing, the prompts do not suffice, or all starts of one side failed.
    """
    require_vllm()
    session = plan_session(
        out_dir, subject=subject, sources=sources, load=load, repeats=repeats, engine=engine, checks=checks
    )
    if checks.open_loop.rates:
        open_loop_temperature(load.temperatures, arms=session.arms)  # what cannot be served is refused before the hours
    write_json(out_dir / "context.json", context)
    say_shortages(session, load=load, say=say)
    drop_parts(session, schedule=subject.schedule, checks=checks)
    starts_plan = settle_starts(session, repeats=repeats, schedule=subject.schedule, checks=checks, say=say)
    starts_per_arm = starts_plan["starts_per_arm"]
    turns = plan_turns(session.arms, protocol=repeats.protocol, starts_per_arm=starts_per_arm)
    write_json(
        out_dir / "protocol.json",
        describe_protocol(
            session,
            turns=turns,
            load=load,
            repeats=repeats,
            engine=engine,
            template_options=sources.template_options,
            starts_plan=starts_plan,
        ),
    )
    run_grid(session.starts, plan=session.plan, turns=turns, launcher=session.launcher)
    require_both_sides(session.starts)
    if subject.schedule:
        schedule = measure_schedule(session, protocol=repeats.protocol, starts_per_arm=starts_per_arm, say=say)
        session = replace(session, arms=[*session.arms, *([schedule] if schedule else [])])
    measure_parts(session, load=load, engine=engine, checks=checks, predict=predict, starts_per_arm=starts_per_arm)
    return counts_of(build_report(out_dir))


def plan_session(
    out_dir: Path,
    *,
    subject: Subject,
    sources: PromptSources,
    load: Load,
    repeats: Repeats,
    engine: Engine,
    checks: Checks,
) -> Session:
    """Arms, prompts and engine settings; the session's id is made here when there is none yet."""
    chat = TargetChat(
        subject.target_dir, trust_remote_code=subject.trust_remote_code, template_options=dict(sources.template_options)
    )
    arms = plan_arms(
        subject.head_dir, method=subject.method, draft_lengths=subject.draft_lengths, others=subject.others
    )
    open_loop_requests = checks.open_loop.requests if checks.open_loop.rates else 0
    prompts = load_prompts(
        chat,
        sources=sources,
        load=load,
        at_least=max(checks.lossless.requests, open_loop_requests),
        max_prompt_tokens=room_for_prompts(engine, arms, max_tokens=max(load.max_tokens, checks.lossless.max_tokens)),
    )
    plan = StartPlan(
        target_dir=str(subject.target_dir),
        trust_remote_code=subject.trust_remote_code,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        seed=load.seed,
        enforce_eager=engine.enforce_eager,
        stop_token_ids=chat.stop_token_ids,
        warmup=prompts.warmup,
        cells=prompts.cells(load),
        session=open_session(out_dir),
        protocol=repeats.protocol,
        blocks=repeats.blocks,
        prefix_caching=engine.prefix_caching,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
    )
    environment = engine_environment(threads=engine.threads, kv_cache_gib=engine.kv_cache_gib)
    return Session(
        directory=out_dir, plan=plan, prompts=prompts, arms=arms, launcher=Launcher(environment, engine.timeout_s)
    )


def room_for_prompts(engine: Engine, arms: Sequence[Arm], *, max_tokens: int) -> int:
    """Longest prompt that leaves room for the answer and for a last step's drafts."""
    return engine.max_model_len - max_tokens - max(arm.draft_length for arm in arms) - 1


def say_shortages(session: Session, *, load: Load, say: Say) -> None:
    """Name the cells that get fewer prompts than they need: none is repeated to fill them."""
    for cell in session.plan.cells:
        wanted, found = load.wanted(cell.batch_size), len(units(cell.requests))
        if found < wanted:
            say(
                f"{cell.dataset} T={cell.temperature:g} batch {cell.batch_size}: {found} prompts of {wanted} "
                "wanted; there are no more, and none is repeated"
            )


def drop_parts(session: Session, *, schedule: bool, checks: Checks) -> None:
    """Remove what an earlier, longer session left of parts that are not asked for any more: it would enter the report."""
    asked = {
        "instrument": checks.time_split,
        "lossless": checks.lossless.requests > 0,
        "open_loop": bool(checks.open_loop.rates),
    }
    for part in [part for part, wanted in asked.items() if not wanted and (session.directory / part).exists()]:
        shutil.rmtree(session.directory / part)
    if not schedule:
        for name in (SCHEDULE_FILE, CONFIG_FILE):
            (session.directory / name).unlink(missing_ok=True)
        run_grid(session.starts, plan=session.plan, turns=[], launcher=session.launcher, phase="schedule")


def measure_parts(
    session: Session, *, load: Load, engine: Engine, checks: Checks, predict: Predict | None, starts_per_arm: int
) -> None:
    """What is measured beside the grid, as far as the recipe asks for it."""
    if checks.time_split:
        measure_time_split(session)
    if checks.lossless.requests:
        measure_lossless(session, settings=checks.lossless, predict=predict)
    if checks.open_loop.rates:
        measure_open_loop(session, settings=checks.open_loop, load=load, engine=engine, starts_per_arm=starts_per_arm)


def counts_of(results: dict[str, Any]) -> dict[str, int]:
    return {
        "starts": sum((results["starts"] | {SCHEDULE: 0}).values()) + sum(results["schedule_starts"].values()),
        "failed_starts": len(results["failures"]),
        "cells": len(results["cells"]),
        "requests": results["requests"],
        "output_tokens": results["output_tokens"],
    }
