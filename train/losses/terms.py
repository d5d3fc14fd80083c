"""Terms that the token loss of a row is a weighted sum of, and what they ask of the teacher.

p is the target's distribution over the draft vocabulary, renormalised, and q = softmax(z) the head's:

- forward_kl: sum p log(p / q). Soft cross-entropy (EAGLE-3, arXiv 2503.01840) less the target's entropy, a constant.
- reverse_kl: sum q log(q / p). With forward KL, Jensen-Shannon and total variation: DistillSpec, arXiv 2310.08461.
- jensen_shannon: (sum p log(p / m) + sum q log(q / m)) / 2 with m = (p + q) / 2.
- total_variation: 1 - sum min(p, q), the share of drafts that speculative sampling rejects (arXiv 2211.17192).
- log_acceptance: -log sum min(p, q) (LK losses, arXiv 2602.23881).
- cross_entropy: -log q of the target's likeliest draft token.
- top_k: -sum of p log q over the target's k likeliest draft tokens (HASS, arXiv 2408.15766, eq. 3).

Where the teacher stored some tokens only, the rest of the draft vocabulary is one bucket (features/teacher.py), and the
first five, which sum f(p, q) over outcomes, take the bucket as one outcome. By the data-processing inequality they are
then lower bounds of their values over tokens. `cross_entropy` leaves rows out whose likeliest draft token was not stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.train.features.teacher import Teacher, TopKTeacher

# Below it, log_acceptance and its gradient stand still: they would overflow.
LEAST_ACCEPTANCE = 1e-30


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Weights of the terms; `top_k_tokens` is k of the term `top_k`."""

    forward_kl: float = 1.0
    reverse_kl: float = 0.0
    jensen_shannon: float = 0.0
    total_variation: float = 0.0
    log_acceptance: float = 0.0
    cross_entropy: float = 0.0
    top_k: float = 0.0
    top_k_tokens: int = 10

    @property
    def num_likeliest(self) -> int | None:
        """How many of the target's likeliest tokens the terms need by name; None without such a term."""
        return self.top_k_tokens if self.top_k > 0.0 else None

    @property
    def needs_log_p(self) -> bool:
        """Whether a term needs log p of every token."""
        return self.reverse_kl > 0.0 or self.jensen_shannon > 0.0

    @property
    def needs_acceptance(self) -> bool:
        """Whether a term is made of the acceptance of each row."""
        return self.total_variation > 0.0 or self.log_acceptance > 0.0

    @property
    def only_forward_kl(self) -> bool:
        """Whether no other term has a weight."""
        others = (self.reverse_kl, self.jensen_shannon, self.total_variation, self.log_acceptance)
        return not any((*others, self.cross_entropy, self.top_k))


def require_terms(terms: TokenLoss, *, teacher: Teacher) -> None:
    """
    Raises:
        ValueError: the top-k term wants more tokens than a top-k teacher stored.
    """
    wanted = terms.num_likeliest
    if isinstance(teacher, TopKTeacher) and wanted is not None and wanted > teacher.ids_PK.shape[1]:
        raise ValueError(
            f"train.losses.top_k_tokens={wanted} is more than the {teacher.ids_PK.shape[1]} tokens that the features "
            "hold of each teacher distribution; lower it, or raise features.teacher_k and extract again"
        )
