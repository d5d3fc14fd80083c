"""What a training run is made of before its first step: the head, its loss and optimiser, spread over the processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.heads.config import load_target_config
from eyas.heads.files import read_json
from eyas.heads.head import DraftHead
from eyas.heads.target import TargetPieces, load_target_pieces
from eyas.train.ema import Averages, averages
from eyas.train.evaluation import Evaluation
from eyas.train.inputs import OpenInputs, TrainedInputs
from eyas.train.objective import HeadObjective, Losses
from eyas.train.optim import make_optimizer
from eyas.train.parallel.engine import TrainingEngine
from eyas.train.parallel.start import Processes, training_engine
from eyas.train.settings import LoopSettings
from eyas.train.start import HeadPlan, start_head

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """What the optimiser is given."""

    kind: Literal["adamw", "muon"]
    learning_rate: float
    muon_learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float | None
    max_grad_value: float | None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A head at step 0 on its engine, with what evaluates it. `pieces` and `target` are of the target."""

    head: DraftHead
    engine: TrainingEngine
    evaluation: Evaluation
    ema: Averages
    pieces: TargetPieces
    target: Any


def make_ready(
    processes: Processes,
    *,
    inputs: TrainedInputs,
    opened: OpenInputs,
    plan: HeadPlan,
    losses: Losses,
    optimization: Optimization,
    loop: LoopSettings,
    precision: Precision,
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> Ready:
    """Build all of it; arguments as of `run_training`. Collective.

    Raises:
        ValueError: target, features and head do not fit together.
    """
    pieces = load_target_pieces(inputs.target_dir)
    target = load_target_config(inputs.target_dir, trust_remote_code=trust_remote_code)
    head = _head(plan, inputs=inputs, opened=opened, pieces=pieces, target=target, seed=loop.seed, say=say)
    autocast = torch.bfloat16 if precision == "bf16" else None
    readout_DH = teacher_readout(head, pieces=pieces, opened=opened, dtype=autocast or torch.float32)
    engine, objective = _engine(
        processes, head, readout_DH=readout_DH, losses=losses, autocast=autocast, optimization=optimization
    )
    evaluation = Evaluation(
        documents=opened.heldout_share(
            loop.evaluate_conversations, rank=engine.rank, world_size=engine.world_size, say=say
        ),
        embedding_VH=pieces.embedding_VH,
        target_readout_DH=objective.target_readout_DH,
        chain_length=loop.chain_length,
        autocast=autocast,
    )
    return Ready(
        head=head,
        engine=engine,
        evaluation=evaluation,
        ema=averages(engine.trainable().items(), decay=loop.ema_decay),
        pieces=pieces,
        target=target,
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


def _engine(
    processes: Processes,
    head: DraftHead,
    *,
    readout_DH: Tensor | None,
    losses: Losses,
    autocast: torch.dtype | None,
    optimization: Optimization,
) -> tuple[TrainingEngine, HeadObjective]:
    """Head, loss and optimiser, spread over the processes as the launcher asked, and the bare objective."""
    objective = HeadObjective(head, target_readout_DH=readout_DH, losses=losses, autocast=autocast)
    optimizer = make_optimizer(
        head,
        kind=optimization.kind,
        learning_rate=optimization.learning_rate,
        muon_learning_rate=optimization.muon_learning_rate,
        betas=optimization.betas,
        weight_decay=optimization.weight_decay,
    )
    engine = training_engine(
        processes,
        objective,
        optimizer,
        max_grad_norm=optimization.max_grad_norm,
        max_grad_value=optimization.max_grad_value,
    )
    return engine, objective


def teacher_readout(head: DraftHead, *, pieces: TargetPieces, opened: OpenInputs, dtype: torch.dtype) -> Tensor | None:
    """The target's readout rows of the draft vocabulary, in the type they are multiplied in; None where nothing reads them:
    the teacher's likeliest tokens are stored, and the head has a readout of its own."""
    if opened.identity.form.teacher == "top-k" and head.config.kind == "eagle3":
        return None
    return pieces.readout_rows(head.draft_to_target_D, device=torch.device("cpu"), dtype=dtype)
