"""From documents to training batches: which documents go together, in which order, and which of their slots count.

The order is a pure function of (seed, epoch), so a run resumes at a batch number without replaying anything. Each
process takes every world-size-th batch, and the last incomplete round is dropped, so that all processes take the same
number of steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.heads.head import FeatureSource
from eyas.heads.slots import serving_slots, teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.documents import states_of as states_of
from eyas.train.features.teacher import Teacher


@dataclass(frozen=True)
class TrainingDocument:
    """A document as the objective reads it: drafting tokens, features, and the slots of each step.

    Tokens run over slots 0..T-1 plus one, since slot t reads the embedding of token t+1. `states_TX` are the target's
    states that the head reads, `teacher` the distributions that it is judged by. `slots[i]` are the slots that the server
    drafts from at step i, and `targets[i]` the rows of the teacher that judge them.
    """

    next_ids_T: Tensor
    states_TX: Tensor
    slots: list[Tensor]
    teacher: Teacher
    targets: list[Tensor]

    @property
    def num_tokens(self) -> int:
        """Tokens of the document."""
        return self.next_ids_T.shape[0] + 1


def training_document(
    document: Document, *, source: FeatureSource, num_steps: int, device: torch.device
) -> TrainingDocument:
    """Cut a stored document to what `num_steps` steps of training a head that reads `source` need, on `device`."""
    slots = serving_slots(document.answer_mask_T, num_steps=num_steps)
    positions_P = teacher_positions(document.answer_mask_T)
    assert len(document.teacher) == positions_P.shape[0], "the teacher has a row per teacher position"
    # The output at slot t, step i predicts the distribution that the target gives at position t+1+i.
    targets = [torch.searchsorted(positions_P, slots_S + 1 + step) for step, slots_S in enumerate(slots)]
    # The state of the last token is read by nothing: no token follows it.
    return TrainingDocument(
        next_ids_T=document.token_ids_T[1:].to(device),
        states_TX=states_of(document, source=source)[:-1].to(device),
        slots=[slots_S.to(device) for slots_S in slots],
        teacher=document.teacher.to(device),
        targets=[rows_S.to(device) for rows_S in targets],
    )


def run_batches(
    lengths: Sequence[int], *, batch_tokens: int, seed: int, epochs: int, rank: int, world_size: int
) -> list[list[int]]:
    """Document indices of every batch of one process in a whole run, epoch after epoch.

    Epochs differ in their number of batches, since how documents fill them depends on their order; so a step's place
    is looked up here and never computed from the length of one epoch.
    """
    return [
        batch
        for epoch in range(epochs)
        for batch in epoch_batches(
            lengths, batch_tokens=batch_tokens, seed=seed, epoch=epoch, rank=rank, world_size=world_size
        )
    ]


def epoch_batches(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    seed: int,
    epoch: int,
    rank: int,
    world_size: int,
) -> list[list[int]]:
    """Document indices of each batch of one process in one epoch.

    Documents are shuffled and then filled into batches in that order, up to `batch_tokens` tokens; a longer document is
    a batch of its own. There is no padding: documents are handled end to end.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    batches: list[list[int]] = []
    filled = batch_tokens + 1
    for index in order:
        if filled + lengths[index] > batch_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += lengths[index]
    rounds = len(batches) // world_size
    if rounds == 0:
        raise ValueError(
            f"{len(batches)} batches of train.batch_tokens={batch_tokens} are not enough for {world_size} processes; "
            "use fewer processes, smaller batches or more data"
        )
    return batches[rank : rounds * world_size : world_size]
