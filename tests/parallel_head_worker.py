"""A real head for parallel_worker.py, which looks closer with a small model."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.heads.formats.write import write_head
from eyas.heads.slots import teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher
from eyas.train.losses import TokenLoss
from eyas.train.objective import HeadObjective, Losses
from eyas.train.pack import TrainingPack, training_pack
from eyas.train.parallel import Processes, training_engine
from tests import tiny

VOCAB, HIDDEN, STEPS = 100, 32, 6


def make_pack(seed: int, *, embedding_VH: torch.Tensor) -> TrainingPack:
    """Two documents with an answer each."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in (18, 23):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[6 : length - 2] = True
        last_TH = torch.randn(length, HIDDEN, generator=generator)
        token_ids = torch.randint(0, VOCAB, (length,), generator=generator)
        captured = torch.randn(length, 3 * HIDDEN, generator=generator)
        documents.append(Document(token_ids, mask, captured, last_TH, HiddenTeacher(last_TH[teacher_positions(mask)])))
    return training_pack(documents, source="captured", num_steps=3, embedding_VH=embedding_VH)


def head_curve(processes: Processes, *, max_grad_norm: float, export: Path) -> list[float]:
    """Loss and gradient norm of a few steps of four packs, with a frozen readout; the head is exported at the end."""
    generator = torch.Generator().manual_seed(5)
    embedding_VH, readout_VH = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    head = tiny.random_head(tiny.head_config(num_layers=2))
    head.lm_head.weight.requires_grad_(False)  # type: ignore[union-attr]
    objective = HeadObjective(
        head,
        target_readout_DH=readout_VH[head.draft_to_target_D],
        losses=Losses(token=TokenLoss()),
        autocast=None,  # in bfloat16 the order of a sum decides how a weight is rounded
    )
    trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, fused=True)
    engine = training_engine(processes, objective, optimizer, max_grad_norm=max_grad_norm, max_grad_value=None)
    curve = []
    for step in range(STEPS):
        num_steps = 1 + step % 3
        places = range(engine.rank, 4, engine.world_size)
        total = torch.zeros(1)
        for place in places:
            pack = make_pack(10 * step + place, embedding_VH=embedding_VH)
            with engine.accumulate(last=place == places[-1]):
                loss, _sums = engine.model(pack, [0.01 * engine.world_size] * num_steps)
                engine.backward(loss, last=place == places[-1])
            total += loss.detach().float() / engine.world_size
        curve += [float(engine.sum(total)), engine.clip()]
        engine.step()
    with engine.whole_head() as trained:
        if engine.is_main:
            write_head(export, trained, dtype=torch.float32, to="vllm")
    return curve
