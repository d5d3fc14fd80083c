"""Distillation loss of a head, in chunks: no [rows, D] tensor of the whole batch ever exists.

The walk is over chunks of teacher rows. The distributions of a chunk are computed once and serve every step that points
at them. The rows of all steps that do are multiplied by the readout at once; then block by block (the rows of one step)
the logits are replaced by their gradient (losses/gradients.py), of which two more products make the gradients of hidden
states and readout. So nothing is kept for a backward pass. The buffers are the same for every chunk. A row's weight
scales its hidden state and its gradient, which are narrow, not its logits.

Which rows go where is planned on the CPU before the walk, so the device is waited for once at most.

Shapes: R rows (slot and step pairs) of all steps, P teacher rows, N teacher rows that some row points at, C rows of a
chunk, H hidden, D draft vocabulary, K steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from eyas.train.losses.gradients import logits_to_gradient
from eyas.train.losses.rows import DistillationResult, JudgedBy, StepRows
from eyas.train.losses.terms import TokenLoss, require_terms
from eyas.train.matmul import add_product, wide_dtype, wide_product

# Logits of a chunk. On a CPU the products are efficient from some hundred rows on, and the blocks of a small chunk stay
# in cache; a GPU wants as much as its memory can spare.
CPU_ROWS = 512
DEVICE_LOGITS_BYTES = 2**29


def chunked_distillation(
    steps: Sequence[StepRows],
    *,
    readout_DH: Tensor,
    judge: JudgedBy,
    terms: TokenLoss,
    chunk_positions: int | None = None,
) -> DistillationResult:
    """Weighted sum over steps and rows of the token loss, with gradients for `hidden_RH` and `readout_DH`.

    Under autocast the products are in its type, softmax and sums in float32. Without rows, or with weights of 0 only,
    the gradients are 0; a readout that needs none costs none.

    Args:
        readout_DH: the head's readout.
        chunk_positions: teacher rows of a chunk; None: by the device and the width.

    Raises:
        ValueError: a term wants what the teacher does not hold.
    """
    require_terms(terms, teacher=judge.teacher)
    device, dtype = readout_DH.device, _matmul_dtype(readout_DH)
    if chunk_positions is None:
        chunk_positions = _chunk_positions(device, num_steps=len(steps), num_draft=readout_DH.shape[0])
    needed_N, places = _needed([step.targets_R for step in steps], num_positions=len(judge.teacher))
    walk = _Walk(
        JudgedBy(
            judge.teacher.rows(needed_N.to(device)) if len(needed_N) < len(judge.teacher) else judge.teacher,
            None if judge.readout_DH is None else judge.readout_DH.to(dtype),
            judge.draft_to_target_D,
        ),
        terms=terms,
        weights=[step.weight for step in steps],
        chunks=_plan(places, chunk_positions=chunk_positions),
        chunk_positions=chunk_positions,
        places=[places_R.to(device, non_blocking=True) for places_R in places],
        dtype=dtype,
        # Inside the function below autograd is off, whether or not it is on here.
        with_gradients=torch.is_grad_enabled() and any(step.weight != 0.0 for step in steps),
    )
    with torch.autocast(device.type, enabled=False):
        return DistillationResult(*_ChunkedDistillation.apply(walk, readout_DH, *(step.hidden_RH for step in steps)))


def _chunk_positions(device: torch.device, *, num_steps: int, num_draft: int) -> int:
    rows = CPU_ROWS if device.type == "cpu" else DEVICE_LOGITS_BYTES // (4 * num_draft)
    return max(1, rows // num_steps)


def _matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The type of products, by autocast. Below it is off: it would round sums of probabilities too."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _needed(targets: Sequence[Tensor], *, num_positions: int) -> tuple[Tensor, list[Tensor]]:
    """Teacher rows [N] that some row points at (the others cost no distribution), and each row's place among them."""
    targets_R = torch.cat(list(targets)).cpu()
    used_P = torch.zeros(num_positions, dtype=torch.bool)
    used_P[targets_R] = True
    places_R = (used_P.cumsum(dim=0) - 1)[targets_R]
    return used_P.nonzero()[:, 0], list(places_R.split([len(targets_R) for targets_R in targets]))


@dataclass(frozen=True)
class _Block:
    """Rows of one step that point into one chunk, and the chunk's distributions that they point at if those are one
    stretch."""

    step: int
    rows: slice
    stretch: slice | None

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start


def _plan(places: Sequence[Tensor], *, chunk_positions: int) -> list[list[_Block]]:
    """The blocks of each chunk, of which none is empty: every teacher row that is left is needed."""
    last = max((int(places_R[-1]) for places_R in places if len(places_R)), default=-1)
    chunks: list[list[_Block]] = [[] for _ in range(0, last + 1, chunk_positions)]
    edges = torch.arange(len(chunks) + 1) * chunk_positions
    for step, places_R in enumerate(places):
        breaks_R = (places_R.diff(prepend=places_R[:1]) != 1).cumsum(dim=0)
        bounds = torch.searchsorted(places_R, edges).tolist()
        for chunk, (low, high) in enumerate(pairwise(bounds)):
            if low < high:
                first = int(places_R[low]) - chunk * chunk_positions
                whole = bool(breaks_R[low] == breaks_R[high - 1])
                chunks[chunk].append(
                    _Block(step, slice(low, high), slice(first, first + high - low) if whole else None)
                )
    return chunks


@dataclass(frozen=True)
class _Walk:
    """All that a walk over chunks needs besides the two tensors that get gradients."""

    judge: JudgedBy
    terms: TokenLoss
    weights: list[float]
    chunks: list[list[_Block]]
    chunk_positions: int
    places: list[Tensor]
    dtype: torch.dtype
    with_gradients: bool


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: _Walk, readout_DH: Tensor, *hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, need_readout, *need_hidden = ctx.needs_input_grad
        grads = [torch.zeros_like(rows_RH) if need else None for rows_RH, need in zip(hidden, need_hidden, strict=True)]
        grad_DH = torch.zeros_like(readout_DH, dtype=wide_dtype(walk.dtype)) if need_readout else None
        room = _Room([rows_RH.to(walk.dtype) for rows_RH in hidden], readout_DH.to(walk.dtype), walk=walk)
        for number, blocks in enumerate(walk.chunks):
            room.read_chunk(number, blocks)
            if walk.with_gradients:
                room.add_gradients(blocks, grads=grads, grad_DH=grad_DH)
        loss, kl_K, hits_K, acceptance_K = room.totals()
        ctx.mark_non_differentiable(kl_K, hits_K, acceptance_K)
        ctx.gradients = [None if grad_DH is None else grad_DH.to(readout_DH.dtype), *grads]
        return loss, kl_K, hits_K, acceptance_K

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # They are as large as their tensors, so they are scaled in place and given away: one backward pass only.
        assert ctx.gradients is not None, "a distillation loss has one backward pass"
        gradients, ctx.gradients = ctx.gradients, None
        return None, *(None if grad is None else grad.mul_(grad_outputs[0]) for grad in gradients)


class _Room:
    """Buffers that every chunk is worked in, and the sums so far."""

    def __init__(self, hidden: Sequence[Tensor], readout_DH: Tensor, *, walk: _Walk) -> None:
        self.hidden, self.readout_DH, self.walk = hidden, readout_DH, walk
        num_rows = max((sum(block.num_rows for block in blocks) for blocks in walk.chunks), default=0)
        most = max((block.num_rows for blocks in walk.chunks for block in blocks), default=0)
        num_draft, wide = readout_DH.shape[0], wide_dtype(readout_DH.dtype)
        self.logits_CD = readout_DH.new_empty((num_rows, num_draft), dtype=wide)
        self.spare_CD = readout_DH.new_empty((most, num_draft), dtype=wide)
        self.mixed_CD = torch.empty_like(self.spare_CD) if walk.terms.needs_log_p else None
        self.sums_4K = readout_DH.new_zeros((4, len(walk.weights)), dtype=wide)

    def totals(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The weighted loss, and per step KL, hits and acceptance."""
        loss_K, kl_K, hits_K, acceptance_K = self.sums_4K.unbind()
        weights_K = torch.tensor(self.walk.weights, dtype=loss_K.dtype)
        loss = (loss_K * weights_K.to(loss_K.device, non_blocking=True)).sum()
        return loss, kl_K.clone(), hits_K.long(), acceptance_K.clone()

    def read_chunk(self, number: int, blocks: Sequence[_Block]) -> None:
        """Leave the gradients of a chunk's logits, for rows of weight 1, in `logits_CD`, and add to the sums."""
        begin = number * self.walk.chunk_positions
        target = self.walk.judge.distributions(slice(begin, begin + self.walk.chunk_positions), terms=self.walk.terms)
        self.rows_CH = torch.cat([self.hidden[block.step][block.rows] for block in blocks])
        wide_product(self.rows_CH, self.readout_DH.T, out_MN=self.logits_CD[: len(self.rows_CH)])
        for block, place in zip(blocks, _places(blocks), strict=True):
            picked = self.walk.places[block.step][block.rows] - begin if block.stretch is None else block.stretch
            sums = logits_to_gradient(
                self.logits_CD[place],
                target=target.rows(picked),
                terms=self.walk.terms,
                spare_RD=self.spare_CD[: block.num_rows],
                mixed_RD=None if self.mixed_CD is None else self.mixed_CD[: block.num_rows],
            )
            self.sums_4K[:, block.step] += torch.stack((sums.loss, sums.kl, sums.hits, sums.acceptance))

    def add_gradients(
        self, blocks: Sequence[_Block], *, grads: Sequence[Tensor | None], grad_DH: Tensor | None
    ) -> None:
        """Gradients of the rows of the chunk that was read, and what they add to the readout's."""
        logits_CD = self.logits_CD[: len(self.rows_CH)].to(self.walk.dtype)
        if any(grad_RH is not None for grad_RH in grads):
            product_CH = wide_product(logits_CD, self.readout_DH)
            for block, place in zip(blocks, _places(blocks), strict=True):
                grad_RH = grads[block.step]
                if grad_RH is not None:
                    grad_RH[block.rows] = product_CH[place].mul_(self.walk.weights[block.step])
        if grad_DH is not None:
            for block, place in zip(blocks, _places(blocks), strict=True):
                self.rows_CH[place].mul_(self.walk.weights[block.step])
            add_product(grad_DH, logits_CD.T, self.rows_CH)


def _places(blocks: Sequence[_Block]) -> list[slice]:
    """Where each block lies among the rows of its chunk."""
    ends = accumulate(block.num_rows for block in blocks)
    return [slice(end - block.num_rows, end) for end, block in zip(ends, blocks, strict=True)]
