"""Which slots a head is used at: the serving mask.

Slot t holds the target's feature of token t. The server drafts there once token t+1 is known, so step i proposes token
t+2+i. It does so exactly for tokens of an answer that follow a token of the same answer. Hence step i of slot t counts
iff tokens t+1, ..., t+2+i all belong to one answer: m[t+1] * m[t+2+i] within one assistant span. The slots of step i
are therefore a subset of those of step i-1.

The usual shortcut m[t+i] or m[t+1+i] misses the last prompt token, which drafts the start of every answer, and trains
stale slots at the end that no server ever uses.
"""

from __future__ import annotations

import torch
from torch import Tensor


def serving_slots(answer_mask_T: Tensor, *, num_steps: int) -> list[Tensor]:
    """Slots of each step 0..K-1, ascending; the slots of one step are contained in those of the step before.

    Args:
        answer_mask_T: true where the target wrote the token; assistant spans are separated by other tokens.
    """
    length = answer_mask_T.shape[0]
    mask_T = answer_mask_T.bool()
    steps: list[Tensor] = []
    alive_T = torch.zeros(length, dtype=torch.bool, device=mask_T.device)
    alive_T[: length - 1] = mask_T[1:]
    for step in range(num_steps):
        reached_T = torch.zeros_like(alive_T)
        offset = 2 + step
        if offset < length:
            reached_T[: length - offset] = mask_T[offset:]
        alive_T = alive_T & reached_T
        steps.append(alive_T.nonzero().squeeze(1))
    return steps


def teacher_positions(answer_mask_T: Tensor) -> Tensor:
    """Positions p whose next-token distribution of the target some step of training is judged by, ascending.

    Step i of slot t is judged by the distribution at p = t+1+i. Those are the positions 1 <= p where tokens p and p+1
    belong to one answer, however many steps there are: step 0 reaches all of them, and later steps reach no other.
    """
    return serving_slots(answer_mask_T, num_steps=1)[0] + 1


def contiguous_runs(slots_S: Tensor) -> list[Tensor]:
    """Ascending slots split where they are not consecutive: one run an answer."""
    if slots_S.numel() == 0:
        return []
    breaks = (slots_S[1:] - slots_S[:-1] != 1).nonzero().squeeze(1) + 1
    return list(torch.tensor_split(slots_S, breaks.tolist()))
