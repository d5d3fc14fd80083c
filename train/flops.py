"""Floating-point operations of a pack, for throughput as a share of what the machine can do.

Shapes: S slots trained at a step, B documents, K steps.
"""

from __future__ import annotations

import torch

from eyas.heads.config import HeadConfig
from eyas.heads.flops import training_flops
from eyas.train.features.teacher import HiddenTeacher
from eyas.train.pack import TrainingPack


def pack_flops(pack: TrainingPack, num_steps: int, *, config: HeadConfig, train_readout: bool) -> float:
    """Operations that the forward and backward pass of `num_steps` steps over a pack need."""
    slots = pack.slots[:num_steps]
    return training_flops(
        config,
        num_slots=sum(pack.lengths),
        rows_K=[slots_S.shape[0] for slots_S in slots],
        attended_K=attended_keys(pack, num_steps, window=config.window),
        num_teacher_rows=len(pack.teacher) if isinstance(pack.teacher, HiddenTeacher) else 0,
        train_readout=train_readout,
    )


def attended_keys(pack: TrainingPack, num_steps: int, *, window: int | None) -> list[int]:
    """Pairs of query and key of each step: a slot attends to its document up to itself, and to its own earlier steps."""
    ends_B = torch.tensor(pack.lengths).cumsum(0)
    starts_B = ends_B - torch.tensor(pack.lengths)
    pairs: list[int] = []
    for step, slots_S in enumerate(pack.slots[:num_steps]):
        slots_S = slots_S.cpu()
        document_S = torch.searchsorted(ends_B, slots_S, right=True)
        keys_S = slots_S - starts_B[document_S] + 1 + step
        pairs.append(int((keys_S if window is None else keys_S.clamp_max(window)).sum()))
    return pairs
