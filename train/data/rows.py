"""How many rows training has of each document at each TTT step, from answer masks alone.

Step i of slot t counts iff tokens t+1, ..., t+2+i all belong to one answer (heads/slots.py). An answer of tokens a..b-1
therefore has b - max(a, 1) - 1 - i of them, if that is above 0: the first token of a document follows none.

Shapes: N tokens of some documents that lie end to end, n documents, K TTT steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def trained_rows(answer_mask_N: Tensor, *, offsets: Tensor, num_steps: int) -> Tensor:
    """Trained rows of each document and TTT step, int64 [n, K]: the lengths of `serving_slots`.

    Args:
        answer_mask_N: true where the target wrote the token.
        offsets: where each document begins, and where the last one ends: [n + 1].
    """
    bounds = offsets.numpy()
    rows = np.zeros((len(bounds) - 1, num_steps), dtype=np.int64)
    # Without the first token of each document, answers of neighbours do not touch.
    inside = np.zeros(answer_mask_N.shape[0] + 2, dtype=bool)
    inside[1:-1] = answer_mask_N.bool().numpy()
    inside[1 + bounds[:-1][np.diff(bounds) > 0]] = False
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    begins, ends = edges[::2], edges[1::2]
    documents = np.searchsorted(bounds, begins, side="right") - 1
    for step in range(num_steps):
        counts = np.maximum(ends - begins - 1 - step, 0)
        rows[:, step] = np.bincount(documents, weights=counts, minlength=len(rows))
    return torch.from_numpy(rows)
