"""The train stage: put documents, target pieces, vocabulary, head and loop together, and leave the best head in `head/`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from eyas.heads.config import load_target_config
from eyas.heads.files import read_json, write_json
from eyas.heads.formats.read import read_head
from eyas.heads.head import DraftHead
from eyas.heads.target import TargetPieces, load_target_pieces
from eyas.heads.vocab import coverage
from eyas.train.checkpoint import TrainingState, head_directory
from eyas.train.features.cache import CACHE_NAME, first_meetings, remove_cache
from eyas.train.features.documents import Documents
from eyas.train.heldout import heldout_statistics
from eyas.train.inputs import OpenInputs, TrainedInputs, in_order, open_inputs
from eyas.train.loop import HeadObjective, LoopSettings, Trainer
from eyas.train.objective import Losses
from eyas.train.optim import adamw
from eyas.train.start import HeadPlan, start_head
from eyas.train.tracking import NoTracker, Tracker, Wandb

HEAD_DIRECTORY = "head"


def run_training(
    out_dir: Path,
    *,
    inputs: TrainedInputs,
    plan: HeadPlan,
    losses: Losses,
    loop: LoopSettings,
    weight_decay: float,
    betas: tuple[float, float],
    precision: Literal["bf16", "no"],
    evaluate_conversations: int,
    threads: int | None,
    tracker: Literal["none", "wandb"],
    run_name: str,
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train a head and write the best one, by held-out tau, to `out_dir/head`.

    Args:
        precision: of matrix products; weights and optimiser state stay float32.
        evaluate_conversations: held-out conversations of the evaluations while training; the final figure uses all.

    Returns:
        Steps, the best step, and what heldout.json holds.

    Raises:
        ValueError: features, target, head and launch do not fit together.
    """
    accelerator = _accelerator(precision, threads=threads)
    main = accelerator.is_main_process
    say = say if main else _silent
    opened = open_inputs(
        inputs,
        out_dir=out_dir,
        accelerator=accelerator,
        first_met=_first_met(loop, accelerator=accelerator),
        trust_remote_code=trust_remote_code,
        say=say,
    )
    with closing(opened):
        pieces = load_target_pieces(inputs.target_dir)
        target_config = load_target_config(inputs.target_dir, trust_remote_code=trust_remote_code)
        head = _head(plan, inputs=inputs, opened=opened, pieces=pieces, target=target_config, seed=loop.seed, say=say)
        objective = _objective(head, pieces=pieces, losses=losses, precision=precision)
        state = Trainer(
            accelerator=accelerator,
            objective=objective,
            optimizer=adamw(objective, learning_rate=loop.learning_rate, betas=betas, weight_decay=weight_decay),
            documents=opened.train,
            heldout=opened.heldout_in_memory(evaluate_conversations, say=say) if main else [],
            settings=loop,
            run_dir=out_dir,
            tracker=_tracker(tracker, out_dir=out_dir, name=run_name, settings=asdict(loop), main=main),
        ).train()
        counts: dict[str, Any] = {"steps": state.step, "best_step": state.best_step}
        if main:
            counts |= _finish(
                out_dir, state=state, heldout=opened.heldout, pieces=pieces, target_config=target_config, loop=loop
            )
    _end(accelerator)
    if main:
        remove_cache(out_dir / CACHE_NAME)
    return counts


def _first_met(loop: LoopSettings, *, accelerator: Accelerator) -> Callable[[Sequence[int]], list[list[int]]]:
    """What a cache makes this process compute, from the lengths of the documents."""
    return partial(
        first_meetings,
        batch_tokens=loop.batch_tokens,
        seed=loop.seed,
        epochs=loop.epochs,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )


def _head(
    plan: HeadPlan,
    *,
    inputs: TrainedInputs,
    opened: OpenInputs,
    pieces: TargetPieces,
    target: Any,
    seed: int,
    say: Callable[[str], None],
) -> DraftHead:
    return start_head(
        plan,
        target_dir=inputs.target_dir,
        target=target,
        pieces=pieces,
        documents=opened.train,
        heldout=opened.heldout,
        capture_layers=opened.identity.capture_layers,
        stop_token_ids=read_json(inputs.tokens_dir / "stop_tokens.json"),
        seed=seed,
        say=say,
    )


def _accelerator(precision: Literal["bf16", "no"], *, threads: int | None) -> Accelerator:
    if threads is not None:
        torch.set_num_threads(threads)
    # The buffers are the target's frozen weights, equal everywhere: sending them again each step would cost gigabytes.
    quiet = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[quiet])
    check_launch(accelerator.num_processes)
    return accelerator


def _end(accelerator: Accelerator) -> None:
    """Leave together: a process that ends while another still talks to it takes both down."""
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _objective(head: DraftHead, *, pieces: TargetPieces, losses: Losses, precision: str) -> HeadObjective:
    """Head and loss with the target's frozen pieces; the teacher's readout is kept in the type it is multiplied in."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return HeadObjective(
        head,
        embedding_VH=pieces.embedding_VH.float(),
        target_readout_DH=pieces.readout_VH[head.draft_to_target_D].to(dtype),
        losses=losses,
    )


def _finish(
    out_dir: Path,
    *,
    state: TrainingState,
    heldout: Documents,
    pieces: TargetPieces,
    target_config: Any,
    loop: LoopSettings,
) -> dict[str, Any]:
    """Keep the best head as `head/` and measure it in float32 on every held-out conversation."""
    final = out_dir / HEAD_DIRECTORY
    shutil.rmtree(final, ignore_errors=True)
    shutil.copytree(head_directory(out_dir, state.best_step), final)
    device = PartialState().device or torch.device("cpu")
    head = read_head(final, target_config=target_config).to(device)
    readout_DH: Tensor = pieces.readout_VH.to(device)[head.draft_to_target_D].float()
    statistics = heldout_statistics(
        head,
        in_order(heldout),
        embedding_VH=pieces.embedding_VH.float().to(device),
        target_readout_DH=readout_DH,
        num_tokens=loop.chain_length,
        device=device,
        autocast=None,
    )
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
    write_json(out_dir / "heldout.json", result)
    return result


def _silent(_line: str) -> None:
    """What a process says that is not the main one."""


def check_launch(num_processes: int) -> None:
    """A launcher that started several processes which do not know of each other trains several heads at once."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes != asked:
        raise ValueError(
            f"the launcher started {asked} processes and accelerate joined {num_processes}; on CPU set "
            "ACCELERATE_USE_CPU=true for `accelerate launch --multi_gpu --num_processes N`"
        )


def _tracker(kind: str, *, out_dir: Path, name: str, settings: dict[str, Any], main: bool) -> Tracker:
    if kind == "none" or not main:
        return NoTracker()
    return Wandb(out_dir, name=name, settings=settings)
