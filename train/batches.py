"""Cut a document to what training needs: which of its slots count, and which rows of the teacher judge them."""

from __future__ import annotations

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
