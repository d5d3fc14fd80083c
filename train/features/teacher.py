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
from math import log

import torch
from torch import Tensor

from eyas.train.matmul import wide_dtype, wide_product

# What counts as the probability of an outcome of probability 0 under a logarithm: about the smallest normal float32.
LEAST_P = 1e-37


@dataclass(frozen=True)
class HiddenTeacher:
    """Last states [P, H] after the final norm."""

    hidden_PH: Tensor

    def __len__(self) -> int:
        return self.hidden_PH.shape[0]

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
        log_CV = torch.log_softmax(wide_product(chunk_CH.to(readout_VH.dtype), readout_VH.T), dim=-1)
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
        log_CD: log-probabilities, finite also where a probability is 0; None unless asked for.
        likeliest_Ck: the k likeliest draft tokens, and `likeliest_p_Ck`, their probabilities; None unless asked for.
        rest_C: mass of the bucket, and `outside_CD`, true at its tokens; None of a hidden teacher.
    """

    probability_CD: Tensor
    negative_entropy_C: Tensor
    best_C: Tensor
    log_CD: Tensor | None = None
    likeliest_Ck: Tensor | None = None
    likeliest_p_Ck: Tensor | None = None
    rest_C: Tensor | None = None
    outside_CD: Tensor | None = None

    def rows(self, indices_R: Tensor | slice) -> Distributions:
        """Some of the rows; of a slice, views."""
        return Distributions(
            self.probability_CD[indices_R],
            self.negative_entropy_C[indices_R],
            self.best_C[indices_R],
            *(
                None if part is None else part[indices_R]
                for part in (self.log_CD, self.likeliest_Ck, self.likeliest_p_Ck, self.rest_C, self.outside_CD)
            ),
        )


def hidden_distributions(
    hidden_CH: Tensor, *, readout_DH: Tensor, top_k: int | None, with_log: bool = False
) -> Distributions:
    """Distributions from last states and the target's readout rows of the draft vocabulary; `top_k` None: no such term."""
    logits_CD = wide_product(hidden_CH.to(readout_DH.dtype), readout_DH.T)
    log_CD = torch.log_softmax(logits_CD, dim=-1)
    probability_CD = torch.exp(log_CD, out=logits_CD)
    likeliest_Ck, likeliest_p_Ck = _likeliest(probability_CD, top_k)
    return Distributions(
        probability_CD,
        negative_entropy_C=torch.linalg.vecdot(probability_CD, log_CD),
        best_C=log_CD.max(dim=-1).indices,
        log_CD=log_CD if with_log else None,
        likeliest_Ck=likeliest_Ck,
        likeliest_p_Ck=likeliest_p_Ck,
    )


def top_k_distributions(
    teacher: TopKTeacher, *, draft_to_target_D: Tensor, top_k: int | None, with_log: bool = False
) -> Distributions:
    """Distributions from stored log-probabilities, over the draft vocabulary of ascending target ids."""
    num_draft = draft_to_target_D.shape[0]
    log_CK, places_CK, known_CK = _in_vocabulary(teacher, draft_to_target_D)
    all_known_C = known_CK.sum(dim=-1) == num_draft
    log_tail_C = teacher.tail_P.to(log_CK.dtype).log().masked_fill(all_known_C, float("-inf"))
    # No stored token is in the vocabulary and no tail is left by rounding: nothing is known, so the bucket has it all.
    unknown_C = ~(known_CK.any(dim=-1) | log_tail_C.isfinite())
    log_tail_C = log_tail_C.masked_fill(unknown_C, 0.0)
    total_C1 = torch.logsumexp(torch.cat((log_CK, log_tail_C[:, None]), dim=-1), dim=-1, keepdim=True)
    log_CK, log_rest_C = log_CK - total_C1, log_tail_C - total_C1[:, 0]
    p_CK, rest_C = log_CK.exp(), log_rest_C.exp()
    probability_CD = _scattered(p_CK, places_CK, num_draft=num_draft, elsewhere=0.0)
    outside_CD = _scattered(torch.zeros_like(known_CK), places_CK, num_draft=num_draft, elsewhere=True)
    best_C = places_CK.gather(1, log_CK.argmax(dim=-1, keepdim=True))[:, 0]
    likeliest_Ck, likeliest_p_Ck = _likeliest(probability_CD, top_k)
    floored_CK, floor = log_CK.clamp_min(log(LEAST_P)), log(LEAST_P)
    return Distributions(
        probability_CD,
        negative_entropy_C=torch.xlogy(p_CK, p_CK).sum(dim=-1) + torch.xlogy(rest_C, rest_C),
        best_C=best_C.masked_fill(~known_CK.any(dim=-1), -1),
        log_CD=_scattered(floored_CK, places_CK, num_draft=num_draft, elsewhere=floor) if with_log else None,
        likeliest_Ck=likeliest_Ck,
        likeliest_p_Ck=likeliest_p_Ck,
        rest_C=rest_C,
        outside_CD=outside_CD,
    )


def _scattered(values_CK: Tensor, places_CK: Tensor, *, num_draft: int, elsewhere: float | bool) -> Tensor:
    """Values at their draft tokens. What is outside the vocabulary goes into one column more, which is cut off."""
    full_CE = values_CK.new_full((values_CK.shape[0], num_draft + 1), elsewhere)
    return full_CE.scatter_(1, places_CK, values_CK)[:, :num_draft]


def _in_vocabulary(teacher: TopKTeacher, draft_to_target_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stored log-probabilities with -inf outside the draft vocabulary, draft ids (D outside), and which are inside."""
    ids_CK = teacher.ids_PK.long()
    places_CK = torch.searchsorted(draft_to_target_D, ids_CK)
    found_CK = draft_to_target_D[places_CK.clamp_max(draft_to_target_D.shape[0] - 1)]
    known_CK = found_CK == ids_CK
    wide = wide_dtype(teacher.log_probs_PK.dtype)
    # A stored probability of 0 is kept finite: where all are 0, they would not renormalise.
    log_CK = teacher.log_probs_PK.to(wide).clamp_min(-1e4).masked_fill(~known_CK, float("-inf"))
    return log_CK, places_CK.masked_fill(~known_CK, draft_to_target_D.shape[0]), known_CK


def _likeliest(probability_CD: Tensor, k: int | None) -> tuple[Tensor | None, Tensor | None]:
    """The k likeliest tokens and their probabilities."""
    if k is None:
        return None, None
    values_Ck, indices_Ck = probability_CD.topk(min(k, probability_CD.shape[1]), dim=-1)
    return indices_Ck, values_Ck
