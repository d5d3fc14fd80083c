"""The parts of a session beside the grid: time split, losslessness, open loop. Each resumes, and its failure costs itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eyas.eval.arms import Arm
from eyas.eval.grid import Turn, run_grid
from eyas.eval.lossless.run import Predict, run_lossless
from eyas.eval.openloop.client import Sampling
from eyas.eval.openloop.load import patience_of
from eyas.eval.openloop.plan import LoadPlan
from eyas.eval.openloop.run import run_open_loop
from eyas.eval.prompts import FIXED_LENGTH
from eyas.eval.records import read_starts
from eyas.eval.serve_options import served_engine
from eyas.eval.sessions import Session
from eyas.eval.settings import Engine, Load, LosslessSettings, OpenLoopSettings
from eyas.heads.serving import on_cpu

OPEN_LOOP_WARMUP = 8
"""Warm-up requests sent to a server at once, if it runs as many: the batches of light and of heavier load."""

SPLIT_BLOCKS = 2
"""Blocks of a cell in an instrumented start: enough steps for its parts, each with and without the clock."""


def measure_time_split(session: Session) -> None:
    """One instrumented start of every arm, on the first dataset and temperature, into instrument/."""
    directory = session.directory / "instrument"
    first = session.plan.cells[0]
    cells = [
        replace(cell, requests=cell.requests[: cell.batch_size])
        for cell in session.plan.cells
        if (cell.dataset, cell.temperature) == (first.dataset, first.temperature)
    ]
    plan = replace(session.plan, cells=cells, instrument=True, protocol="starts", blocks=SPLIT_BLOCKS)
    timed = [arm for arm in session.arms if arm.kind != "schedule"]
    turns = [Turn((arm,), number, 0) for number, arm in enumerate(timed)]
    run_grid(directory, plan=plan, turns=turns, launcher=session.launcher)


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
        wanted=settings.requests,
        slo_ttft_ms=settings.slo_ttft_ms,
        slo_tpot_ms=settings.slo_tpot_ms,
        environment=session.launcher.environment,
        ready_timeout_s=engine.timeout_s,
        relay=session.launcher.relay,
    )


def plan_open_loop(session: Session, *, settings: OpenLoopSettings, load: Load, engine: Engine) -> LoadPlan:
    """The held-out prompts at one temperature, on a server with the engine settings of the grid."""
    plan, label = session.plan, FIXED_LENGTH if load.fixed_length else ""
    requests = session.prompts.heldout[: settings.requests]
    return LoadPlan(
        session=plan.session,
        engine=served_engine(plan, measured=read_starts(session.starts)),
        requests=[replace(request, dataset=request.dataset + label) for request in requests],
        warmup=[plan.warmup] * min(plan.max_num_seqs, OPEN_LOOP_WARMUP),
        rates=list(settings.rates),
        seed=load.seed,
        sampling=Sampling(
            temperature=open_loop_temperature(load.temperatures, arms=session.arms),
            top_p=load.top_p,
            top_k=load.top_k,
            max_tokens=load.max_tokens,
            seed=load.seed,
            stop_token_ids=plan.stop_token_ids,
            ignore_eos=load.fixed_length,
        ),
        max_connections=settings.max_connections,
        patience=patience_of(engine.timeout_s),
    )


def open_loop_temperature(temperatures: Sequence[float], *, arms: Sequence[Arm]) -> float:
    """The first temperature of the session; on CPU 0, where some arm drafts.

    vLLM's CPU build samples wrongly at temperature > 0 when it drafts (`eyas.eval.lossless.mend`). The grid's engines are
    mended in their processes; a server is what it is.

    Raises:
        ValueError: it would have to be served above 0 and cannot be.
    """
    if temperatures[0] == 0 or not any(arm.speculative_config for arm in arms) or not on_cpu():
        return temperatures[0]
    if 0.0 in temperatures:
        return 0.0
    raise ValueError(
        "score.open_loop: a server of vLLM's CPU build samples wrongly at temperature > 0 when it drafts, and the session has no "
        "other temperature; add 0 to score.temperatures, or set score.open_loop.rates=[]"
    )
