"""The train stage: put store, target pieces, vocabulary, head and loop together, and leave the best head in `head/`."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from eyas.heads.config import head_config_for_target, load_target_config
from eyas.heads.files import read_json, write_json
from eyas.heads.formats.vllm import read_head
from eyas.heads.initialise import new_head
from eyas.heads.target import load_target_pieces
from eyas.heads.target_source import target_fingerprint
from eyas.heads.vocab import choose_draft_vocabulary, coverage
from eyas.train.checkpoint import TrainingState, head_directory
from eyas.train.features.store import FeatureStore, StoreIdentity, check_identity
from eyas.train.heldout import heldout_statistics
from eyas.train.loop import HeadObjective, LoopSettings, Trainer
from eyas.train.optim import adamw
from eyas.train.tracking import NoTracker, Tracker, Wandb

HEAD_DIRECTORY = "head"


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of the draft head; None is the target's own."""

    draft_vocab_size: int
    intermediate_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None


def run_training(
    out_dir: Path,
    *,
    features_dir: Path,
    tokens_dir: Path,
    target_dir: Path,
    sizes: HeadSizes,
    init_from_target: bool,
    loop: LoopSettings,
    weight_decay: float,
    betas: tuple[float, float],
    precision: Literal["bf16", "no"],
    evaluate_conversations: int,
    threads: int | None,
    tracker: Literal["none", "wandb"],
    run_name: str,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Train a head and write the best one, by held-out tau, to `out_dir/head`.

    Args:
        precision: of matrix products; weights and optimiser state stay float32.
        evaluate_conversations: held-out conversations of the evaluations while training; the final figure uses all.

    Returns:
        Steps, the best step, final held-out tau and marginals over all held-out conversations, draft coverage.

    Raises:
        ValueError: the store belongs to another target, sizes do not fit, or the launch is not what was asked for.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    accelerator = Accelerator(mixed_precision=precision)
    check_launch(accelerator.num_processes)
    identity = check_identity(features_dir, target_fingerprint=target_fingerprint(target_dir))
    store, heldout = (FeatureStore(features_dir, split=split) for split in ("train", "heldout"))
    objective = _objective(
        store,
        identity=identity,
        target_dir=target_dir,
        target_config=load_target_config(target_dir, trust_remote_code=trust_remote_code),
        stop_token_ids=read_json(tokens_dir / "stop_tokens.json"),
        sizes=sizes,
        init_from_target=init_from_target,
        teacher_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        seed=loop.seed,
    )
    trainer = Trainer(
        accelerator=accelerator,
        objective=objective,
        optimizer=adamw(objective, learning_rate=loop.learning_rate, betas=betas, weight_decay=weight_decay),
        store=store,
        heldout=[heldout[index] for index in range(min(evaluate_conversations, len(heldout)))],
        settings=loop,
        run_dir=out_dir,
        tracker=_tracker(
            tracker, out_dir=out_dir, name=run_name, settings=vars(loop), main=accelerator.is_main_process
        ),
    )
    state = trainer.train()
    counts: dict[str, Any] = {"steps": state.step, "best_step": state.best_step}
    if accelerator.is_main_process:
        counts |= _finish(out_dir, state=state, heldout=heldout, objective=objective, chain_length=loop.chain_length)
    accelerator.wait_for_everyone()
    return counts


def _objective(
    store: FeatureStore,
    *,
    identity: StoreIdentity,
    target_dir: Path,
    target_config: Any,
    stop_token_ids: list[int],
    sizes: HeadSizes,
    init_from_target: bool,
    teacher_dtype: torch.dtype,
    seed: int,
) -> HeadObjective:
    """A fresh head over the draft vocabulary of the training answers, with the target's frozen pieces beside it."""
    counts_V = store.answer_token_counts(vocab_size=target_config.vocab_size)
    draft_to_target_D = choose_draft_vocabulary(counts_V, size=sizes.draft_vocab_size, always=stop_token_ids)
    pieces = load_target_pieces(target_dir)
    config = head_config_for_target(
        target_config,
        draft_vocab_size=sizes.draft_vocab_size,
        capture_layers=tuple(identity.capture_layers),
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
    )
    head = new_head(
        config,
        draft_to_target_D=draft_to_target_D,
        pieces=pieces,
        target_dir=target_dir,
        num_target_layers=identity.num_target_layers,
        from_target=init_from_target,
        seed=seed,
    )
    return HeadObjective(
        head,
        embedding_VH=pieces.embedding_VH.float(),
        teacher_readout_DH=pieces.readout_VH[draft_to_target_D].to(teacher_dtype),
    )


def _finish(
    out_dir: Path, *, state: TrainingState, heldout: FeatureStore, objective: HeadObjective, chain_length: int
) -> dict[str, Any]:
    """Keep the best head as `head/` and measure it in float32 on every held-out conversation."""
    final = out_dir / HEAD_DIRECTORY
    shutil.rmtree(final, ignore_errors=True)
    shutil.copytree(head_directory(out_dir, state.best_step), final)
    device = objective.embedding_VH.device
    statistics = heldout_statistics(
        read_head(final).to(device),
        (heldout[index] for index in range(len(heldout))),
        embedding_VH=objective.embedding_VH,
        num_tokens=chain_length,
        device=device,
        autocast=None,
    )
    answers_V = heldout.answer_token_counts(vocab_size=objective.head.config.vocab_size)
    result = {
        "draft_coverage_heldout": round(
            coverage(answers_V, draft_to_target_D=objective.head.draft_to_target_D.cpu()), 4
        ),
        "heldout_tau": statistics.tau,
        "heldout_marginal": list(statistics.marginal),
        "heldout_drafts": statistics.num_drafts,
        "heldout_conversations": len(heldout),
        "chain_length": chain_length,
        "estimator": "step-weighted, prefix-joint, greedy",
    }
    write_json(out_dir / "heldout.json", result)
    return result


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
