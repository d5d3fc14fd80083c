"""A whole tiny training run for tests: tokens, features, and the train stage's settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.heads.initialise import HeadStart
from eyas.train.data.prepare import prepare
from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import extract
from eyas.train.inputs import Offline, Online, TrainedInputs
from eyas.train.losses import TokenLoss
from eyas.train.noise import FeatureNoise
from eyas.train.objective import Losses
from eyas.train.ready import Optimization
from eyas.train.run import run_training
from eyas.train.settings import LoopSettings
from eyas.train.start import HeadPlan
from eyas.train.tracking import METRICS_NAME, TrackingSettings, read_metrics
from tests import tiny

LOOP = LoopSettings(
    epochs=3,
    batch_tokens=120,
    pack_tokens=None,
    ttt_steps=3,
    ttt_warmup_share=0.3,
    step_decay=0.8,
    learning_rate=3e-3,
    warmup_share=0.1,
    schedule="cosine",
    decay_share=0.2,
    final_share=0.05,
    noise=FeatureNoise(kind="none", width=0.2),
    ema_decay=None,
    evaluate_every=5,
    evaluate_conversations=4,
    stop_after_evaluations=None,
    max_skipped_steps=3,
    checkpoint_every=4,
    keep_checkpoints=2,
    log_every=1,
    chain_length=3,
    seed=0,
)

OPTIMIZATION = Optimization(
    kind="adamw",
    learning_rate=LOOP.learning_rate,
    muon_learning_rate=LOOP.learning_rate,
    betas=(0.9, 0.95),
    weight_decay=0.01,
    max_grad_norm=1.0,
    max_grad_value=None,
)

FORM = StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=True)
"""What heads of both kinds can be trained on, with nothing rounded."""


def make_inputs(
    directory: Path,
    *,
    target: Path,
    capture_layers: tuple[int, ...] = tiny.CAPTURE_LAYERS,
    form: StoreForm = FORM,
) -> tuple[Path, Path]:
    """Tokens and features of a small conversation file: (tokens_dir, features_dir)."""
    tokens, features = directory / "prepare", directory / "features"
    tokens.mkdir(parents=True)
    prepare(
        tokens,
        target_dir=target,
        conversations=tiny.write_conversation_file(directory / "c.jsonl"),
        max_length=64,
        too_long="cut",
        max_train_tokens=None,
        on_bad_line="stop",
        trust_remote_code=False,
        template_options={},
        seed=0,
    )
    extract(
        features,
        tokens_dir=tokens,
        target_dir=target,
        capture_layers=capture_layers,
        dtype="float32",
        form=form,
        batch_tokens=512,
        threads=None,
        device_map=None,
        trust_remote_code=False,
        generated_states=None,
    )
    return tokens, features


def train(
    out_dir: Path,
    *,
    target: Path,
    tokens: Path,
    features: Path | Offline | Online,
    loop: LoopSettings = LOOP,
    **changes: Any,
) -> dict[str, Any]:
    """Run the train stage in this process in float32."""
    source = Offline(features_dir=features) if isinstance(features, Path) else features
    arguments: dict[str, Any] = {
        "plan": plan(),
        "losses": Losses(token=TokenLoss()),
        "optimization": OPTIMIZATION,
        "precision": "fp32",
        "threads": None,
        "tracking": TrackingSettings(name="test", config={}),
        "settings": {},
        "facts": {},
        "trust_remote_code": False,
        "nominal_flops": lambda _name: None,
        "say": lambda _line: None,
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    return run_training(
        out_dir,
        inputs=TrainedInputs(target_dir=target, tokens_dir=tokens, features=source),
        loop=loop,
        **(arguments | changes),
    )


def plan(**changes: Any) -> HeadPlan:
    """An EAGLE-3 head with a draft vocabulary of 128 tokens and the target's sizes, with some fields changed."""
    standard = HeadPlan(
        kind="eagle3",
        layer="llama",
        num_layers=1,
        hidden_size=None,
        intermediate_size=None,
        num_attention_heads=None,
        num_key_value_heads=None,
        head_dim=None,
        attention_bias=False,
        sliding_window=None,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        fc_bias=False,
        draft_vocab_size=128,
        draft_coverage=0.97,
        vocabulary="data",
        start=HeadStart(),
        init_head=None,
    )
    return replace(standard, **changes)


def metrics(out_dir: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics file."""
    return read_metrics(out_dir / METRICS_NAME)


def shorter(loop: LoopSettings, **changes: Any) -> LoopSettings:
    """`loop` with some settings changed."""
    return replace(loop, **changes)
