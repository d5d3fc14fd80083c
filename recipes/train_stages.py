"""The stage that trains a head, and what a recipe says about the head."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eyas.heads.config import default_capture_layers
from eyas.recipes.disk import directory_bytes, require_free_bytes
from eyas.recipes.estimate import HeadSize, checkpoint_bytes
from eyas.recipes.hardware import nominal_flops
from eyas.recipes.provenance import git_state, versions
from eyas.recipes.run import Run, available_cores
from eyas.recipes.schema import Recipe
from eyas.recipes.schema_train import Train
from eyas.recipes.score_heads import head_fingerprint
from eyas.recipes.stage import Stage, output_fingerprint, without
from eyas.recipes.tracked import tracking_settings

if TYPE_CHECKING:
    from eyas.train.inputs import TrainedInputs
    from eyas.train.objective import Losses
    from eyas.train.ready import Optimization
    from eyas.train.settings import LoopSettings
    from eyas.train.start import HeadPlan

NO_LAYERS: tuple[int, ...] = ()

HARMLESS = frozenset(
    {"checkpoint_every", "keep_checkpoints", "log_every", "threads", "pack_tokens", "max_skipped_steps"}
)
"""Settings of training that change no result. A pack's size changes sums by rounding only, as the number of processes does."""


def captured_layers(run: Run) -> tuple[int, ...] | None:
    """Layers to extract: none for an EAGLE head, those of the head to go on from, or as the recipe says."""
    recipe = run.recipe
    if recipe.head.kind == "eagle":
        return NO_LAYERS
    if recipe.features.capture_layers is None and recipe.init.head is not None:
        from eyas.heads.formats.read import read_files

        return read_files(init_directory(recipe)).config.capture_layers
    return recipe.features.capture_layers


def store_settings(run: Run) -> dict[str, Any]:
    """What decides the numbers in a store of this run's hidden states."""
    features = run.recipe.features
    return {
        "dtype": features.dtype,
        "storage": features.stored_as,
        "teacher": features.teacher,
        "teacher_k": features.teacher_k if features.teacher == "top-k" else None,
        "last_everywhere": run.recipe.head.kind == "eagle",
    }


def _head_layers(run: Run, *, num_target_layers: int) -> tuple[int, ...]:
    """Layers that the head reads, with the default filled in."""
    layers = captured_layers(run)
    return default_capture_layers(num_target_layers) if layers is None else layers


def init_directory(recipe: Recipe) -> Path:
    """Directory of the head that training goes on from."""
    assert recipe.init.head is not None
    return Path(recipe.init.head).expanduser()


def train_stage(run: Run) -> Stage:
    """The head learns; its best checkpoint by held-out tau is `train/head/`."""
    recipe, head, train = run.recipe, run.recipe.head, run.recipe.train
    tokens_dir = run.directory("prepare")
    online = recipe.features.mode == "online"

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.run import run_training

        parameters = head_sizes(run)[0].total
        needed = checkpoint_bytes(parameters, kept=train.keep_checkpoints, averages=train.ema_decay is not None)
        # What a run that continues has written already is a part of it.
        require_free_bytes(
            out_dir, needed=needed - directory_bytes(out_dir), what="training (checkpoints and the head)"
        )
        return run_training(
            out_dir,
            inputs=trained_inputs(run),
            plan=head_plan(recipe),
            losses=loss_terms(train),
            loop=loop_settings(train, seed=recipe.seed),
            optimization=optimization(train),
            precision=train.precision,
            threads=train.threads or max(1, available_cores() // processes_here()),
            tracking=tracking_settings(run, stage="train"),
            settings=settings,
            facts={"versions": versions(), "git": git_state(), "recipe": recipe.model_dump(mode="json")},
            trust_remote_code=recipe.target.trust_remote_code,
            nominal_flops=nominal_flops,
            say=lambda line: typer.echo(f"train: {line}"),
        )

    settings: dict[str, Any] = {
        "head": head.model_dump(mode="json"),
        "init": without(recipe.init.model_dump(mode="json"), {"head"}),
        "train": without(train.model_dump(mode="json"), HARMLESS),
        "seed": recipe.seed,
        "trust_remote_code": recipe.target.trust_remote_code,
    }
    inputs = {
        "target": run.target_fingerprint,
        "tokens": output_fingerprint(tokens_dir),
    }
    if online:
        layers = captured_layers(run)
        settings["features"] = store_settings(run) | {"capture_layers": layers if layers is None else list(layers)}
    else:
        inputs["features"] = output_fingerprint(run.directory("extract"))
    if recipe.init.head is not None:
        inputs["init_head"] = head_fingerprint(init_directory(recipe))
    return Stage(
        name="train", settings=settings, inputs=inputs, body=body, describe=_describe_training, precious="checkpoints"
    )


def processes_here() -> int:
    """Processes that a launcher started on this node; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def trained_inputs(run: Run) -> TrainedInputs:
    """Where training reads the target's states: from the extract stage, or from the target beside the head."""
    from eyas.recipes.store_form import store_form
    from eyas.train.inputs import Offline, Online, TrainedInputs

    features = run.recipe.features
    if features.mode == "offline":
        source = Offline(features_dir=run.directory("extract"), verify=features.verify)
    else:
        source = Online(
            capture_layers=captured_layers(run),
            dtype=features.dtype,
            form=store_form(run.recipe),
            batch_tokens=features.batch_tokens,
            where=features.where,
            device=features.device,
            cache=features.cache,
            threads=features.threads,
        )
    return TrainedInputs(target_dir=run.target_dir, tokens_dir=run.directory("prepare"), features=source)


def _describe_training(counts: dict[str, Any]) -> list[str]:
    return [
        f"held-out tau {counts['heldout_tau']:.3f} (k={counts['chain_length']}, {counts['estimator']}, "
        f"{counts['heldout_conversations']} conversations)",
    ]


def head_plan(recipe: Recipe) -> HeadPlan:
    """The head that a recipe asks for."""
    from eyas.heads.initialise import HeadStart
    from eyas.train.start import HeadPlan

    head, init = recipe.head, recipe.init
    return HeadPlan(
        kind=head.kind,
        layer=head.layer,
        num_layers=head.num_layers,
        hidden_size=head.hidden_size,
        intermediate_size=head.intermediate_size,
        num_attention_heads=head.num_attention_heads,
        num_key_value_heads=head.num_key_value_heads,
        head_dim=head.head_dim,
        attention_bias=head.attention_bias,
        sliding_window=head.sliding_window,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
        fc_bias=head.fc_bias,
        draft_vocab_size=head.draft_vocab_size,
        draft_coverage=head.draft_coverage,
        vocabulary=head.vocabulary,
        start=HeadStart(
            lm_head=init.lm_head,
            train_lm_head=init.train_lm_head is not False,
            final_norm=init.final_norm,
            layer=init.layer,
        ),
        init_head=None if init.head is None else init_directory(recipe),
    )


def head_sizes(run: Run) -> tuple[HeadSize, HeadSize]:
    """Parameters of the head that are trained, at least and at most.

    They differ when the draft vocabulary is chosen by coverage: its size is known once the answers are counted.
    """
    from math import prod

    from eyas.heads.config import load_target_config
    from eyas.heads.formats.files import expected_shapes
    from eyas.heads.formats.read import read_files
    from eyas.train.start import planned_config

    recipe, plan = run.recipe, head_plan(run.recipe)
    target = load_target_config(run.target_dir, trust_remote_code=recipe.target.trust_remote_code)
    if plan.init_head is not None:
        config = read_files(plan.init_head).config.for_target(target)
    else:
        size = plan.draft_vocab_size if isinstance(plan.draft_vocab_size, int) else target.vocab_size
        layers = _head_layers(run, num_target_layers=target.num_hidden_layers)
        config = planned_config(plan, target=target, capture_layers=layers, draft_vocab_size=size)
    sizes = {name: prod(shape) for name, shape in expected_shapes(config).items()}
    readout = sizes.pop("lm_head.weight", 0)
    # Every slot pays for its feature, key and value; queries, output projection and MLP are for trained rows.
    slots = sum(size for name, size in sizes.items() if name.startswith("fc") or "k_proj" in name or "v_proj" in name)
    without_readout = HeadSize(slots=slots, rows=sum(sizes.values()) - slots, readout=0)
    if not plan.start.train_lm_head:
        return without_readout, without_readout
    most = replace(without_readout, readout=readout)
    open_size = plan.init_head is None and plan.draft_vocab_size == "auto" and plan.kind == "eagle3"
    return (without_readout if open_size else most), most


def require_head_possible(run: Run) -> None:
    """Fail before hours of extraction when the head of a recipe cannot be made for its target."""
    from eyas.heads.config import load_target_config
    from eyas.train.start import require_possible

    recipe = run.recipe
    trusted = recipe.target.trust_remote_code
    target = load_target_config(run.target_dir, trust_remote_code=trusted)
    require_possible(
        head_plan(recipe),
        target_dir=run.target_dir,
        capture_layers=_head_layers(run, num_target_layers=target.num_hidden_layers),
        trust_remote_code=trusted,
        layout=recipe.export.format,
    )


def loss_terms(train: Train) -> Losses:
    """The part of the training section that says what a row's loss is made of."""
    from eyas.train.losses import TokenLoss
    from eyas.train.objective import Losses

    weights = train.losses
    return Losses(
        token=TokenLoss(
            forward_kl=weights.forward_kl,
            reverse_kl=weights.reverse_kl,
            jensen_shannon=weights.jensen_shannon,
            total_variation=weights.total_variation,
            log_acceptance=weights.log_acceptance,
            cross_entropy=weights.cross_entropy,
            top_k=weights.top_k,
            top_k_tokens=weights.top_k_tokens,
        ),
        feature_weight=weights.feature,
        detach=train.detach_feedback,
    )


def loop_settings(train: Train, *, seed: int) -> LoopSettings:
    """The part of the training section that the step loop takes."""
    from eyas.train.noise import FeatureNoise
    from eyas.train.settings import LoopSettings

    return LoopSettings(
        epochs=train.epochs,
        batch_tokens=train.batch_tokens,
        pack_tokens=train.pack_tokens,
        ttt_steps=train.ttt_steps,
        ttt_warmup_share=train.ttt_warmup_share,
        step_decay=train.step_decay,
        learning_rate=train.learning_rate,
        warmup_share=train.warmup_share,
        schedule=train.schedule,
        decay_share=train.decay_share,
        final_share=train.final_share,
        noise=FeatureNoise(kind=train.feature_noise, width=train.feature_noise_width),
        ema_decay=train.ema_decay,
        evaluate_every=train.evaluate_every,
        evaluate_conversations=train.evaluate_conversations,
        stop_after_evaluations=train.stop_after_evaluations,
        max_skipped_steps=train.max_skipped_steps,
        checkpoint_every=train.checkpoint_every,
        keep_checkpoints=train.keep_checkpoints,
        log_every=train.log_every,
        chain_length=train.chain_length,
        seed=seed,
    )


def optimization(train: Train) -> Optimization:
    """The part of the training section that the optimiser takes."""
    from eyas.train.ready import Optimization

    return Optimization(
        kind=train.optimizer,
        learning_rate=train.learning_rate,
        muon_learning_rate=train.muon_learning_rate or train.learning_rate,
        betas=train.betas,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        max_grad_value=train.max_grad_value,
    )
