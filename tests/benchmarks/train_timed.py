"""Training against the clock: our head and the peer's, each until the same number of seconds is over (train_quality.py)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from eyas.heads.config import HeadConfig, load_target_config
from eyas.heads.files import read_json
from eyas.heads.formats.read import read_head
from eyas.heads.formats.write import convert_head, write_head
from eyas.heads.head import DraftHead
from eyas.heads.target import TargetPieces, load_target_pieces
from eyas.recipes.load import load_recipe
from eyas.recipes.run import Run, open_run
from eyas.recipes.train_stages import head_plan, loop_settings, loss_terms, optimization
from eyas.train.ema import averages
from eyas.train.features.store import FeatureStore
from eyas.train.objective import HeadObjective, step_weights
from eyas.train.optim import make_optimizer
from eyas.train.order import OrderSettings, RunOrder
from eyas.train.pack import training_pack
from eyas.train.start import start_head
from tests.benchmarks.train_peer import peer_batch, peer_model, peer_optimizers, peer_step

EPOCHS = 100
"""More than any clock here allows for."""
PEER_TOKENS, PEER_STEPS, PEER_WARMUP = 512, 3, 0.01


@dataclass
class Clock:
    """Share of the time that has passed, in ticks; `ticks` yields until the time is over."""

    seconds: float
    total: int = 1_000_000
    steps: int = 0
    tokens: int = 0
    begun: float = field(default_factory=time.perf_counter)

    def ticks(self) -> Iterator[int]:
        """A tick for each step, while there is time."""
        while (passed := time.perf_counter() - self.begun) < self.seconds:
            yield int(passed / self.seconds * self.total)
            self.steps += 1

    def report(self) -> dict[str, Any]:
        """What was done in the time."""
        passed = time.perf_counter() - self.begun
        return {
            "seconds": passed,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / passed,
        }


@dataclass(frozen=True)
class Given:
    """What both are trained on and judged by."""

    run: Run
    pieces: TargetPieces
    target: Any
    train: FeatureStore
    heldout: FeatureStore


def given(arguments: argparse.Namespace) -> Given:
    """Open the run's features with the recipe that trains on them."""
    recipe = load_recipe(arguments.recipe, overrides=[f"run_dir={arguments.run}"])
    run = open_run(recipe)
    stores = [FeatureStore(run.directory("extract"), split=split) for split in ("train", "heldout")]
    return Given(run, load_target_pieces(run.target_dir), load_target_config(run.target_dir), *stores)


def train_ours(there: Given, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with the recipe's settings until the time is over, and write the head."""
    recipe = there.run.recipe
    train, loop, optimiser = recipe.train, loop_settings(recipe.train, seed=recipe.seed), optimization(recipe.train)
    assert loop.noise.kind == "none", "a head that is trained with noise on its features is not compared here"
    head = _new_head(there)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    objective = _objective(head, there)
    optimizer = make_optimizer(
        head,
        kind=optimiser.kind,
        learning_rate=optimiser.learning_rate,
        muon_learning_rate=optimiser.muon_learning_rate,
        betas=optimiser.betas,
        weight_decay=optimiser.weight_decay,
    )
    ema = averages(head.named_parameters(), decay=loop.ema_decay)
    rows_NK = there.train.trained_rows(num_steps=loop.ttt_steps)
    order = RunOrder(there.train.lengths, rows_NK, settings=replace(loop.order, epochs=EPOCHS))
    clock = Clock(arguments.seconds)
    for tick in clock.ticks():
        num_steps = loop.ttt_steps_at(tick, total=clock.total)
        _backward(objective, there, order=order, step=clock.steps, weights_of=(num_steps, loop.step_decay))
        if optimiser.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, optimiser.max_grad_norm)
        rate = loop.rate_at(tick, total=clock.total)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate_scale"]
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        clock.tokens += order.tokens(clock.steps)
    report = clock.report()
    with ema.swapped():
        write_head(arguments.out / "ours" / "head", head, dtype=torch.float32, to="vllm")
    return report | {"settings": train.model_dump(mode="json") | {"init": recipe.init.model_dump(mode="json")}}


def _new_head(there: Given) -> DraftHead:
    """The recipe's head at step 0."""
    return start_head(
        head_plan(there.run.recipe),
        target_dir=there.run.target_dir,
        target=there.target,
        pieces=there.pieces,
        documents=there.train,
        heldout=there.heldout,
        capture_layers=there.train.identity.capture_layers,
        stop_token_ids=read_json(there.run.directory("prepare") / "stop_tokens.json"),
        seed=there.run.recipe.seed,
        say=lambda text: print(text, file=sys.stderr),
    )


def _objective(head: DraftHead, there: Given) -> HeadObjective:
    train = there.run.recipe.train
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    return HeadObjective(
        head,
        target_readout_DH=there.pieces.readout_VH[head.draft_to_target_D].to(dtype),
        losses=loss_terms(train),
        autocast=dtype if train.precision == "bf16" else None,
    )


def _backward(
    objective: HeadObjective, there: Given, *, order: RunOrder, step: int, weights_of: tuple[int, float]
) -> None:
    """Gradients of a global batch; `weights_of` are its TTT steps and how the weight of a step decays."""
    num_steps, decay = weights_of
    shares, rows_K = step_weights(num_steps, decay=decay), order.rows(step)[:num_steps]
    weights = [share / max(rows, 1) for share, rows in zip(shares, rows_K, strict=True)]
    for planned in order.packs(step, rank=0, world_size=1):
        pack = training_pack(
            there.train.load(planned.documents),
            source=objective.head.feature_source,
            num_steps=num_steps,
            embedding_VH=there.pieces.embedding_VH,
        )
        objective(pack, weights)[0].backward()


def train_peer(there: Given, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train the library's model with its trainer's defaults until the time is over; write it its way and as vLLM reads it."""
    seed = there.run.recipe.seed
    ours = read_head(arguments.out / "ours" / "head", target_config=there.target)
    config = replace(ours.config, norm_before_residual=True, norm_before_fc=True, norm_output=True)
    torch.manual_seed(seed)
    model = peer_model(
        config,
        draft_to_target_D=ours.draft_to_target_D,
        embedding_VH=there.pieces.embedding_VH,
        readout_DH=there.pieces.readout_VH[ours.draft_to_target_D],
        device=torch.device("cpu"),
        verifier=there.run.target_dir,
    )
    optimizers = peer_optimizers(model, kind=arguments.peer_optimizer, learning_rate=arguments.peer_rate)
    bf16 = (arguments.peer_precision or there.run.recipe.train.precision) == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    settings = OrderSettings(batch_tokens=PEER_TOKENS, pack_tokens=None, epochs=EPOCHS, seed=seed)
    order = RunOrder(there.train.lengths, there.train.trained_rows(num_steps=PEER_STEPS), settings=settings)
    clock = Clock(arguments.seconds)
    for tick in clock.ticks():
        documents = there.train.load(order.documents(clock.steps))
        batch = peer_batch(documents, hidden_size=config.hidden_size, max_tokens=PEER_TOKENS, dtype=dtype)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.peer_rate * peer_schedule(tick / clock.total)
        peer_step(model, batch, optimizers=optimizers, ttt_steps=PEER_STEPS, autocast_to=dtype if bf16 else None)
        clock.tokens += order.tokens(clock.steps)
    report = clock.report()
    own = arguments.out / "speculators" / "own"
    model.save_pretrained(own)
    convert_head(own, arguments.out / "speculators" / "head", to="vllm", target=None)
    return report | {"settings": _peer_settings(arguments, bf16=bf16, config=config)}


def _peer_settings(arguments: argparse.Namespace, *, bf16: bool, config: HeadConfig) -> dict[str, Any]:
    return {
        "optimizer": arguments.peer_optimizer,
        "learning_rate": arguments.peer_rate,
        "schedule": f"linear after {PEER_WARMUP:.0%} warm-up",
        "weight_decay": "0.01, of Muon's matrices 0.1",
        "ttt_steps": PEER_STEPS,
        "ttt_step_loss_decay": 1.0,
        "loss": "kl_div",
        "pack_tokens": PEER_TOKENS,
        "precision": "bf16" if bf16 else "fp32",
        "lm_head": "the target's, frozen",
        "layer and fc": "random",
        "config": asdict(config),
    }


def peer_schedule(progress: float) -> float:
    """Share of the peak rate at a share of the time: transformers' linear schedule with warm-up."""
    if progress < PEER_WARMUP:
        return progress / PEER_WARMUP
    return max(0.0, (1.0 - progress) / (1.0 - PEER_WARMUP))
