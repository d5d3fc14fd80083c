"""Exact tests of pairs of answers, and what zero failures exclude."""

from __future__ import annotations

from eyas.eval.distributions import incomplete_beta


def binomial_tail(successes: int, trials: int, *, probability: float = 0.5) -> float:
    """P(X >= successes) for X binomial with `trials` and `probability`."""
    if successes <= 0:
        return 1.0
    return incomplete_beta(probability, successes, trials - successes + 1) if successes <= trials else 0.0


def mcnemar_one_sided(only_left: int, only_right: int) -> float:
    """p-value of "the left is worse": pairs in which only the left failed against pairs in which only the right did.

    Under the null a discordant pair falls to either side with probability 1/2 (McNemar 1947, exact form).
    """
    return binomial_tail(only_left, only_left + only_right)


def mcnemar_two_sided(only_left: int, only_right: int) -> float:
    """p-value of "the two differ" from the discordant pairs."""
    return min(1.0, 2 * binomial_tail(max(only_left, only_right), only_left + only_right))


def excluded_rate(trials: int, *, confidence: float = 0.95) -> float | None:
    """Rate of failures that `trials` without a failure exclude: 1 - (1 - confidence)^(1 / trials); None without trials."""
    return 1 - (1 - confidence) ** (1 / trials) if trials else None
