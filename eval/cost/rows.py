"""The cost section of results.json, from raw records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.eval.cost import leviathan, model, oracle
from eyas.eval.cost.break_even_rows import INTERVAL_RULE, break_even_rows
from eyas.eval.cost.measured import Measured, measured_groups
from eyas.eval.cost.speedup import form_rows, median_errors, residual_rows, speedup_rows
from eyas.eval.cost.steps import all_blocks
from eyas.eval.cost.tau_min import tau_min_curves, tau_min_rows
from eyas.eval.records import AR, ArmFacts, Cells

DRAWS = 400


def cost_results(
    cells: Cells, arms: Mapping[str, ArmFacts], acceptance_rows: Sequence[Mapping[str, Any]], *, seed: int
) -> dict[str, Any]:
    """Everything about cost, as JSON-able values. Empty lists where step times are missing.

    Args:
        cells: blocks by cell, arm and start.
        arms: what the arms are.
        acceptance_rows: the acceptance section's rows by cell (those with a batch size and tau's interval).
        seed: of the resampling of starts and prompts.

    Keys: `rules` (how sizes are held out and the form chosen), `fit`, `residuals`, `speedup` (predicted against
    measured), `errors` (medians at held-out sizes, whole session), `tau_min` (the key figure) and `tau_min_curves`,
    `break_even`, `leviathan`, `oracle`.
    """
    found = measured_groups(cells, arms)
    drawn = [each.times.draws(DRAWS, seed=seed) for each in found]
    speedups = [speedup_rows(each) for each in found]
    every_speedup = [row for rows in speedups for row in rows]
    return {
        "rules": {
            "held_out": model.HOLD_OUT_RULE,
            "form": model.CHOICE_RULE,
            "break_even": INTERVAL_RULE,
            "draws": DRAWS,
        },
        "fit": [_fit_row(each, rows) for each, rows in zip(found, speedups, strict=True)],
        "residuals": [row for each in found for row in residual_rows(each)],
        "speedup": every_speedup,
        "errors": median_errors(every_speedup),
        "tau_min": [
            row
            for each, draws in zip(found, drawn, strict=True)
            for row in tau_min_rows(each, drawn=draws, acceptance_cells=acceptance_rows)
        ],
        "tau_min_curves": [row for each in found for row in tau_min_curves(each)],
        "break_even": [
            row
            for each, draws in zip(found, drawn, strict=True)
            for row in break_even_rows(each, times=draws, draws=DRAWS, seed=seed)
        ],
        "leviathan": [row for each in found for row in leviathan_rows(each)],
        "oracle": [row for each in found for row in oracle_rows(each)],
    }


def _fit_row(measured: Measured, speedups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **measured.group._asdict(),
        "form": measured.fit.form,
        "constants": measured.fit.constants(),
        "fitted_batch_sizes": measured.fitted,
        "held_out_batch_sizes": measured.held_out,
        "forms": form_rows(measured),
        "taus": {arm: measured.taus[arm] for arm in measured.arms},
        "start_sd": measured.times.spread(),
        **median_errors(speedups),
    }


def leviathan_rows(measured: Measured) -> list[dict[str, Any]]:
    """Per head arm: Leviathan's expected tokens and speedup, with the alpha and c that went in, beside what was measured."""
    rows = []
    for arm in measured.arms:
        facts, smallest = measured.facts[arm], measured.sizes[0]
        alpha = leviathan.pooled_alpha(*_traces(measured, arm))
        plain, drafted = measured.seconds(AR, smallest), measured.seconds(arm, smallest)
        if facts.kind != "head" or alpha is None or plain is None or drafted is None:
            continue
        ratio = (drafted / plain - 1) / facts.draft_length
        rows.append(
            {
                **measured.group._asdict(),
                "arm": arm,
                "draft_length": facts.draft_length,
                "alpha": alpha,
                "alpha_is": leviathan.ALPHA,
                "cost_ratio": ratio,
                "cost_ratio_is": leviathan.COST_RATIO,
                "expected_tokens": leviathan.expected_tokens(alpha, facts.draft_length),
                "tau": measured.taus[arm],
                "speedup": leviathan.speedup(alpha, facts.draft_length, ratio),
            }
        )
    return rows


def _traces(measured: Measured, arm: str) -> tuple[list[list[int]], list[list[int]]]:
    """Accepted and drafted counts of every request of an arm at its largest batch size, all starts."""
    size = max(size for size in measured.sizes if arm in measured.by_size[size])
    requests = [request for cell in all_blocks(measured.by_size[size][arm]) for request in cell.requests]
    return [each.per_step_accepted or [] for each in requests], [each.per_step_drafted or [] for each in requests]


def oracle_rows(measured: Measured) -> list[dict[str, Any]]:
    """Per batch size: the oracle's speedup from the traces of the longest head chain, beside the best fixed chain."""
    heads = [arm for arm in measured.arms if measured.facts[arm].kind == "head"]
    if not heads:
        return []
    longest = max(heads, key=lambda arm: measured.facts[arm].draft_length)
    drafts = oracle.mean_accepted(_traces(measured, longest)[0])
    rows = []
    for size in measured.sizes:
        plain, tau = measured.seconds(AR, size), measured.tau_at(longest, size)
        times = {arm: seconds for arm in heads if (seconds := measured.seconds(arm, size)) is not None}
        if plain is None or tau is None or drafts is None or longest not in times:
            continue
        by_length = {0: plain} | {measured.facts[arm].draft_length: seconds for arm, seconds in times.items()}
        fixed = {arm: (measured.tau_at(arm, size) or 0.0) * plain / seconds for arm, seconds in times.items()}
        rows.append(
            {
                **measured.group._asdict(),
                "batch_size": size,
                "arm": longest,
                "traced_draft_length": measured.facts[longest].draft_length,
                "label": oracle.LABEL,
                "drafts_per_step": drafts,
                "tau": tau,
                "speedup": oracle.oracle_speedup(by_length, drafts=drafts, tau=tau),
                "best_fixed_arm": max(fixed, key=lambda arm: fixed[arm]),
                "best_fixed_speedup": max(fixed.values()),
            }
        )
    return rows
