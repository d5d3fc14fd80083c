"""The parts of a session beside the grid: time split, losslessness, open loop. Each resumes, and its failure costs itself."""

from __future__ import annotations

from dataclasses import replace

from eyas.eval.arms import arm_plan
from eyas.eval.lossless.run import Predict, run_lossless
from eyas.eval.openloop.client import Sampling
from eyas.eval.openloop.load import Patience
from eyas.eval.openloop.plan import LoadPlan
from eyas.eval.openloop.run import run_open_loop
from eyas.eval.openloop.server import ServedEngine
from eyas.eval.prompts import FIXED_LENGTH
from eyas.eval.sessions import Session
from eyas.eval.settings import Engine, Load, LosslessSettings, OpenLoopSettings

OPEN_LOOP_WARMUP = 8
"""Warm-up requests sent to a server at once, if it runs as many: the batches of light and of heavier load."""

SPLIT_BLOCKS = 2
"""Blocks of a cell in an instrumented start: enough steps for its parts, each with and without the clock."""


def measure_time_split(session: Session) -> None:
    """One instrumented start of every arm, on the first dataset and temperature, into instrument/."""
    directory = session.directory / "instrument"
    directory.mkdir(parents=True, exist_ok=True)
    first = session.plan.cells[0]
    cells = [
        replace(cell, requests=cell.requests[: cell.batch_size])
        for cell in session.plan.cells
        if (cell.dataset, cell.temperature) == (first.dataset, first.temperature)
    ]
    plan = replace(session.plan, cells=cells, instrument=True, protocol="starts", blocks=SPLIT_BLOCKS)
    for number, arm in enumerate(arm for arm in session.arms if arm.kind != "schedule"):
        session.launcher.run(arm_plan(plan, arm, start=number, round=0), directory / f"{number:03d}-{arm.name}")


def measure_lossless(session: Session, *, settings: LosslessSettings, predict: Predict | None) -> None:
    """The losslessness ladder, into lossless/."""
    run_lossless(
        session.directory / "lossless",
        plan=session.plan,
        arms=session.arms,
        prompts=session.prompts.heldout,
        requests=settings.requests,
        max_tokens=settings.max_tokens,
        dtype=settings.dtype,
        samples=settings.samples,
        launcher=session.launcher,
        predict=predict,
    )


def measure_open_loop(
    session: Session, *, settings: OpenLoopSettings, load: Load, engine: Engine, starts_per_arm: int
) -> None:
    """Poisson arrivals at real servers, every arm, into open_loop/."""
    run_open_loop(
        session.directory / "open_loop",
        plan=plan_open_loop(session, settings=settings, load=load, engine=engine),
        arms=session.arms,
        starts_per_arm=starts_per_arm,
        slo_ttft_ms=settings.slo_ttft_ms,
        slo_tpot_ms=settings.slo_tpot_ms,
        environment=session.launcher.environment,
        relay=session.launcher.relay,
    )


def plan_open_loop(session: Session, *, settings: OpenLoopSettings, load: Load, engine: Engine) -> LoadPlan:
    """The held-out prompts at the first temperature, on a server with the engine settings of the grid."""
    plan, label = session.plan, FIXED_LENGTH if load.fixed_length else ""
    requests = session.prompts.heldout[: settings.requests]
    return LoadPlan(
        engine=ServedEngine(
            target_dir=plan.target_dir,
            trust_remote_code=plan.trust_remote_code,
            dtype=plan.dtype,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            seed=plan.seed,
            enforce_eager=plan.enforce_eager,
            prefix_caching=plan.prefix_caching,
        ),
        requests=[replace(request, dataset=request.dataset + label) for request in requests],
        warmup=[plan.warmup] * min(plan.max_num_seqs, OPEN_LOOP_WARMUP),
        rates=list(settings.rates),
        seed=load.seed,
        sampling=Sampling(
            temperature=load.temperatures[0],
            top_p=load.top_p,
            top_k=load.top_k,
            max_tokens=load.max_tokens,
            seed=load.seed,
            stop_token_ids=plan.stop_token_ids,
            ignore_eos=load.fixed_length,
        ),
        max_connections=settings.max_connections,
        patience=Patience(request_s=engine.timeout_s, silence_s=engine.timeout_s),
    )
