"""Acceptance of drafted tokens, from the counts the engine reports for every verification step of every request."""

from eyas.eval.acceptance.loops import LOOP_NGRAM, LOOP_SHARE, is_loop, repeated_ngram_share
from eyas.eval.acceptance.rates import conditional_rates, marginal_rates, tau_request_mean, tau_step_weighted
from eyas.eval.acceptance.reconcile import reconcile
from eyas.eval.acceptance.rows import acceptance_results, acceptance_rows, offline_of
from eyas.eval.acceptance.steps import accepted_in_answer
from eyas.eval.acceptance.summary import acceptance_summary

__all__ = [
    "LOOP_NGRAM",
    "LOOP_SHARE",
    "accepted_in_answer",
    "acceptance_results",
    "acceptance_rows",
    "acceptance_summary",
    "conditional_rates",
    "is_loop",
    "marginal_rates",
    "offline_of",
    "reconcile",
    "repeated_ngram_share",
    "tau_request_mean",
    "tau_step_weighted",
]
