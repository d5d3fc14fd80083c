"""What a head is judged by: the target's distribution at teacher positions, in one of two forms.

`HiddenTeacher` holds last hidden states (after the final norm); the readout's rows of the draft vocabulary make exact
distributions of them. `TopKTeacher` holds the log-probabilities of the k likeliest tokens of the whole vocabulary and
the mass of all others.

Over a draft vocabulary the top-k form knows S, the stored tokens that are in it. The rest of the mass is counted as
lying in the draft vocabulary too, as one bucket, and S and the bucket are renormalised. A bucket's loss is
-p_rest log(1 - sum_S q). When every draft token is stored there is no bucket. With k = V nothing is approximate.

Shapes: P teacher positions, R rows, C rows of a chunk, K stored tokens, H hidden, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HiddenTeacher:
    """Last states [P, H] after the final norm."""

    hidden_PH: Tensor

    def __len__(self) -> int:
        return self.hidden_PH.shape[0]

    def to(self, device: torch.device) -> HiddenTeacher:
        """The same rows on another device."""
        return HiddenTeacher(self.hidden_PH.to(device))

    def rows(self, indices_R: Tensor | slice) -> HiddenTeacher:
        """Some of the rows."""
        return HiddenTeacher(self.hidden_PH[indices_R])


@dataclass(frozen=True)
class TopKTeacher:
    """Target ids [P, K] of the likeliest tokens, likeliest first, their log-probabilities, and the mass [P] of the rest."""

    ids_PK: Tensor
    log_probs_PK: Tensor
    tail_P: Tensor

    def __len__(self) -> int:
        return self.ids_PK.shape[0]

    def to(self, device: torch.device) -> TopKTeacher:
        """The same rows on another device."""
        return TopKTeacher(self.ids_PK.to(device), self.log_probs_PK.to(device), self.tail_P.to(device))

    def rows(self, indices_R: Tensor | slice) -> TopKTeacher:
        """Some of the rows."""
        return TopKTeacher(self.ids_PK[indices_R], self.log_probs_PK[indices_R], self.tail_P[indices_R])


Teacher = HiddenTeacher | TopKTeacher


def concatenate(teachers: Sequence[Teacher]) -> Teacher:
    """The rows of several teachers of one kind, end to end."""
    hidden = [teacher for teacher in teachers if isinstance(teacher, HiddenTeacher)]
    if hidden:
        assert len(hidden) == len(teachers), "a batch mixes kinds of teachers"
        return HiddenTeacher(torch.cat([teacher.hidden_PH for teacher in hidden]))
    stored = [teacher for teacher in teachers if isinstance(teacher, TopKTeacher)]
    return TopKTeacher(
        torch.cat([teacher.ids_PK for teacher in stored]),
        torch.cat([teacher.log_probs_PK for teacher in stored]),
        torch.cat([teacher.tail_P for teacher in stored]),
    )


def top_k_teacher(last_PH: Tensor, *, readout_VH: Tensor, k: int, chunk_positions: int = 256) -> TopKTeacher:
    """The top-k form of last states: distributions over the whole vocabulary in float32, cut to k tokens."""
    parts: list[TopKTeacher] = []
    for chunk_CH in last_PH.split(chunk_positions):
        log_CV = torch.log_softmax((chunk_CH.to(readout_VH.dtype) @ readout_VH.T).float(), dim=-1)
        log_CK, ids_CK = log_CV.topk(min(k, log_CV.shape[1]), dim=-1)
        # Summing what is left is exact where 1 - sum would cancel, and exactly 0 for k = V.
        tail_C = log_CV.exp_().scatter_(1, ids_CK, 0.0).sum(dim=-1)
        parts.append(TopKTeacher(ids_CK.int(), log_CK, tail_C))
    assert parts, "split of an empty tensor gives one empty chunk"
    joined = concatenate(parts)
    assert isinstance(joined, TopKTeacher)
    return joined


@dataclass(frozen=True)
class Distributions:
    """The target's distributions of C rows over the draft vocabulary.

    Attributes:
        probability_CD: probabilities; zero at draft tokens that only the bucket covers.
        negative_entropy_C: sum of p log p over tokens and bucket.
        best_C: likeliest draft token; -1 where no stored token is in the draft vocabulary.
        top_CD: probabilities of the k likeliest tokens, zero elsewhere; None without a top-k term.
        rest_C: mass of the bucket, and `outside_CD`, true at its tokens; None of a hidden teacher.
    """

    probability_CD: Tensor
    negative_entropy_C: Tensor
    best_C: Tensor
    top_CD: Tensor | None
    rest_C: Tensor | None = None
    outside_CD: Tensor | None = None


def hidden_distributions(hidden_CH: Tensor, *, readout_DH: Tensor, top_k: int | None) -> Distributions:
    """Distributions from last states and the target's readout rows of the draft vocabulary; `top_k` None: no such term."""
    log_CD = torch.log_softmax((hidden_CH.to(readout_DH.dtype) @ readout_DH.T).float(), dim=-1)
    probability_CD = log_CD.exp()
    return Distributions(
        probability_CD,
        (probability_CD * log_CD).sum(dim=-1),
        log_CD.argmax(dim=-1),
        None if top_k is None else _cut(probability_CD, top_k),
    )


def top_k_distributions(teacher: TopKTeacher, *, draft_to_target_D: Tensor, top_k: int | None) -> Distributions:
    """Distributions from stored log-probabilities, over the draft vocabulary of ascending target ids."""
    num_draft = draft_to_target_D.shape[0]
    log_CK, places_CK, known_CK = _in_vocabulary(teacher, draft_to_target_D)
    all_known_C = known_CK.sum(dim=-1) == num_draft
    log_tail_C = teacher.tail_P.float().log().masked_fill(all_known_C, float("-inf"))
    # No stored token is in the vocabulary and no tail is left by rounding: nothing is known, so the bucket has it all.
    unknown_C = ~(known_CK.any(dim=-1) | log_tail_C.isfinite())
    log_tail_C = log_tail_C.masked_fill(unknown_C, 0.0)
    total_C1 = torch.logsumexp(torch.cat((log_CK, log_tail_C[:, None]), dim=-1), dim=-1, keepdim=True)
    log_CK, log_rest_C = log_CK - total_C1, log_tail_C - total_C1[:, 0]
    # Tokens outside the vocabulary are scattered into one column more, which is cut off.
    p_CK = log_CK.exp()
    probability_CD = p_CK.new_zeros((len(teacher), num_draft + 1)).scatter_(1, places_CK, p_CK)[:, :num_draft]
    outside_CD = torch.ones_like(probability_CD, dtype=torch.bool)
    outside_CD = torch.cat((outside_CD, outside_CD[:, :1]), dim=1).scatter_(1, places_CK, False)[:, :num_draft]
    rest_C = log_rest_C.exp()
    negative_entropy_C = torch.xlogy(p_CK, p_CK).sum(dim=-1) + torch.xlogy(rest_C, rest_C)
    best_C = places_CK.gather(1, log_CK.argmax(dim=-1, keepdim=True))[:, 0]
    return Distributions(
        probability_CD,
        negative_entropy_C,
        best_C.masked_fill(~known_CK.any(dim=-1), -1),
        None if top_k is None else _cut(probability_CD, top_k),
        rest_C,
        outside_CD,
    )


def _in_vocabulary(teacher: TopKTeacher, draft_to_target_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stored log-probabilities with -inf outside the draft vocabulary, draft ids (D outside), and which are inside."""
    ids_CK = teacher.ids_PK.long()
    places_CK = torch.searchsorted(draft_to_target_D, ids_CK)
    found_CK = draft_to_target_D[places_CK.clamp_max(draft_to_target_D.shape[0] - 1)]
    known_CK = found_CK == ids_CK
    log_CK = teacher.log_probs_PK.float().masked_fill(~known_CK, float("-inf"))
    return log_CK, places_CK.masked_fill(~known_CK, draft_to_target_D.shape[0]), known_CK


def _cut(probability_CD: Tensor, k: int) -> Tensor:
    values, indices = probability_CD.topk(min(k, probability_CD.shape[1]), dim=-1)
    return torch.zeros_like(probability_CD).scatter_(1, indices, values)
