"""The train stage: put documents, target pieces, head and loop together, and leave the best head in `head/`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.heads.files import write_json
from eyas.heads.formats.read import read_head
from eyas.heads.head import DraftHead
from eyas.heads.vocab import coverage
from eyas.train.checkpoint import Checkpoints, TrainingState, head_directory
from eyas.train.features.cache import CACHE_NAME, remove_cache
from eyas.train.flops import pack_flops
from eyas.train.heldout import heldout_hits, statistics_of
from eyas.train.inputs import OpenInputs, TrainedInputs, in_order, open_inputs
from eyas.train.keeping import Keeper
from eyas.train.loop import Trainer
from eyas.train.metrics import Window
from eyas.train.objective import Losses
from eyas.train.order import RunOrder
from eyas.train.parallel.engine import TrainingEngine
from eyas.train.parallel.start import Processes, start_processes
from eyas.train.peak import peak_flops
from eyas.train.preemption import Preempted, StopRequest, clear_requeue, stop_on_signals
from eyas.train.ready import Optimization, Precision, Ready, make_ready
from eyas.train.settings import LoopSettings
from eyas.train.start import HeadPlan
from eyas.train.tracking import Tracker, TrackingSettings, open_trackers
from eyas.train.wandb_tracker import restore_run_id, stored_run_id

HEAD_DIRECTORY = "head"


def run_training(
    out_dir: Path,
    *,
    inputs: TrainedInputs,
    plan: HeadPlan,
    losses: Losses,
    loop: LoopSettings,
    optimization: Optimization,
    precision: Precision,
    threads: int | None,
    tracking: TrackingSettings,
    settings: dict[str, Any],
    facts: dict[str, Any],
    nominal_flops: Callable[[str], float | None],
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train a head and write the best one, by held-out tau, to `out_dir/head`; what it returns is told in the manifest.

    Args:
        precision: of matrix products; weights and optimiser state are float32.
        threads: CPU threads of each process.
        nominal_flops: the bf16 peak of a GPU by its name, None where it is not known.
        settings: what a checkpoint must agree with to be continued. facts: what it repeats for its reader.

    Raises:
        ValueError: features, target, head and launch do not fit together.
        Preempted: a signal asked to stop, and the run was saved.
    """
    processes = _joined(threads=threads, optimization=optimization, loop=loop)
    accelerator = processes.accelerator
    say = say if accelerator.is_main_process else _silent
    with stop_on_signals() as stop, ExitStack() as stack:
        opened = open_inputs(
            inputs,
            out_dir=out_dir,
            accelerator=accelerator,
            order=loop.order,
            ttt_steps=loop.ttt_steps,
            trust_remote_code=trust_remote_code,
            say=say,
        )
        stack.enter_context(closing(opened))
        _say_order(opened.order, world_size=accelerator.num_processes, say=say)
        ready = make_ready(
            processes,
            inputs=inputs,
            opened=opened,
            plan=plan,
            losses=losses,
            optimization=optimization,
            loop=loop,
            precision=precision,
            trust_remote_code=trust_remote_code,
            say=say,
        )
        window = _window(ready.engine, precision=precision, nominal_flops=nominal_flops)
        keeper = _keeper(out_dir, ready=ready, loop=loop, settings=settings, facts=facts, say=say)
        trackers = partial(open_trackers, tracking, run_dir=out_dir, main=accelerator.is_main_process, say=say)
        return _train(out_dir, ready, opened, keeper, loop=loop, trackers=trackers, window=window, stop=stop, say=say)


def _joined(*, threads: int | None, optimization: Optimization, loop: LoopSettings) -> Processes:
    processes = start_processes(
        threads=threads,
        max_grad_norm=optimization.max_grad_norm,
        max_grad_value=optimization.max_grad_value,
        optimizer=optimization.kind,
    )
    require_averages_possible(processes, ema_decay=loop.ema_decay)
    return processes


def _keeper(
    out_dir: Path,
    *,
    ready: Ready,
    loop: LoopSettings,
    settings: dict[str, Any],
    facts: dict[str, Any],
    say: Callable[[str], None],
) -> Keeper:
    return Keeper(
        engine=ready.engine,
        evaluation=ready.evaluation,
        checkpoints=Checkpoints(out_dir, settings=settings, keep=loop.keep_checkpoints, say=say),
        ema=ready.ema,
        run_dir=out_dir,
        facts=facts | {"world_size": ready.engine.world_size},
        say=say,
    )


def _train(
    out_dir: Path,
    ready: Ready,
    opened: OpenInputs,
    keeper: Keeper,
    *,
    loop: LoopSettings,
    trackers: Callable[..., AbstractContextManager[Tracker]],
    window: Window,
    stop: StopRequest,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Go on from the newest checkpoint to the end, and keep the best head."""
    engine, head = ready.engine, ready.head
    state = keeper.resume()
    clear_requeue(out_dir)
    restore_run_id(out_dir, state.wandb_id)
    with _leaving_together(engine), trackers(resumed_step=state.step) as tracker:
        state.wandb_id = stored_run_id(out_dir)
        state = Trainer(
            engine=engine,
            order=opened.order,
            documents=opened.train,
            source=head.feature_source,
            embedding_VH=None if head.config.own_embedding else ready.pieces.embedding_VH,
            keeper=keeper,
            ema=ready.ema,
            tracker=tracker,
            window=window,
            settings=loop,
            run_dir=out_dir,
            pack_flops=partial(pack_flops, config=head.config, train_readout=_trains_readout(head)),
            draft_vocab_size=head.config.draft_vocab_size,
            prefetch=opened.prefetch,
            stop=stop,
            say=say,
            state=state,
        ).train()
        counts: dict[str, Any] = {"steps": state.step, "best_step": state.best_step, "skipped_steps": state.skipped}
        counts |= _finish(out_dir, state=state, opened=opened, ready=ready, loop=loop)
        tracker.artifact(out_dir / HEAD_DIRECTORY, kind="head")
    engine.end()
    if engine.is_main:
        remove_cache(out_dir / CACHE_NAME)
    return counts


@contextmanager
def _leaving_together(engine: TrainingEngine) -> Iterator[None]:
    """Wait for the main process, which finishes its trackers: a launcher ends all processes when the first one ends."""
    try:
        yield
    except Preempted:
        engine.end()
        raise


def require_averages_possible(processes: Processes, *, ema_decay: float | None) -> None:
    """
    Raises:
        ValueError: averages are wanted, and no process holds weights to average.
    """
    stage = 0 if processes.deepspeed is None else processes.deepspeed["zero_optimization"]["stage"]
    if ema_decay is not None and stage == 3:
        raise ValueError(
            "train.ema_decay does not work under ZeRO-3, where no process holds the weights: use ZeRO-2 or FSDP2, or set "
            "it to null"
        )


def _say_order(order: RunOrder, *, world_size: int, say: Callable[[str], None]) -> None:
    found = order.statistics(world_size=world_size)
    line = f"{len(order)} steps of {found.documents_per_step:.1f} conversations on average, {found.fill:.1%} full"
    say(line if order.untrained == 0 else f"{line}; {order.untrained} conversations have nothing to train on")
    warning = order.warning(found, world_size=world_size)
    if warning is not None:
        say(warning)


def _window(engine: TrainingEngine, *, precision: Precision, nominal_flops: Callable[[str], float | None]) -> Window:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
    nominal = nominal_flops(name) if dtype == torch.bfloat16 else None
    engine.barrier()  # processes that share processors measure what they will share in training
    peak = peak_flops(engine.device, dtype=dtype, nominal=nominal)
    return Window(device=engine.device, rank=engine.rank, world_size=engine.world_size, peak=peak)


def _trains_readout(head: DraftHead) -> bool:
    return any(name == "lm_head.weight" and weight.requires_grad for name, weight in head.named_parameters())


def _finish(
    out_dir: Path, *, state: TrainingState, opened: OpenInputs, ready: Ready, loop: LoopSettings
) -> dict[str, Any]:
    """Keep the best head as `head/` and measure it in float32 on every held-out conversation, each process on a share."""
    engine, pieces = ready.engine, ready.pieces
    final = out_dir / HEAD_DIRECTORY
    if engine.is_main:
        shutil.rmtree(final, ignore_errors=True)
        shutil.copytree(head_directory(out_dir, state.best_step), final)
    engine.barrier()
    head = read_head(final, target_config=ready.target).to(engine.device)
    readout_DH = None
    if head.config.kind == "eagle":
        readout_DH = pieces.readout_rows(head.draft_to_target_D, device=engine.device, dtype=torch.float32)
    heldout = opened.heldout
    hits_K = heldout_hits(
        head,
        in_order(heldout, range(engine.rank, len(heldout), engine.world_size)),
        embedding_VH=pieces.embedding_VH,
        target_readout_DH=readout_DH,
        num_tokens=loop.chain_length,
        device=engine.device,
        autocast=None,
    )
    statistics = statistics_of(engine.sum(hits_K))
    answers_V = heldout.answer_token_counts(vocab_size=head.config.vocab_size)
    result = {
        "draft_vocab_size": head.config.draft_vocab_size,
        "draft_coverage_heldout": round(coverage(answers_V, draft_to_target_D=head.draft_to_target_D.cpu()), 4),
        "heldout_tau": statistics.tau,
        "heldout_marginal": list(statistics.marginal),
        "heldout_drafts": statistics.num_drafts,
        "heldout_conversations": len(heldout),
        "chain_length": loop.chain_length,
        "estimator": "step-weighted, prefix-joint, greedy",
    }
    if engine.is_main:
        write_json(out_dir / "heldout.json", result)
    return result


def _silent(_line: str) -> None:
    """What a process says that is not the main one."""
