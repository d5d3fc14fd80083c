"""Our arm of the training benchmark: the code of a run, from documents to a step of the optimiser.

A step is what the training loop does for a batch of one pack: the pack is put together (in the background on CUDA, as in
a run), the objective is run forward and backward, its sums are read for the metrics, the gradient is clipped, and fused
AdamW takes its step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.heads.build import build_head
from eyas.heads.config import HeadConfig
from eyas.heads.head import DraftHead
from eyas.train.features.documents import Document
from eyas.train.losses import TokenLoss
from eyas.train.objective import HeadObjective, Losses, step_weights
from eyas.train.optim import make_optimizer
from eyas.train.pack import TrainingPack, training_pack
from eyas.train.prefetch import Prefetcher
from tests.benchmarks.train_cells import Cell, chat_documents, random_weights

STEP_DECAY = 0.8
PACKS_AHEAD = 2


def random_head(config: HeadConfig, *, train_readout: bool, seed: int) -> DraftHead:
    """A head with random matrices, in float32."""
    torch.manual_seed(seed)
    head = build_head(config, draft_to_target_D=torch.arange(config.draft_vocab_size)).float()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02)
    head.get_parameter("lm_head.weight").requires_grad_(train_readout)
    return head.train()


class OurStep:
    """A step of training on a cell's pack, again and again; calling it returns the loss."""

    def __init__(self, cell: Cell, *, device: torch.device, documents: list[Document] | None = None) -> None:
        config = cell.config
        self.documents = chat_documents(cell) if documents is None else documents
        self.cell, self.device = cell, device
        dtype = torch.bfloat16 if cell.precision == "bf16" else torch.float32
        self.embedding_VH = random_weights((config.vocab_size, config.hidden_size), seed=1, dtype=torch.bfloat16)
        readout_DH = random_weights((config.draft_vocab_size, config.hidden_size), seed=2, dtype=dtype, std=0.1)
        self.head = random_head(config, train_readout=cell.train_readout, seed=cell.seed)
        self.objective = objective(self.head, readout_DH=readout_DH, precision=cell.precision).to(device)
        self.parameters = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(
            self.head, kind="adamw", learning_rate=1e-4, betas=(0.9, 0.95), weight_decay=0.0, muon_learning_rate=1e-4
        )
        self.rows_K = [slots_S.shape[0] for slots_S in self.pack().slots]
        shares = step_weights(cell.ttt_steps, decay=STEP_DECAY)
        self.weights = [share / max(rows, 1) for share, rows in zip(shares, self.rows_K, strict=True)]
        self._packs = self._in_order()

    def __call__(self) -> float:
        pack = next(self._packs)
        loss = self.backward(pack)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, pack: TrainingPack) -> float:
        """Forward, backward and the reading of the sums that metrics are made of; the loss."""
        loss, sums = self.objective(pack, self.weights)
        loss.backward()
        _ = {name: values_K.tolist() for name, values_K in sums.items()}
        return float(loss.detach())

    def pack(self) -> TrainingPack:
        """The cell's pack, on the CPU."""
        return training_pack(
            self.documents, source="captured", num_steps=self.cell.ttt_steps, embedding_VH=self.embedding_VH
        )

    def _in_order(self) -> Iterator[TrainingPack]:
        if self.device.type != "cuda":  # where a thread that works ahead would take its cores from the step
            while True:
                yield self.pack()
        for pack in Prefetcher(lambda _: self.pack().pin(), range(1_000_000), depth=PACKS_AHEAD):
            yield pack.to(self.device, non_blocking=True)


def objective(head: DraftHead, *, readout_DH: Tensor, precision: str) -> HeadObjective:
    """Head and forward KL, in the precision of a cell."""
    return HeadObjective(
        head,
        target_readout_DH=readout_DH,
        losses=Losses(token=TokenLoss()),
        autocast=torch.bfloat16 if precision == "bf16" else None,
    )
