"""The peer's arm of the training benchmark: EAGLE-3 model, loss, collation and optimiser of speculators 0.9.

Everything is the library's own. On CPU its model runs with eager attention and the eager loss, since its fused loss is
written for GPUs; on CUDA with flex attention, the fused loss and `torch.compile`, its defaults. The target's final norm
is taken out of the model, because stored states have been through it.

The slots that count for us are `serving_slots`; the peer counts slot t at step i where token t+1+i is judged. Both are
given the same tokens, states and judged positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.heads.slots import teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher
from tests.benchmarks.train_cells import Cell, chat_documents, random_weights
from tests.benchmarks.train_measure import autocast

Optimizer = Literal["adamw", "muon"]
BLOCK_TOKENS = 128
"""Flex attention works on blocks of so many slots."""
MAX_GRAD_NORM = 1.0
"""Its trainer has no setting for it."""


def peer_model(
    config: HeadConfig,
    *,
    draft_to_target_D: Tensor,
    embedding_VH: Tensor,
    readout_DH: Tensor,
    device: torch.device,
    verifier: Path | None = None,
) -> Any:
    """The library's model with the target's frozen pieces, its layer as the library starts it, on `device` in float32.

    Args:
        readout_DH: the target's readout of the draft vocabulary, which is teacher and, by the library's default, the
            frozen `lm_head` of the head.
        verifier: directory of the target, which the library notes in what it saves.
    """
    from speculators.models.eagle3.core import Eagle3DraftModel

    model: Any = Eagle3DraftModel(_peer_config(config, device=device, verifier=verifier))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding_VH)
        model.lm_head.weight.copy_(readout_DH)
        model.verifier_lm_head.weight.copy_(readout_DH)
        if model.d2t is not None and model.t2d is not None:
            model.d2t.copy_(draft_to_target_D - torch.arange(draft_to_target_D.shape[0]))
            model.t2d.fill_(False)[draft_to_target_D] = True
    model.verifier_norm = torch.nn.Identity()
    return model.to(device).train()


def _peer_config(config: HeadConfig, *, device: torch.device, verifier: Path | None) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=False,
    )
    # As its trainer sets it: this name is not one that the configuration's own argument knows.
    layer._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    target = VerifierConfig(name_or_path=str(verifier or "none"), architectures=["LlamaForCausalLM"])
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        norm_output=config.norm_output,
        eagle_aux_hidden_state_layer_ids=list(config.capture_layers or ()),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=target,
        ),
    )


def peer_batch(documents: list[Document], *, hidden_size: int, max_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the library's collation makes of documents: one sequence of `max_tokens` slots, the rest padding.

    The loss mask marks the positions whose distribution is known. The library would also train on the position after an
    answer's last token, which no server drafts and which stored features do not hold.
    """
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    items = [_item(document) for document in documents]
    collate = CollateFn(max_tokens, hidden_size, dtype=dtype, preprocess=shift_batch)
    return {name: value for name, value in collate(items).items() if isinstance(value, Tensor)}


def _item(document: Document) -> dict[str, Tensor]:
    assert isinstance(document.teacher, HiddenTeacher)
    hidden_PH, length = document.teacher.hidden_PH, document.token_ids_T.shape[0]
    positions_P = teacher_positions(document.answer_mask_T)
    last_TH = hidden_PH.new_zeros((length, hidden_PH.shape[1]))
    last_TH[positions_P] = hidden_PH
    mask_T = torch.zeros(length, dtype=torch.bool)
    mask_T[positions_P] = True
    return {
        "hidden_states": document.captured_TX,
        "input_ids": document.token_ids_T,
        "verifier_last_hidden_states": last_TH,
        "loss_mask": mask_T,
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


def peer_rows(batch: dict[str, Any], *, ttt_steps: int) -> list[int]:
    """Rows that the library's loss counts at each step."""
    mask_T = batch["loss_mask"][0]
    return [int(mask_T[step:].sum()) for step in range(ttt_steps)]


def peer_optimizers(model: Any, *, kind: Optimizer, learning_rate: float) -> list[torch.optim.Optimizer]:
    """The library's optimisers with its defaults, Muon's rate being that of AdamW."""
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    settings = TrainerConfig(
        lr=learning_rate, num_epochs=1, save_path="", optimizer=kind, muon_lr=learning_rate, weight_decay=0.01
    )
    return build_optimizers(model, settings)


class PeerStep:
    """A step of its trainer on a cell's pack; calling it returns the loss."""

    def __init__(self, cell: Cell, *, device: torch.device, documents: list[Document] | None = None) -> None:
        config = cell.config
        documents = chat_documents(cell) if documents is None else documents
        shape = (config.draft_vocab_size, config.hidden_size)
        torch.manual_seed(cell.seed)
        self.model = peer_model(
            config,
            draft_to_target_D=torch.arange(config.draft_vocab_size),
            embedding_VH=random_weights((config.vocab_size, config.hidden_size), seed=1, dtype=torch.bfloat16),
            readout_DH=random_weights(shape, seed=2, dtype=torch.float32, std=0.1),
            device=device,
        )
        self.autocast = torch.bfloat16 if cell.precision == "bf16" else None
        slots = -(-cell.tokens // BLOCK_TOKENS) * BLOCK_TOKENS if device.type == "cuda" else cell.tokens
        batch = peer_batch(
            documents, hidden_size=config.hidden_size, max_tokens=slots, dtype=self.autocast or torch.float32
        )
        self.batch = {name: value.to(device) for name, value in batch.items()}
        self.rows_K = peer_rows(batch, ttt_steps=cell.ttt_steps)
        self.device, self.ttt_steps = device, cell.ttt_steps
        self.optimizers = peer_optimizers(self.model, kind="adamw", learning_rate=1e-4)

    def __call__(self) -> float:
        return peer_step(
            self.model, self.batch, optimizers=self.optimizers, ttt_steps=self.ttt_steps, autocast_to=self.autocast
        )


def peer_step(
    model: Any,
    batch: dict[str, Tensor],
    *,
    optimizers: list[torch.optim.Optimizer],
    ttt_steps: int,
    autocast_to: torch.dtype | None,
) -> float:
    """What its trainer does for a batch: forward, backward, clip, optimisers, metrics read; the loss."""
    loss, metrics = peer_loss(model, batch, ttt_steps=ttt_steps, autocast_to=autocast_to)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    for optimizer in optimizers:
        optimizer.step()
    _ = {name: value.item() for name, value in metrics.items()}
    return float(loss.detach())


def peer_loss(
    model: Any, batch: dict[str, Tensor], *, ttt_steps: int, autocast_to: torch.dtype | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Its loss with its defaults: KL divergence, every step counting the same."""
    from speculators.losses import resolve_loss_config

    device = batch["input_ids"].device
    loss_config = resolve_loss_config("kl_div", "fused" if device.type == "cuda" else "eager")
    with autocast(device, dtype=autocast_to):
        _, loss, metrics = model(**batch, ttt_steps=ttt_steps, ttt_step_loss_decay=1.0, loss_config=loss_config)
    return loss, metrics
