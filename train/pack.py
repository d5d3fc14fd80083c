"""Packs: several documents end to end as the objective reads them, made on the CPU.

A document of n tokens gives n - 1 slots, since slot t reads the embedding of token t + 1. Attention stays inside a
document and positions start again with each; there is no padding. Slots and teacher rows of a pack stay on the CPU,
where the steps are planned from them, so that nothing waits for the device.

Shapes: T slots of a pack, X width of the target's features, H hidden, V the target's vocabulary, P teacher rows, S_i slots
trained at step i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.heads.head import FeatureSource, look_up
from eyas.heads.slots import serving_slots, teacher_positions
from eyas.train.features.documents import Document, states_of
from eyas.train.features.teacher import HiddenTeacher, Teacher, TopKTeacher, concatenate

Perturb = Callable[[Tensor, int], Tensor]
"""Noise on the states [T, X] of a document, given its place in the pack."""


@dataclass(frozen=True)
class TrainingPack:
    """Documents end to end, cut to what training reads.

    Attributes:
        next_ids_T: token t+1 of each slot.
        embedding_TH: the target's embedding of those tokens; None when the head has its own.
        states_TX: the target's states that the head reads.
        lengths: slots of each document, adding up to T.
        slots: per TTT step the slots that the server drafts from, ascending, on the CPU; each contains the next.
        teacher: the distributions that the head is judged by.
        targets: per TTT step the teacher's rows that judge those slots, ascending, on the CPU.
        num_tokens: tokens of the documents.
    """

    next_ids_T: Tensor
    embedding_TH: Tensor | None
    states_TX: Tensor
    lengths: tuple[int, ...]
    slots: list[Tensor]
    teacher: Teacher
    targets: list[Tensor]
    num_tokens: int

    def to(self, device: torch.device, *, non_blocking: bool = False) -> TrainingPack:
        """The same pack with its tokens, embeddings, states and teacher on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> TrainingPack:
        """The same pack in page-locked memory, from which copies to a GPU run beside its work."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> TrainingPack:
        if isinstance(self.teacher, HiddenTeacher):
            teacher: Teacher = HiddenTeacher(move(self.teacher.hidden_PH))
        else:
            parts = (self.teacher.ids_PK, self.teacher.log_probs_PK, self.teacher.tail_P)
            teacher = TopKTeacher(*(move(part) for part in parts))
        return replace(
            self,
            next_ids_T=move(self.next_ids_T),
            embedding_TH=None if self.embedding_TH is None else move(self.embedding_TH),
            states_TX=move(self.states_TX),
            teacher=teacher,
        )


def training_pack(
    documents: Sequence[Document],
    *,
    source: FeatureSource,
    num_steps: int,
    embedding_VH: Tensor | None,
    perturb: Perturb | None = None,
) -> TrainingPack:
    """Documents end to end, cut to what `num_steps` steps of training a head that reads `source` need.

    Args:
        embedding_VH: the target's embedding, of which the pack takes the rows it reads; None when the head has its own.
        perturb: changes the states of a document.

    Raises:
        ValueError: the documents do not hold the states that the head reads.
    """
    assert documents, "a pack has documents"
    states: list[Tensor] = []
    slots: list[list[Tensor]] = [[] for _ in range(num_steps)]
    targets: list[list[Tensor]] = [[] for _ in range(num_steps)]
    first_slot = first_row = 0
    for place, document in enumerate(documents):
        whole_TX = states_of(document, source=source)
        # The state of the last token is read by nothing: no token follows it.
        states.append((whole_TX if perturb is None else perturb(whole_TX, place))[:-1])
        positions_P = teacher_positions(document.answer_mask_T)
        assert len(document.teacher) == positions_P.shape[0], "the teacher has a row per teacher position"
        for step, slots_S in enumerate(serving_slots(document.answer_mask_T, num_steps=num_steps)):
            slots[step].append(slots_S + first_slot)
            # The output at slot t, step i predicts the distribution that the target gives at position t+1+i.
            targets[step].append(torch.searchsorted(positions_P, slots_S + 1 + step) + first_row)
        first_slot += document.token_ids_T.shape[0] - 1
        first_row += positions_P.shape[0]
    next_ids_T = torch.cat([document.token_ids_T[1:] for document in documents])
    return TrainingPack(
        next_ids_T=next_ids_T,
        embedding_TH=None if embedding_VH is None else look_up(embedding_VH, next_ids_T),
        states_TX=torch.cat(states),
        lengths=tuple(document.token_ids_T.shape[0] - 1 for document in documents),
        slots=[torch.cat(step) for step in slots],
        teacher=concatenate([document.teacher for document in documents]),
        targets=[torch.cat(step) for step in targets],
        num_tokens=sum(document.token_ids_T.shape[0] for document in documents),
    )
