"""Extraction and training with a random target: its states go to disk as in a run, and a head is trained on them.

The target has a preset's shapes and is made on the device; on disk are its configuration and the three pieces that
training reads. So nothing of its size is written, and everything after loading is the code of a run.
"""

from __future__ import annotations

import gc
import random
import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.heads.config import HeadConfig
from eyas.heads.files import write_json
from eyas.heads.initialise import HeadStart
from eyas.recipes.hardware import nominal_flops
from eyas.train.data.tokens import SPLITS, Tokens, TokenWriter
from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import length_batches, padded
from eyas.train.inputs import Offline, TrainedInputs
from eyas.train.losses import TokenLoss
from eyas.train.noise import FeatureNoise
from eyas.train.objective import Losses
from eyas.train.ready import Optimization, Precision
from eyas.train.run import run_training
from eyas.train.settings import LoopSettings
from eyas.train.start import HeadPlan
from eyas.train.tracking import METRICS_NAME, TrackingSettings, read_metrics
from tests.benchmarks.loaded_target import bare_seconds, extract_seconds
from tests.benchmarks.train_cells import Cell, answer_mask, document_lengths
from tests.gpu.states import states_error

FORM = StoreForm(storage="bfloat16", teacher="hidden", teacher_k=0, last_everywhere=False)
HELDOUT_EVERY = 8


@dataclass(frozen=True)
class Extracted:
    """Seconds of the bare forward passes and of the extraction, on the same tokens; sizes in bytes.

    Attributes:
        flops: of the decoder's weights on all tokens, two per weight and token.
        states_error: of what is stored, beside the target's states of single documents (tests/gpu/states.py).
    """

    tokens: int
    bare_seconds: float
    seconds: float
    store_bytes: int
    memory_bytes: int
    flops: float
    states_error: float


@dataclass(frozen=True)
class Trained:
    """A training of some epochs; rates and losses from its metrics file, the first half of the steps left out of rates.

    Attributes:
        first_loss, last_loss: means over the first and the last epoch.
        share: of the rate that `share_of` is of: the maker's (mfu), or a measured one (gemm_share).
    """

    steps: int
    first_loss: float
    last_loss: float
    tokens_per_second: float
    share: float
    share_of: str
    memory_bytes: int
    heldout_tau: float


def random_target(directory: Path, config: HeadConfig, *, num_layers: int, device: torch.device) -> Any:
    """A random Llama in bfloat16 for the heads of `config`; its configuration and pieces go into `directory`."""
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(llama, dtype=torch.bfloat16).eval()
    llama.save_pretrained(directory)
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    weights = {name: model.get_parameter(name).detach().cpu().contiguous() for name in names}
    save_file(weights, directory / "model.safetensors")
    return model


def write_tokens(directory: Path, cell: Cell) -> None:
    """The documents of a cell as the prepare stage leaves them, one in eight held out."""
    directory.mkdir()
    writer = TokenWriter(directory)
    rng = random.Random(cell.seed)
    lengths = document_lengths(cell.tokens, mean=cell.document_tokens, rng=rng)
    for index, length in enumerate(lengths):
        split = SPLITS[index % HELDOUT_EVERY == HELDOUT_EVERY - 1]
        ids = rng.choices(range(cell.config.vocab_size), k=length)
        mask = answer_mask(length, share=cell.answer_share, rng=rng)
        writer.add(split, name=str(index), token_ids=ids, answer_mask=mask)
    writer.finish()
    write_json(directory / "stop_tokens.json", [0])


def extract(
    work: Path, cell: Cell, *, num_layers: int, batch_tokens: int, repeats: int, device: torch.device
) -> Extracted:
    """Make the target and the tokens in `work`, and run the target over them bare and as the extract stage, in turns.

    Seconds are medians of `repeats` turns; one more warms up.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = random_target(work, cell.config, num_layers=num_layers, device=device)
    write_tokens(work / "tokens", cell)
    splits = [Tokens(work / "tokens", split=split) for split in SPLITS]
    tokens = sum(int(split.lengths.sum()) for split in splits)
    batches = [
        padded([split[index][0] for index in batch])
        for split in splits
        for batch in length_batches(split.lengths.tolist(), batch_tokens=batch_tokens)
    ]
    store, bare, seconds = work / "features", [], []
    for _ in range(1 + repeats):
        bare.append(bare_seconds(model, batches, device=device))
        shutil.rmtree(store, ignore_errors=True)
        seconds.append(_extract(store, cell, model, batch_tokens=batch_tokens))
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    weights = sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
    return Extracted(
        tokens=tokens,
        bare_seconds=statistics.median(bare[1:]),
        seconds=statistics.median(seconds[1:]),
        store_bytes=sum(path.stat().st_size for path in store.glob("*.safetensors")),
        memory_bytes=memory,
        flops=2.0 * weights * tokens,
        states_error=states_error(store, model, config=cell.config, device=device),
    )


def _extract(store: Path, cell: Cell, model: Any, *, batch_tokens: int) -> float:
    return extract_seconds(
        store,
        model=model,
        tokens_dir=store.parent / "tokens",
        target_dir=store.parent,
        capture_layers=cell.config.capture_layers,
        dtype="bfloat16",
        form=FORM,
        batch_tokens=batch_tokens,
    )


def train(work: Path, cell: Cell, *, batch_tokens: int, epochs: int, precision: Precision) -> Trained:
    """Train a head on what `extract` left in `work`, with the code of a run: loop, evaluation, checkpoint, final figures."""
    out_dir = work / "train"
    out_dir.mkdir()
    if torch.cuda.is_available():  # the peak is to be that of training, not that of the target before it
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    counts = run_training(
        out_dir,
        inputs=TrainedInputs(
            target_dir=work, tokens_dir=work / "tokens", features=Offline(features_dir=work / "features")
        ),
        plan=_plan(cell.config),
        losses=Losses(token=TokenLoss()),
        loop=replace(LOOP, batch_tokens=batch_tokens, epochs=epochs, ttt_steps=cell.ttt_steps),
        optimization=OPTIMIZATION,
        precision=precision,
        threads=None,
        tracking=TrackingSettings(name="gpu-check", config={}),
        settings={},
        facts={},
        nominal_flops=nominal_flops,
        trust_remote_code=False,
        say=lambda _line: None,
    )
    rows = [row for row in read_metrics(out_dir / METRICS_NAME) if "loss" in row]
    return _trained(rows, epochs=epochs, counts=counts)


def _trained(rows: list[dict[str, Any]], *, epochs: int, counts: dict[str, Any]) -> Trained:
    warm = rows[len(rows) // 2 :]
    (share_of,) = {"mfu", "gemm_share"} & warm[0].keys()
    return Trained(
        steps=counts["steps"],
        first_loss=statistics.mean(row["loss"] for row in rows if row["epoch"] <= 1),
        last_loss=statistics.mean(row["loss"] for row in rows if row["epoch"] > epochs - 1),
        tokens_per_second=statistics.mean(row["tokens_per_second"] for row in warm),
        share=statistics.mean(row[share_of] for row in warm),
        share_of=share_of,
        memory_bytes=int(rows[-1]["memory_bytes"]),
        heldout_tau=counts["heldout_tau"],
    )


LEARNING_RATE = 1e-4
LOOP = LoopSettings(
    epochs=1,
    batch_tokens=1,
    pack_tokens=None,
    ttt_steps=3,
    ttt_warmup_share=0.0,
    step_decay=0.8,
    learning_rate=LEARNING_RATE,
    warmup_share=0.1,
    schedule="constant",
    decay_share=0.2,
    final_share=0.05,
    noise=FeatureNoise(kind="none", width=0.2),
    ema_decay=None,
    evaluate_every=1_000_000,
    evaluate_conversations=4,
    stop_after_evaluations=None,
    max_skipped_steps=0,
    checkpoint_every=1_000_000,
    keep_checkpoints=1,
    log_every=1,
    chain_length=3,
    seed=0,
)
"""Epochs, tokens of a step and TTT steps are those of the check."""
OPTIMIZATION = Optimization(
    kind="adamw",
    learning_rate=LEARNING_RATE,
    muon_learning_rate=LEARNING_RATE,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    max_grad_norm=1.0,
    max_grad_value=None,
)


def _plan(config: HeadConfig) -> HeadPlan:
    """An EAGLE-3 head of the target's sizes. Its layer starts at random: the target's layers are not on disk."""
    return HeadPlan(
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
        draft_vocab_size=config.draft_vocab_size,
        draft_coverage=0.97,
        vocabulary="data",
        start=HeadStart(layer="random"),
        init_head=None,
    )
