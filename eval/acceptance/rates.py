"""Rates of acceptance from counts per verification step: tau, by position in the chain, and what was verified for nothing.

Every function takes one list of counts per request, one count per step that verified at least one drafted token.
tau is the mean number of tokens per such step, the target's own (bonus) token included. Two estimators are in use
and can differ by a quarter, because long answers are often the badly accepted ones; both are computed. Counts are of
tokens that the engine accepted, or of those *received*: without what it accepted behind the end of the answer (steps.py).
Speed and an offline walk over the answer know the received ones; how good the head is at a position of chain or answer, the
accepted ones, since a chain that the answer's end cut short is no miss.

*marginal* rate of position i: share of all steps that accept at least i drafted tokens, so that tau is 1 plus their
sum. *conditional* rate: the same among steps that accepted i - 1 and drafted an i-th token. Where every step drafts k
tokens the marginals are the products of the conditionals. Where k differs from step to step (a schedule, n-gram lookup) a
step that drafted less than i tokens counts as a miss in the marginal of i, but says nothing about it: the *product-limit*
rate (Kaplan and Meier 1958: short chains are censored observations) is the product of the conditionals, the share to
expect if every step drafted i tokens, provided that k was chosen without looking at the text. n-gram lookup does look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = Sequence[Sequence[int]]
"""Per request, per step."""


def tau_step_weighted(accepted: Counts) -> float | None:
    """1 + accepted tokens / steps over all steps of all requests; None without steps."""
    steps = sum(len(request) for request in accepted)
    return 1 + sum(sum(request) for request in accepted) / steps if steps else None


def tau_request_mean(accepted: Counts) -> float | None:
    """Mean over requests of each request's own tau; None without steps."""
    taus = request_taus(accepted)
    return float(np.mean(taus)) if taus else None


def request_taus(accepted: Counts) -> list[float]:
    """tau of each request that has steps."""
    return [1 + sum(request) / len(request) for request in accepted if request]


def marginal_rates(accepted: Counts, *, draft_length: int) -> list[float]:
    """Share of steps that accept at least 1, 2, ... `draft_length` tokens; empty without steps."""
    steps = _flat(accepted)
    if not steps.size:
        return []
    return [float(np.mean(steps >= position)) for position in range(1, draft_length + 1)]


def conditional_rates(accepted: Counts, drafted: Counts, *, draft_length: int) -> list[float | None]:
    """Acceptance of position i among steps that accepted i - 1 tokens and drafted i; None where no step did."""
    taken, offered = _flat(accepted), _flat(drafted)
    rates: list[float | None] = []
    for position in range(1, draft_length + 1):
        tried = (taken >= position - 1) & (offered >= position)
        rates.append(float(np.mean(taken[tried] >= position)) if tried.any() else None)
    return rates


def product_limit_rates(conditional: Sequence[float | None]) -> list[float | None]:
    """Marginal rates to expect if every step drafted the whole chain; None from the first position nobody tried."""
    rates: list[float | None] = []
    product: float | None = 1.0
    for rate in conditional:
        # Nobody tries a position behind one that was always missed, and it is then known to be missed too.
        known = product is not None and (rate is not None or product == 0)
        product = product * (rate or 0.0) if known and product is not None else None
        rates.append(product)
    return rates


def tau_at_shorter_chains(received: Counts, *, draft_length: int) -> list[float]:
    """tau if every chain had been cut to 1, 2, ... `draft_length` tokens; empty without steps."""
    steps = _flat(received)
    if not steps.size:
        return []
    return [1 + float(np.mean(np.minimum(steps, length))) for length in range(1, draft_length + 1)]


def wasted_tokens(received: Counts, drafted: Counts) -> dict[str, float] | None:
    """Tokens that the target verified for nothing: drafted and not received; None without steps.

    A step of k drafted tokens verifies k + 1 positions, of which tau bring a token.

    Returns:
        verified: mean positions verified a step (k + 1). wasted: mean of k - (tau - 1). share: of the verified positions.
    """
    taken, offered = _flat(received), _flat(drafted)
    if not taken.size:
        return None
    wasted, verified = float(np.mean(offered - taken)), float(np.mean(offered + 1))
    return {"verified": verified, "wasted": wasted, "share": wasted / verified}


def by_drafted_length(received: Counts, drafted: Counts) -> list[dict[str, Any]]:
    """Steps and tau by the number of tokens a step drafted: one row where k is fixed."""
    taken, offered = _flat(received), _flat(drafted)
    rows = []
    for length in sorted(set(offered.tolist())):
        chosen = taken[offered == length]
        rows.append({"drafted": length, "steps": int(chosen.size), "tau": 1 + float(np.mean(chosen))})
    return rows


def _flat(counts: Counts) -> NDArray[np.int64]:
    return np.array([count for request in counts for count in request], dtype=np.int64)
